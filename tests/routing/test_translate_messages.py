from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.openai import Refusal, envelope
from routing.translate.chat import ITEM_BYTES, LIMIT_BYTES, ChatStream
from routing.translate.messages import Messages
from tests.routing.chats import (
    DONE,
    USAGE,
    Talk,
    arguments,
    asked,
    calling,
    chunk,
    event,
    read,
    talks,
    through,
    translating,
    usage_chunk,
)
from tests.routing.test_sse import cuts, split

HI = [{"role": "user", "content": "hi"}]


def ask(**body: Any) -> dict[str, Any]:
    return asked(Messages(), {"model": "m", "max_tokens": 9, "messages": HI, **body})


def talk(*messages: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    found = ask(messages=list(messages), **body)["messages"]
    assert isinstance(found, list)
    return found


def opened(**body: Any) -> Messages:
    translation = Messages()
    asked(translation, {"max_tokens": 9, "messages": HI, **body})
    return translation


THINKING = {"thinking": {"type": "enabled", "budget_tokens": 2000}}


def stream(**body: Any) -> ChatStream:
    return opened(**body).stream()


# --- requests --------------------------------------------------------------------------------------------------------
def test_a_talk_with_a_system_prompt_becomes_one() -> None:
    system = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    body = {"system": system, "stop_sequences": ["END"], "temperature": 1, "top_k": 5, "metadata": {"user_id": "u"}}
    assert ask(**body, stream=False, service_tier="auto", top_p=None) == {
        "model": "real",
        "messages": [{"role": "system", "content": "one\ntwo"}, *HI],
        "max_tokens": 9,
        "stop": ["END"],
        "temperature": 1,
        "top_k": 5,
        "user": "u",
    }
    assert ask(system="brief", stream=True)["stream_options"] == {"include_usage": True}


def test_blocks_of_every_kind_have_their_place() -> None:
    said = talk(
        {"role": "user", "content": [{"type": "text", "text": "hé"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I call"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1]}},
                {"type": "tool_use", "id": "b", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "1"},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "no"},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
                    ],
                },
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
        {"role": "assistant", "content": []},
        {"role": "system", "content": "mind the time"},
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}]},
        {"role": "assistant", "content": "it is"},
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}

    def call(call_id: str, name: str, said: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": said}}

    assert said == [
        {"role": "user", "content": "hé"},
        {"role": "assistant", "content": "I call", "tool_calls": [call("a", "f", '{"x":[1]}'), call("b", "g", "{}")]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no"},
        {"role": "user", "content": [image, {"type": "text", "text": "go on"}]},
        {"role": "assistant", "content": None, "tool_calls": [call("c", "f", "{}")]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "mind the time"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]},
        {"role": "assistant", "content": "it is"},
    ]


def test_a_result_that_is_only_an_image_says_that_it_follows() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    said = talk({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image]}]})
    assert said[0]["content"] == "The image follows."
    assert said[1]["content"][0]["type"] == "image_url"


def test_documents_are_told_as_their_text() -> None:
    blocks = [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "one"}},
        {"type": "document", "source": {"type": "content", "content": "two"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "three"}]}},
    ]
    (said,) = talk({"role": "user", "content": blocks})
    assert [part["text"] for part in said["content"]] == ["T", "one", "two", "three"]


def test_tools_and_their_choice_are_nested() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools: list[dict[str, Any]] = [
        {"name": "f", "description": "does", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    ]
    tools.append({"type": "custom", "name": "g", "input_schema": {}, "strict": True})
    for choice, made in (
        ({"type": "auto"}, {}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}),
        ({"type": "any", "disable_parallel_tool_use": False}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "g"}, {"tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ):
        chat = ask(tools=tools, tool_choice=choice)
        assert chat["tools"] == [
            {"type": "function", "function": {"name": "f", "description": "does", "parameters": schema}},
            {"type": "function", "function": {"name": "g", "parameters": {}, "strict": True}},
        ]
        assert {name: chat[name] for name in ("tool_choice", "parallel_tool_calls") if name in chat} == made
    assert not {"tools", "tool_choice"} & set(ask(tools=[], tool_choice={"type": "any"}))


def test_an_answers_form_and_effort_are_asked_for() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    made = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}
    chat = ask(output_config={"effort": "low", "format": form})
    assert (chat["response_format"], chat["reasoning_effort"]) == (made, "low")
    assert ask(output_format=form)["response_format"] == made


def block(kind: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [kind]}]}


