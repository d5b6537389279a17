from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import forms, openai
from routing.openai import Refusal, peek, rewrite, usage_to_add

CHAT = "/v1/chat/completions"
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
READ = {"model", "stream", "stream_options", *openai.BOUNDS[CHAT]}
names = st.text().filter(lambda name: name not in READ)
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n ")])


def refused(body: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        peek(body)
    return caught.value


@given(st.dictionaries(names, json_values, max_size=5), st.text(min_size=1), separators, st.booleans())
def test_every_object_with_a_model_is_understood_however_it_is_written(
    others: dict[str, Any], model: str, marks: tuple[str, str], ascii_only: bool
) -> None:
    try:
        model.encode()
        json.dumps(others, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        ascii_only = True
        model = "m"
        others = {}
    body = json.dumps({**others, "model": model}, separators=marks, ensure_ascii=ascii_only).encode()
    seen = peek(body)
    assert seen.model == model
    assert json.loads(body[slice(*seen.model_span)]) == model


@given(st.dictionaries(names, st.integers(), min_size=1, max_size=4), separators, st.data())
def test_a_field_that_stands_twice_is_refused_by_name(
    others: dict[str, int], marks: tuple[str, str], data: st.DataObject
) -> None:
    twice = data.draw(st.sampled_from(sorted(others)))
    value = data.draw(json_values)
    pairs = [*others.items(), ("model", "m")]
    pairs.insert(data.draw(st.integers(0, len(pairs))), (twice, value))
    comma, colon = marks
    text = "{" + comma.join(json.dumps(name) + colon + json.dumps(each) for name, each in pairs) + "}"
    refusal = refused(text.encode())
    assert refusal.code == "body_invalid"
    assert refusal.param == twice[:60]
    assert "twice" in refusal.message


@given(st.dictionaries(names, json_values, max_size=4), separators, st.sampled_from(["absent", None, {}, False, True]))
def test_rewriting_changes_the_model_and_usage_and_not_one_byte_more(
    others: dict[str, Any], marks: tuple[str, str], options: Any
) -> None:
    given_body = {**others, "stream": True, "model": "alias"}
    if options != "absent":
        given_body["stream_options"] = {"include_usage": options} if isinstance(options, bool) else options
    body = json.dumps(given_body, separators=marks).encode()
    seen = peek(body)
    add = usage_to_add(CHAT, seen, body)
    assert add is (options is not True)
    new = rewrite(body, seen, model=b'"canonical"', add_usage=add)
    assert json.loads(new) == {**given_body, "model": "canonical", "stream_options": {"include_usage": True}}
    untouched = new.replace(b'"canonical"', b'"alias"', 1)
    if options == "absent":
        assert untouched.replace(b'"stream_options":{"include_usage":true},', b"", 1) == body
    assert len(body[: seen.model_span[0]]) + len(body[seen.model_span[1] :]) == len(body) - len(b'"alias"')


def test_other_stream_options_are_kept_and_odd_ones_left_to_the_engine() -> None:
    body = b'{"model":"m","stream":true,"stream_options":{"continuous_usage_stats":true}}'
    new = rewrite(body, peek(body), model=None, add_usage=True)
    assert json.loads(new)["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
    odd = b'{"model":"m","stream":true,"stream_options":"x"}'
    assert usage_to_add(CHAT, peek(odd), odd) is False
    assert usage_to_add("/v1/embeddings", peek(body), body) is False
    assert rewrite(body, peek(body), model=None, add_usage=False) is body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"hello", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"42", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"model":"m","a":NaN}', "not valid JSON"),
        (b'{"model":"\\ud800"}', "not valid JSON"),
        (b'{"model":"m","a":"\xff"}', "not UTF-8"),
        (b'{"model":"m","a":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "too deeply"),
        (b"\x1f\x8b\x08\x00", "compressed"),
        (b"\x28\xb5\x2f\xfd\x00", "compressed"),
        (b'{"model":"m"} x', "not valid JSON"),
        (b"{}", "`model`"),
        (b'{"model":null}', "`model`"),
        (b'{"model":7}', "`model`"),
        (b'{"model":""}', "`model`"),
        (b'{"model":"m","stream":"true"}', "`stream`"),
        (b'{"model":"m","stream":1}', "`stream`"),
    ],
)
def test_a_bad_body_is_refused_with_what_is_wrong(body: bytes, says: str) -> None:
    refusal = refused(body)
    assert (refusal.code, refusal.kind.status) == ("body_invalid", 400)
    assert says in refusal.message


def test_a_number_that_begins_like_its_double_is_seen_as_one() -> None:
    assert refused(b'{"model":"m","a":12,"a":1}').param == "a"


def test_nulls_and_odd_bounds_are_for_the_engine_to_judge() -> None:
    seen = peek(b'{"model":"m","max_tokens":null,"stream":null,"tools":null,"stream_options":null}')
    assert (seen.stream, seen.max_tokens, seen.asks_usage) == (False, None, False)
    assert peek(b'{"model":"m","max_tokens":5,"max_completion_tokens":7}', CHAT).max_tokens == 7
    assert peek(b'{"model":"m","max_tokens":true}', CHAT).max_tokens is None
    assert peek(b'{"model":"m","max_tokens":-1}', CHAT).max_tokens is None
    assert peek('{"model":"中文模型"}'.encode()).model == "中文模型"
    assert peek(b'{"\\u006dodel":"m"}').model == "m"


def test_a_long_value_is_named_short_in_the_message() -> None:
    name = "x" * 500
    assert refused(f'{{"model":"m","{name}":1,"{name}":2}}'.encode()).param == "x" * 60


BOUNDARY = b"----b1"


def form(*fields: tuple[str, str]) -> bytes:
    parts = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (BOUNDARY, name.encode(), value.encode())
        for name, value in fields
    )
    return parts + b"--" + BOUNDARY + b"--\r\n"


