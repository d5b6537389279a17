"""Streams of chat completions as Responses has them, and openai's own client with both."""

from __future__ import annotations

import json
from typing import Any, get_args

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent

from routing.openai import Refusal
from routing.translate.chat import ITEM_BYTES, LIMIT_BYTES
from tests.routing.chats import (
    BASE,
    DONE,
    Talk,
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
from tests.routing.test_translate_responses import opened, stream

EVENTS: dict[str, Any] = {
    get_args(each.model_fields["type"].annotation)[0]: each for each in get_args(get_args(ResponseStreamEvent)[0])
}


# --- streams ---------------------------------------------------------------------------------------------------------
def checked(out: bytes) -> list[dict[str, Any]]:
    """The events, each as openai's own client understands it, numbered without a gap, whatever opens closed."""
    found = read(out)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    for each in found:
        EVENTS[each["type"]].model_validate(each)
    return found


@settings(deadline=None, max_examples=50)
@given(talks, cuts, st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_however_the_bytes_are_split_a_stream_says_what_the_whole_answer_says(
    talk: Talk, where: list[int], end: bytes
) -> None:
    sent = talk.stream().replace(b"\n", end)
    out = through(stream(), *split(sent, where))
    assert out == through(stream(), sent) == through(stream(), talk.stream())
    events = checked(out)
    last = events[-1]["response"]
    assert last == json.loads(opened().answer(talk.whole()))
    assert events[-1]["type"] == f"response.{last['status']}"
    added = [each["item"]["id"] for each in events if each["type"] == "response.output_item.added"]
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert added == [each["id"] for each in last["output"]]
    assert sorted(done, key=lambda item: added.index(item["id"])) == last["output"]
    for item in last["output"]:
        deltas = [each["delta"] for each in events if "delta" in each and each["item_id"] == item["id"]]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == text


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_may_come_byte_by_byte_with_lines_that_end_in_any_way(end: bytes) -> None:
    sent = b": hello\n\n\n\nid: 1\n\n" + Talk(said=["hé", "\U0001f600"], calls=[["{", "}"]]).stream()
    sent = sent.replace(b"data: ", b"event: x\ndata:").replace(b"\n", end)
    out = through(stream(), *(sent[at : at + 1] for at in range(len(sent))))
    assert out == through(stream(), sent)
    assert out.startswith(b": keep-alive\n\n: keep-alive\n\nevent: response.created\n")
    assert checked(out)[-1]["response"]["output"][0]["content"][0]["text"] == "hé\U0001f600"


def test_a_stream_begins_and_ends_as_openais_does() -> None:
    sent = chunk({"role": "assistant", "content": ""}) + chunk({"content": "a"}) + chunk({}, "stop") + DONE
    assert [each["type"] for each in checked(through(stream(), sent))] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_each_piece_is_passed_on_when_it_comes() -> None:
    translated = stream()
    assert b"response.created" in translated.feed(chunk({"role": "assistant"}))
    assert b'"delta":"a"' in translated.feed(chunk({"content": "a"}))
    assert translated.feed(b": ping\n\n") == b": keep-alive\n\n"
    assert translated.feed(b"") == b""
    assert b"response.completed" in translated.feed(chunk({}, "stop") + DONE)
    assert translated.done
    assert translated.failure is None
    assert translated.feed(chunk({"content": "late"})) == translated.end() == b""


def test_refusals_and_text_after_calls_are_items_of_their_own() -> None:
    sent = chunk({"content": "a"}) + chunk({"refusal": "no"}) + calling(0, "{}", call_id="x", name="f")
    sent += chunk({"content": "b"}) + chunk({"reasoning": "hm"}) + chunk({}, "stop") + DONE
    events = checked(through(stream(), sent))
    kinds = [each.get("content", [{"type": "call"}])[0]["type"] for each in events[-1]["response"]["output"]]
    assert kinds == ["output_text", "refusal", "call", "output_text", "reasoning_text"]
    assert events[-1]["response"]["usage"] is None


def test_calls_that_share_an_index_or_have_none_are_told_apart_by_id_and_name() -> None:
    for index in (0, None):
        sent = calling(index, "{", call_id="a", name="f") + calling(index, "}", call_id="a", name="f")
        sent += calling(index, "{}", call_id="b", name="f") + chunk({"tool_calls": [{"index": 9}]})
        sent += calling(7, call_id="lost") + calling(7, {"x": 1}, name="g") + chunk({}, "stop") + DONE  # type: ignore[arg-type]
        output = checked(through(stream(), sent))[-1]["response"]["output"]
        assert [(each["call_id"], each["arguments"]) for each in output] == [
            ("a", "{}"),
            ("b", "{}"),
            ("call_1_2", '{"x": 1}'.replace(" ", "")),
        ]


def test_choices_that_nobody_asked_for_are_left_out() -> None:
    other = event({**BASE, "choices": [{"index": 1, "delta": {"content": "other"}}, {"delta": None}]})
    events = checked(through(stream(), other + chunk({"content": "mine"}) + other + chunk(None, "stop") + DONE))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "mine"
    assert len(events[-1]["response"]["output"]) == 1


ERROR = b'event: error\ndata: {"error":{"message":"out of\\nmemory"}}\n\n'


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"", "broke off"),
        (chunk({"content": "a"}), "broke off"),
        (chunk({"content": "a"}) + chunk({}, "stop"), "broke off"),
        (chunk({"content": "a"}) + DONE[:-1], "broke off"),
        (ERROR + DONE, "out of memory"),
        (chunk({"content": "a"}) + ERROR + DONE, "out of memory"),
        (chunk({"content": "a"}) + event({"error": "boom"}) + DONE, "boom"),
        (b"event: error\n\n", "no reason"),
        (chunk({"content": "a"}) + b"data: {oops\n\n" + DONE, "no chat completion"),
        (chunk({"content": "a"}) + b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n', "no chat completion"),
        (chunk({"content": "a"}) + b"data: []\n\n" + DONE, "no chat completion"),
        (chunk({"content": "a"}) + chunk({}, "abort") + usage_chunk() + DONE, "gave up"),
        (calling(0, "{}") + DONE, "without naming"),
        (DONE, "without an answer"),
    ],
)
@settings(deadline=None, max_examples=50)
@given(where=cuts)
def test_a_broken_stream_fails_once_and_never_completes(sent: bytes, says: str, where: list[int]) -> None:
    translated = stream()
    events = checked(through(translated, *split(sent, where)))
    assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.failed"
    assert says in events[-1]["response"]["error"]["message"]
    assert (events[-1]["response"]["status"], events[-1]["response"]["output"]) == ("failed", [])
    assert not {"response.completed", "response.incomplete"} & {each["type"] for each in events}
    assert translated.done
    assert translated.failure is not None
    assert translated.failure.code == "engine_failed"
    assert translated.fail(Refusal("engine_failed", "again")) == b""