CONTENT = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers"),
        ({"input": "hi"}, "input"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": 7}]}, "messages[0].content"),
        ({"system": 7}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"metadata": "x"}, "metadata"),
        ({"thinking": "x"}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        (block({"type": "image", "source": {"type": "file", "file_id": "f"}}), f"{CONTENT}.source.type"),
        (block({"type": "image"}), f"{CONTENT}.source"),
        (block({"type": "image", "source": {"type": "base64", "data": "AA"}}), f"{CONTENT}.source.media_type"),
        (block({"type": "document", "source": {"type": "base64", "data": "AA"}}), f"{CONTENT}.source"),
        (block({"type": "document", "source": {"type": "file", "file_id": "f"}}), f"{CONTENT}.source"),
        (block({"type": "search_result"}), f"{CONTENT}.type"),
        (block({"type": "text"}), f"{CONTENT}.text"),
        (block({"type": "tool_result", "content": "x"}), f"{CONTENT}.tool_use_id"),
        (block({"type": "tool_use", "id": "a", "name": "f", "input": "{}"}, "assistant"), f"{CONTENT}.input"),
        (block({"type": "server_tool_use", "id": "a"}, "assistant"), f"{CONTENT}.type"),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as caught:
        ask(**body)
    assert (caught.value.code, caught.value.param) == ("body_invalid", param)
    assert f"`{param}`" in caught.value.message


# --- answers ---------------------------------------------------------------------------------------------------------
def answered(body: bytes, **asking: Any) -> dict[str, Any]:
    found = json.loads(opened(**asking).answer(body))
    assert isinstance(found, dict)
    return found


def whole(message: dict[str, Any], finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    return answered(json.dumps({"choices": [{"message": message, "finish_reason": finish, **more}]}).encode())


def test_an_answer_has_its_usage_and_its_ids() -> None:
    answer = answered(Talk(thought=["hm"], said=["hé"], calls=[['{"a":1}']], finish="tool_calls").whole(), **THINKING)
    assert answer == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "served",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "hé"},
            {"type": "tool_use", "id": "call_0", "name": "tool_0", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 4, "cache_read_input_tokens": 16, "output_tokens": 9},
    }


def test_thoughts_are_shown_only_to_who_asked_for_them() -> None:
    body = Talk(thought=["hm"], said=["a"]).whole()
    for thinking in ({}, {"thinking": None}, {"thinking": {"type": "disabled"}}):
        assert [each["type"] for each in answered(body, **thinking)["content"]] == ["text"]
    assert answered(body, thinking={"type": "adaptive"})["content"][0]["thinking"] == "hm"
    assert b"hm" not in through(stream(), Talk(thought=["hm"], said=["a"]).stream())
    assert stream().feed(chunk({"reasoning_content": "hm"})).endswith(b": keep-alive\n\n")