def test_a_form_names_its_model_and_gets_another_in_its_place() -> None:
    body = form(("file", "RIFF\r\n\r\nmodel"), ("model", "alias"), ("stream", "True"))
    seen = forms.peek(body, BOUNDARY)
    assert (seen.model, seen.stream) == ("alias", True)
    assert rewrite(body, seen, model=b"canonical", add_usage=False) == form(
        ("file", "RIFF\r\n\r\nmodel"), ("model", "canonical"), ("stream", "True")
    )


@pytest.mark.parametrize(
    "body",
    [form(), form(("file", "x")), form(("model", "")), form(("model", "a"), ("model", "b"))],
)
def test_a_form_without_one_model_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal, match="model"):
        forms.peek(body, BOUNDARY)


def test_a_form_is_read_no_further_than_its_first_parts() -> None:
    few = form(*[("a", "1")] * (forms.FORM_PARTS - 1), ("model", "m"))
    assert forms.peek(few, BOUNDARY).model == "m"
    with pytest.raises(Refusal, match="parts"):
        forms.peek(form(("model", "m"), *[("a", "1")] * forms.FORM_PARTS, ("model", "other")), BOUNDARY)


PART = b"--" + BOUNDARY + b"\r\nContent-Disposition: form-data; "
MODEL = PART + b'name="model"\r\n\r\nm\r\n'
END = b"--" + BOUNDARY + b"--\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--" + BOUNDARY,
        b"preamble\r\n" + MODEL + END,
        MODEL,
        MODEL + PART + b'name="model"; x="; name=y"\r\n\r\nother\r\n' + END,
        MODEL + PART + b'name="y"; name="model"\r\n\r\nother\r\n' + END,
        MODEL + PART + b"name*=utf-8''model; name=y\r\n\r\nother\r\n" + END,
        MODEL + PART + b'name="y"\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n' + END,
        MODEL + PART + b'x="y";\r\n name="model"\r\n\r\nother\r\n' + END,
        MODEL + PART + b'x="y"\n; name="model"\r\n\r\nother\r\n' + END,
        MODEL + PART + b'name="model\r\n\r\nother\r\n' + END,
        MODEL + b"--" + BOUNDARY + b"x\r\n" + MODEL + END,
        MODEL + PART + b'name="y"\r\n\r\n' + MODEL + END,
        MODEL + b"--" + BOUNDARY + b"\r\nContent-Type: text/plain\r\n\r\nx\r\n" + END,
        MODEL + PART + b'name="file"\r\nContent-Transfer-Encoding: base64\r\n\r\nbQ==\r\n' + END,
        MODEL + PART + b'name="' + b"x" * forms.PART_HEAD_BYTES + b'"\r\n\r\n1\r\n' + END,
    ],
)
def test_a_form_that_an_engine_might_read_otherwise_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        forms.peek(body, BOUNDARY)


def test_forms_as_clients_write_them_are_read() -> None:
    body = b"\r\n" + PART + b'name="file"; filename="a \\"b\\".wav"; filename*=utf-8\'\'a%20b\r\n'
    body += b"Content-Type: audio/wav\r\n\r\nRIFF\r\n" + PART + b"name=model\r\n\r\nm\r\n" + END + b"epilogue"
    assert forms.peek(body, BOUNDARY).model == "m"
    assert forms.peek(MODEL + PART + b'name="prompt"\r\n\r\n\r\n' + END, BOUNDARY).model == "m"