def test_the_gateways_own_reason_is_said() -> None:
    translated = stream()
    translated.feed(chunk({"content": "a"}))
    events = read(translated.fail(Refusal("engine_silent", "It fell silent.")))
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "It fell silent."}


def test_an_event_without_end_is_cut_with_little_kept() -> None:
    translated = stream()
    piece = b"a" * 65536
    out = translated.feed(b"data: ")
    fed = 0
    while not translated.done:
        out += translated.feed(piece)
        fed += len(piece)
    assert fed <= LIMIT_BYTES + len(piece)
    assert "longer than" in checked(out)[-1]["response"]["error"]["message"]
    whole = stream()
    assert through(whole, b"data: " + piece * 65 + b"\n\n") == out
    late = stream()
    late.feed(chunk({}) + b"data: " + piece * 65)
    assert late.done


def test_what_must_be_said_again_at_the_end_is_bounded() -> None:
    translated = stream()
    piece = chunk({"content": "é" * 100_000})
    fed = 0
    while not translated.done:
        translated.feed(piece)
        fed += 200_000
    assert LIMIT_BYTES - ITEM_BYTES - 200_000 < fed - 200_000 <= LIMIT_BYTES
    many = stream()
    count = 0
    while not many.done:
        many.feed(calling(count, call_id="", name="f"))
        count += 1
    assert many.failure is not None
    assert 1000 < count <= LIMIT_BYTES // ITEM_BYTES


# --- openai's own client ---------------------------------------------------------------------------------------------
TOOL: Any = {"type": "function", "name": "tool_0", "parameters": {"type": "object"}, "strict": False}


def test_openais_client_reads_an_answer() -> None:
    talk = Talk(thought=["hm"], said=["hé", "llo"], calls=[['{"a":1}']])
    with translating(talk.whole()) as (url, seen), openai.OpenAI(api_key="k", base_url=f"{url}/v1") as own:
        answer = own.responses.create(model="m", input="hi", tools=[TOOL], reasoning={"effort": "low"})
    assert answer.output_text == "héllo"
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 16
    assert seen[0]["reasoning_effort"] == "low"


def test_openais_client_reads_a_stream() -> None:
    talk = Talk(thought=["hm"], said=["hé", "llo"], calls=[['{"a"', ":1}"], ["{}"]], alternating=True)
    with (
        translating(talk.stream(), "sse") as (url, seen),
        openai.OpenAI(api_key="k", base_url=f"{url}/v1") as own,
        own.responses.stream(model="m", input="hi", tools=[TOOL]) as events,
    ):
        texts = [each.delta for each in events if each.type == "response.output_text.delta"]
        answer = events.get_final_response()
    assert texts == ["hé", "llo"]
    assert answer.output_text == "héllo"
    assert [each.arguments for each in answer.output if each.type == "function_call"] == ['{"a":1}', "{}"]
    assert seen[0]["stream_options"] == {"include_usage": True}