@pytest.mark.parametrize(
    ("message", "finish", "more", "reason"),
    [
        ({"content": "a"}, "stop", {}, "end_turn"),
        ({"content": "a"}, None, {}, "end_turn"),
        ({"content": ""}, "eos", {}, "end_turn"),
        ({"content": "a"}, "length", {}, "max_tokens"),
        ({"content": "a"}, "content_filter", {}, "refusal"),
        ({"refusal": "no"}, "stop", {}, "refusal"),
        ({"content": "a"}, "stop", {"stop_reason": "END"}, "stop_sequence"),
        ({"content": "a"}, "stop", {"matched_stop": "END"}, "stop_sequence"),
        ({"content": "a"}, "stop", {"stop_reason": 128009}, "end_turn"),
        ({"tool_calls": [{"function": {"name": "f"}}]}, "stop", {}, "tool_use"),
        ({"tool_calls": [{"function": {"name": "f"}}]}, "tool_calls", {"stop_reason": "</f>"}, "tool_use"),
        ({"content": "a"}, "tool_calls", {}, "end_turn"),
    ],
)
def test_every_reason_to_stop_has_its_word(
    message: dict[str, Any], finish: str | None, more: dict[str, Any], reason: str
) -> None:
    answer = whole(message, finish, **more)
    assert answer["stop_reason"] == reason
    assert answer["stop_sequence"] == ("END" if reason == "stop_sequence" else None)
    calls = [{"index": n, **each} for n, each in enumerate(message.get("tool_calls") or ())]
    sent = chunk({**message, "tool_calls": calls or None}) + chunk({}, finish, **more) + DONE
    assert rebuilt(checked(through(stream(), sent))) == {**answer, "model": "served"}


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        ("", {}),
        (" ", {}),
        ('{"a":1}', {"a": 1}),
        ('{"a":', {"invalid_arguments": '{"a":'}),
        ("[1]", {"invalid_arguments": "[1]"}),
        ("[" * 9000, {"invalid_arguments": "[" * 9000}),
    ],
)
def test_arguments_that_are_no_object_reach_whoever_checks_them(arguments: str, made: dict[str, Any]) -> None:
    answer = whole({"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})
    assert answer["content"] == [{"type": "tool_use", "id": "toolu_1_0", "name": "f", "input": made}]


def test_usage_that_was_not_said_or_only_in_part_breaks_nothing() -> None:
    assert whole({"content": "a"})["usage"] == {"input_tokens": 0, "output_tokens": 0}
    sent = chunk({"content": "a"}) + usage_chunk({"prompt_tokens": 3, "completion_tokens": 2}) + DONE
    assert checked(through(stream(), sent))[-2]["usage"] == {"input_tokens": 3, "output_tokens": 2}
    sent = chunk({"content": "a"}) + usage_chunk({"completion_tokens": 2}) + DONE
    assert checked(through(stream(), sent))[-2]["usage"] == {"input_tokens": 0, "output_tokens": 2}
    sent = chunk({"content": "a"}) + usage_chunk({"prompt_tokens": 2}) + usage_chunk({"odd": 1}) + DONE
    assert checked(through(stream(), sent))[-2]["usage"] == {"input_tokens": 2, "output_tokens": 0}


def test_what_is_no_answer_is_the_engines_failure() -> None:
    with pytest.raises(Refusal, match="translated"):
        opened().answer(b"<html>")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_shape(status: int, kind: str) -> None:
    sent = envelope(Refusal("body_invalid", "Say more.", param="input"))
    error = {"type": kind, "message": "Say more.", "code": "body_invalid", "param": "input"}
    assert json.loads(Messages().error(sent, status)) == {"type": "error", "error": error}


def test_an_error_without_words_has_some() -> None:
    assert json.loads(Messages().error(b'{"error":"boom"}', 500))["error"]["message"] == "The request failed."


@settings(deadline=None, max_examples=50)
@given(st.lists(arguments, min_size=1, max_size=4))
def test_calls_come_back_from_the_client_as_the_model_made_them(made: list[dict[str, Any]]) -> None:
    sent = Talk(said=["on it"], calls=[[json.dumps(each)] for each in made]).whole()
    content = answered(sent)["content"]
    assert [each["input"] for each in content[1:]] == made
    results = [{"type": "tool_result", "tool_use_id": f"call_{n}", "content": str(n)} for n in range(len(made))]
    said = talk(*HI, {"role": "assistant", "content": content}, {"role": "user", "content": results})
    calls = json.loads(sent)["choices"][0]["message"]["tool_calls"]
    assert said[1]["content"] == "on it"
    assert [(each["id"], each["function"]["name"]) for each in said[1]["tool_calls"]] == [
        (each["id"], each["function"]["name"]) for each in calls
    ]
    assert [json.loads(each["function"]["arguments"]) for each in said[1]["tool_calls"]] == made
    assert [each["tool_call_id"] for each in said[2:]] == [each["id"] for each in calls]


# --- streams ---------------------------------------------------------------------------------------------------------
def checked(out: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream: blocks begin and end one after the other, in order."""
    found = read(out)
    open_at: int | None = None
    begun = 0
    for each in found[1:-2]:
        match each["type"]:
            case "content_block_start":
                assert (open_at, each["index"]) == (None, begun)
                open_at, begun = begun, begun + 1
            case "content_block_delta":
                assert each["index"] == open_at
            case kind:
                assert (kind, each["index"]) == ("content_block_stop", open_at)
                open_at = None
    assert open_at is None
    assert [each["type"] for each in (found[0], *found[-2:])] == ["message_start", "message_delta", "message_stop"]
    return found


def rebuilt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream."""
    message: dict[str, Any] = events[0]["message"]
    said = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    pieces: list[str] = []
    for each in events:
        match each["type"]:
            case "content_block_start":
                message["content"].append(each["content_block"])
                pieces = []
            case "content_block_delta":
                pieces.append(each["delta"][said[each["delta"]["type"]]])
            case "content_block_stop":
                last = message["content"][-1]
                text = "".join(pieces)
                last.update({"input": json.loads(text or "{}")} if last["type"] == "tool_use" else {last["type"]: text})
            case "message_delta":
                message.update(each["delta"], usage=each["usage"])
    return message


@settings(deadline=None, max_examples=50)
@given(talks, cuts, st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_however_the_bytes_are_split_a_stream_says_what_the_whole_answer_says(
    talk: Talk, where: list[int], end: bytes
) -> None:
    sent = talk.stream().replace(b"\n", end)
    out = through(stream(**THINKING), *split(sent, where))
    assert out == through(stream(**THINKING), sent) == through(stream(**THINKING), talk.stream())
    assert rebuilt(checked(out)) == answered(talk.whole(), **THINKING)


def test_the_first_call_passes_as_it_comes_and_what_begins_after_it_waits() -> None:
    translated = stream(**THINKING)
    sent = translated.feed(chunk({"content": "a"}))
    sent += translated.feed(calling(0, "{", call_id="x", name="f"))
    assert b'"partial_json":"{"' in sent
    assert translated.feed(calling(1, "{", call_id="y", name="g")) == b""
    for piece in ("between", "\n"):
        assert translated.feed(chunk({"content": piece})) == b""
    assert translated.feed(chunk({"reasoning": "hm"})) == b""
    assert translated.feed(calling(2, call_id="z", name="h")) == b""
    assert translated.feed(calling(1, "}")) == b""
    sent += translated.feed(calling(0, "}"))
    assert b'"partial_json":"}"' in sent
    sent += translated.feed(chunk({}, "tool_calls") + DONE)
    content = rebuilt(checked(sent))["content"]
    assert [each.get("name") or each.get("text") or each["thinking"] for each in content] == [
        "a",
        "f",
        "g",
        "between\n",
        "hm",
        "h",
    ]


def test_what_waits_is_bounded_and_what_passes_is_not() -> None:
    waiting = stream()
    waiting.feed(calling(0, call_id="x", name="f") + calling(1, call_id="y", name="g"))
    passing = stream()
    piece, long = calling(1, "a" * 100_000), chunk({"content": "a" * 100_000})
    fed = 0
    while not waiting.done:
        waiting.feed(piece)
        passing.feed(long)
        fed += 100_000
    assert LIMIT_BYTES - 3 * ITEM_BYTES - 100_000 < fed <= LIMIT_BYTES + 100_000
    assert waiting.failure is not None
    passing.feed(long)
    assert not passing.done


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(
        [
            b"",
            chunk({"content": "a"}),
            chunk({"content": "a"}) + chunk({}, "stop") + usage_chunk(USAGE),
            calling(0, "{", call_id="x", name="f") + b"event: error\ndata: {}\n\n" + DONE,
            chunk({"content": "a"}) + event({"error": {"message": "boom"}}) + DONE,
            chunk({"content": "a"}) + chunk({}, "error") + DONE,
            DONE,
        ]
    ),
    cuts,
)
def test_a_broken_stream_ends_in_one_error_and_never_in_a_stop(sent: bytes, where: list[int]) -> None:
    translated = stream()
    events = read(through(translated, *split(sent, where)))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert [each["type"] for each in events].count("error") == 1
    assert not {"message_delta", "message_stop"} & {each["type"] for each in events}
    assert translated.failure is not None


# --- Anthropic's own client ------------------------------------------------------------------------------------------
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="k", base_url=url, max_retries=0)


ASKED: Any = {
    "model": "m",
    "max_tokens": 2048,
    "messages": HI,
    "tools": [{"name": "tool_0", "input_schema": {"type": "object"}}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
TALK = Talk(thought=["hm"], said=["hé", "llo"], calls=[['{"a"', ":1}"], ["{}"]], alternating=True, finish="tool_calls")


def test_anthropics_client_reads_an_answer() -> None:
    with translating(TALK.whole()) as (url, seen), client(url) as own:
        answer = own.messages.create(**ASKED)
    assert seen[0]["tools"][0]["function"]["name"] == "tool_0"
    assert [each.type for each in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (answer.stop_reason, answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == ("tool_use", 4, 16)


def test_anthropics_client_reads_a_stream() -> None:
    with translating(TALK.stream(), "sse") as (url, _), client(url) as own, own.messages.stream(**ASKED) as events:
        assert list(events.text_stream) == ["hé", "llo"]
        answer = events.get_final_message()
    assert [each.input for each in answer.content if each.type == "tool_use"] == [{"a": 1}, {}]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (4, 9)
    assert answer.stop_reason == "tool_use"


def test_anthropics_client_sees_a_broken_stream_and_an_error_as_such() -> None:
    with (
        translating(chunk({"content": "a"}), "sse") as (url, _),
        client(url) as own,
        pytest.raises(anthropic.APIStatusError, match="broke off"),
        own.messages.stream(**ASKED) as events,
    ):
        events.until_done()
    with (
        translating(envelope(Refusal("model_unknown", "No model m.")), status=404) as (url, _),
        client(url) as own,
        pytest.raises(anthropic.NotFoundError, match="No model m"),
    ):
        own.messages.create(**ASKED)