@pytest.mark.parametrize(
    ("header", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'Multipart/Form-Data; charset=utf-8 ;boundary="a b"', b"a b"),
        (b"multipart/form-data", None),
        (b"application/json", None),
    ],
)
def test_the_boundary_is_read_from_the_content_type(header: bytes, boundary: bytes | None) -> None:
    assert forms.boundary(header) == boundary


@pytest.mark.parametrize(
    "rest",
    [b"charset=utf-7; boundary=a", b"boundary=a; boundary=b", b"boundary=a,multipart/form-data; boundary=b", b"x=y"],
)
def test_a_content_type_that_an_engine_might_read_otherwise_is_refused(rest: bytes) -> None:
    with pytest.raises(Refusal):
        forms.boundary(b"multipart/form-data; " + rest)


@pytest.mark.parametrize("code", sorted(openai.ERRORS))
def test_every_error_is_one_openai_object_and_retries_only_where_the_table_says(code: str) -> None:
    refusal = Refusal(code, "Say what to do.", param="p", retry_after_s=0.2)
    assert json.loads(openai.envelope(refusal)) == {
        "error": {"message": "Say what to do.", "type": refusal.kind.type, "param": "p", "code": code}
    }
    assert (refusal.retry_after_s is not None) == openai.ERRORS[code].retry
    assert refusal.kind.retry == (refusal.kind.status in (429, 503))


def test_an_unknown_model_suggests_only_what_the_key_may_see() -> None:
    assert "Did you mean smollm2?" in openai.model_unknown("smollm3", ["smollm2", "other"]).message
    assert "Did you mean" not in openai.model_unknown("zzz", ["smollm2"]).message
    assert "none yet" in openai.model_unknown("m", []).message
    assert len(openai.model_unknown("x" * 5000, []).message) < 300


def test_what_an_engine_says_is_found_in_every_shape() -> None:
    assert openai.error_text(b'{"error":{"message":"a"}}') == "a"
    assert openai.error_text(b'{"error":"Unauthorized"}') == "Unauthorized"
    assert openai.error_text(b'{"message":"b"}') == "b"
    assert openai.error_text(b'{"detail":[{"loc":1}]}') == '[{"loc":1}]'
    assert openai.error_text(b"{}") == ""
    assert openai.error_text(b"<html>") == "<html>"
    assert openai.is_error(b'{"error":{"message":"a"}}')
    assert not openai.is_error(b'{"error":"x"}')
    assert not openai.is_error(b"<html>")
    wrapped = json.loads(openai.engine_refusal(b"<b>no</b>", 404))
    assert wrapped["error"]["code"] == "route_unknown"
    assert json.loads(openai.engine_refusal(b"", 422))["error"]["message"].endswith("status 422")


def test_a_broken_stream_ends_a_half_sent_event_first() -> None:
    event = openai.error_event(openai.stopping(), mid_event=True)
    assert event.startswith(b"\n\nevent: error\ndata: {")
    assert event.endswith(b"}\n\n")
    assert openai.error_event(openai.stopping(), mid_event=False).startswith(b"event: error")


def test_models_are_listed_in_openais_shape() -> None:
    listed = json.loads(openai.model_list(["a", "org/b"], 5))
    assert [card["id"] for card in listed["data"]] == ["a", "org/b"]
    assert json.loads(openai.model_card("a", 5)) == {"id": "a", "object": "model", "created": 5, "owned_by": "llmgw"}


@pytest.mark.parametrize(
    "members",
    [
        b"".join(b',"%d":1' % number for number in range(openai.MAX_MEMBERS)),
        b',"' + b"a" * openai.MAX_MEMBER_NAME + b'b":1',
    ],
)
@pytest.mark.parametrize("space", [b"", b" "])
def test_a_body_of_more_fields_than_can_be_looked_at_is_refused(members: bytes, space: bytes) -> None:
    with pytest.raises(Refusal, match="fields"):
        openai.peek(b'{"model":"m"' + space + members + b"}")


@pytest.mark.parametrize("name", ["model", "stream", "stream_options", "max_tokens", "n"])
@pytest.mark.parametrize("value", [b"9" * 5000, b"[1e400]", b" " + b"1" * 20_000])
def test_a_value_that_no_engine_could_read_is_refused_by_its_name(name: str, value: bytes) -> None:
    members = {"model": b'"m"', name: value}
    body = b"{" + b",".join(b'"%b":%b' % (key.encode(), each) for key, each in members.items()) + b"}"
    with pytest.raises(Refusal) as refused:
        openai.peek(body, CHAT)
    assert refused.value.param == name


def test_what_steers_a_terminal_is_left_out_of_what_an_engine_says() -> None:
    said = openai.error_text(b'{"error":{"message":"a\\u0000b\\u001b[2Jc"}}')
    assert said == "a b [2Jc"
    assert openai.error_text(b"x" * 5000) == "x" * openai.SAID_CHARACTERS
