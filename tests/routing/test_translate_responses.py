from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from routing.openai import Refusal, envelope
from routing.translate import for_route, misplaced
from routing.translate.chat import ChatStream
from routing.translate.responses import ECHO_BYTES, Responses
from tests.routing.chats import (
    Talk,
    arguments,
    asked,
    texts,
)


def opened(**body: Any) -> Responses:
    translation = Responses()
    asked(translation, {"model": "m", "input": "hi", **body})
    return translation


def stream() -> ChatStream:
    return opened().stream()


def refused(body: dict[str, Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        asked(Responses(), {"model": "m", **body})
    assert (caught.value.code, caught.value.kind.status) == ("body_invalid", 400)
    assert f"`{caught.value.param}`" in caught.value.message
    return caught.value


# --- requests --------------------------------------------------------------------------------------------------------
def test_a_text_with_instructions_becomes_a_talk() -> None:
    body = {"model": "m", "instructions": "Be brief.", "input": "hé", "max_output_tokens": 5, "temperature": 0.5}
    assert asked(Responses(), body) == {
        "model": "real",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé"}],
        "max_tokens": 5,
        "temperature": 0.5,
    }


def test_a_stream_asks_for_its_usage() -> None:
    chat = asked(Responses(), {"input": "hi", "stream": True, "stream_options": {"include_obfuscation": False}})
    assert chat["stream"] is True
    assert chat["stream_options"] == {"include_usage": True}


def test_every_kind_of_item_has_its_message() -> None:
    items = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}],
        },
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "look"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
                {"type": "input_image", "image_url": "https://x/y.png"},
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "secret"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I call", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "system", "content": "later"},
        {"role": "user", "content": [{"type": "input_text", "text": "go on"}]},
        {"role": "user", "content": []},
    ]
    chat = asked(Responses(), {"instructions": "zero", "input": items})

    def call(call_id: str, name: str, said: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": said}}

    assert chat["messages"] == [
        {"role": "system", "content": "zero\n\none\ntwo"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            ],
        },
        {"role": "assistant", "content": "I call", "tool_calls": [call("a", "f", "{}"), call("b", "g", '{"x":1}')]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "content": None, "tool_calls": [call("c", "f", "")]},
        {"role": "assistant", "content": "no"},
        {"role": "system", "content": "later"},
        {"role": "user", "content": "go on"},
        {"role": "user", "content": ""},
    ]


def test_a_call_may_begin_the_talk() -> None:
    chat = asked(Responses(), {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]})
    assert chat["messages"][0]["tool_calls"][0]["id"] == "a"


def test_tools_are_nested_and_the_choice_with_them() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [
        {"type": "function", "name": "f", "description": "does", "parameters": schema, "strict": True},
        {"type": "function", "name": "g", "parameters": None, "strict": None},
    ]
    made = [
        {"type": "function", "function": {"name": "f", "description": "does", "parameters": schema, "strict": True}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    ]
    body = {"input": "hi", "tools": tools, "parallel_tool_calls": False}
    for choice, said in (
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "g"}, {"type": "function", "function": {"name": "g"}}),
    ):
        chat = asked(Responses(), {**body, "tool_choice": choice})
        assert (chat["tools"], chat["tool_choice"], chat["parallel_tool_calls"]) == (made, said, False)
    assert "tool_choice" not in asked(Responses(), body)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    chat = asked(Responses(), {**body, "tool_choice": allowed})
    assert (chat["tools"], chat["tool_choice"]) == (made[1:], "required")
    chat = asked(Responses(), {**body, "tools": [], "tool_choice": "auto"})
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(chat)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ({}, None),
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}}, {"type": "json_object"}),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}, "strict": True, "description": None}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}, "strict": True}},
        ),
    ],
)
def test_the_format_of_the_text_is_asked_for(text: dict[str, Any], made: dict[str, Any] | None) -> None:
    chat = asked(Responses(), {"input": "hi", "text": {**text, "verbosity": "low"}})
    assert chat.get("response_format") == made
    assert chat["verbosity"] == "low"


def test_what_means_the_same_or_is_unknown_passes_and_what_has_no_consequence_does_not() -> None:
    same = {"temperature": 1, "top_p": 0.5, "user": "u", "top_k": 4, "chat_template_kwargs": {"a": [1]}, "seed": 3}
    gone = {
        "store": True,
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "truncation": "auto",
        "service_tier": "auto",
        "previous_response_id": None,
        "background": False,
        "max_output_tokens": None,
        "stop": None,
        "n": 1,
    }
    chat = asked(Responses(), {"input": "hi", "reasoning": {"effort": "low", "summary": "auto"}, **same, **gone})
    assert chat == {
        **same,
        "model": "real",
        "messages": [{"role": "user", "content": "hi"}],
        "reasoning_effort": "low",
    }


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "hi", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "moderation": {"model": "x"}}, "moderation"),
        ({"input": "hi", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "hi", "include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"input": "hi", "include": "x"}, "include"),
        ({"input": "hi", "n": 2}, "n"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": "hi", "instructions": ["x"]}, "instructions"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, "input[0].call_id"),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "a",
                        "output": [{"type": "input_image", "image_url": "https://x"}],
                    }
                ]
            },
            "input[0].output[0]",
        ),
        (user({"type": "input_image", "file_id": "file-1"}), "input[0].content[0].file_id"),
        (user({"type": "input_file", "file_id": "file-1"}), "input[0].content[0]"),
        (user({"type": "input_text", "text": "a"}, {"type": "input_file", "file_data": "AA"}), "input[0].content[1]"),
        (user({"type": "video"}), "input[0].content[0].type"),
        (user({"type": "input_text"}), "input[0].content[0].text"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "hi", "tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "hi", "tools": {}, "tool_choice": 7}, "tool_choice"),
        ({"input": "hi", "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"input": "hi", "tool_choice": {"type": "allowed_tools", "tools": [{}]}}, "tool_choice.tools[0].name"),
        ({"input": "hi", "text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"input": "hi", "reasoning": "high"}, "reasoning"),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    assert refused(body).param == param


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"input":"\\ud800"}', b'{"input":' + b"[" * 9000 + b"]" * 9000 + b"}"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        Responses().request(body, "m", "req-1")
    assert caught.value.code == "body_invalid"


# --- answers ---------------------------------------------------------------------------------------------------------
def test_an_answer_has_its_usage_its_ids_and_what_was_asked() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    translation = opened(tools=[tool], metadata={"a": "b"}, temperature=0.2, instructions="x" * ECHO_BYTES)
    answer = json.loads(translation.answer(Talk(thought=["hm"], said=["hé"], calls=[["{}"]]).whole()))
    Response.model_validate(answer)
    assert answer["id"] == "resp_1"
    assert (answer["created_at"], answer["model"], answer["status"]) == (7, "served", "completed")
    assert answer["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 5},
        "total_tokens": 29,
    }
    assert (answer["tools"], answer["metadata"], answer["temperature"]) == ([tool], {"a": "b"}, 0.2)
    assert answer["instructions"] is None  # too long to be said again in each answer
    thought, said, called = answer["output"]
    assert (thought["id"], said["id"], called["id"]) == ("rs_1_0", "msg_1_1", "fc_1_2")
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert said["content"] == [{"type": "output_text", "text": "hé", "annotations": [], "logprobs": []}]
    assert (called["call_id"], called["name"], called["arguments"]) == ("call_0", "tool_0", "{}")


def whole(message: dict[str, Any], finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    body = {"choices": [{"message": message, "finish_reason": finish}], **more}
    found = json.loads(opened().answer(json.dumps(body).encode()))
    assert isinstance(found, dict)
    Response.model_validate(found)
    return found


def test_answers_in_the_odd_shapes_that_endpoints_have_are_understood() -> None:
    empty = whole({"content": ""}, None)
    assert (empty["output"], empty["status"], empty["usage"], empty["model"]) == ([], "completed", None, "real")
    parts = [{"type": "text", "text": "a"}, {"type": "thinking"}, {"type": "text", "text": 3}, "x"]
    assert whole({"content": parts})["output"][0]["content"][0]["text"] == "a"
    odd = {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g"}}, {"id": "z"}]}
    calls = whole(odd)["output"]
    assert [(each["call_id"], each["arguments"]) for each in calls] == [("call_1_0", '{"a":1}'), ("call_1_1", "")]
    assert whole({"refusal": "no"})["output"][0]["content"] == [{"type": "refusal", "refusal": "no"}]
    assert whole({"reasoning": "hm"})["output"][0]["type"] == "reasoning"
    assert whole({"content": "x"}, usage={"prompt_tokens": 4})["usage"] is None
    assert whole({"content": "x"}, created="now")["created_at"] == 0


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_that_was_cut_says_so(finish: str, reason: str) -> None:
    answer = whole({"content": "a"}, finish)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert answer["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"{}",
        b'{"choices":[]}',
        b'{"error":{"message":"boom"}}',
        b'{"choices":[{"finish_reason":"abort","message":{"content":"a"}}]}',
    ],
)
def test_what_is_no_answer_is_the_engines_failure(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        opened().answer(body)
    assert caught.value.code == "engine_failed"
    assert ("boom" in caught.value.message) is (b"boom" in body)


def test_errors_are_openais_already() -> None:
    error = envelope(Refusal("model_unknown", "No model x."))
    assert Responses().error(error, 404) == error


@settings(deadline=None, max_examples=50)
@given(st.lists(arguments, min_size=1, max_size=4))
def test_calls_come_back_from_the_client_as_the_model_made_them(made: list[dict[str, Any]]) -> None:
    talk = Talk(said=["on it"], calls=[[json.dumps(each)] for each in made])
    output = json.loads(opened().answer(talk.whole()))["output"]
    outputs = [{"type": "function_call_output", "call_id": f"call_{n}", "output": str(n)} for n in range(len(made))]
    messages = asked(Responses(), {"input": [{"role": "user", "content": "hi"}, *output, *outputs]})["messages"]
    sent = json.loads(talk.whole())["choices"][0]["message"]
    assert messages[1] == {"role": "assistant", "content": "on it", "tool_calls": sent["tool_calls"]}
    assert [each["tool_call_id"] for each in messages[2:]] == [each["id"] for each in sent["tool_calls"]]


# --- bodies at the wrong door ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "body", "param", "door"),
    [
        ("/v1/chat/completions", {"model": "m", "input": "hi", "tools": []}, "messages", "/v1/responses"),
        ("/v1/chat/completions", {"model": "m", "prompt": "hi"}, "messages", "/v1/completions"),
        ("/v1/completions", {"model": "m", "messages": []}, "prompt", "/v1/chat/completions"),
        ("/v1/responses", {"model": "m", "messages": []}, "input", "/v1/chat/completions"),
        ("/v1/messages", {"model": "m", "input": "hi"}, "messages", "/v1/responses"),
    ],
)
def test_a_body_for_another_route_is_told_where_to_go(path: str, body: dict[str, Any], param: str, door: str) -> None:
    refusal = misplaced(path, body)
    assert refusal is not None
    assert (refusal.code, refusal.param) == ("body_invalid", param)
    assert f"`{param}`" in refusal.message
    assert refusal.message.endswith(f"{door}.")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": [], "input": "x"}),
        ("/v1/chat/completions", {"model": "m"}),
        ("/v1/responses", {"model": "m", "prompt": {}}),
        ("/v1/embeddings", {"model": "m", "messages": []}),
        ("/v1/new", {"input": "x"}),
    ],
)
def test_what_may_be_right_is_left_to_the_engine(path: str, body: dict[str, Any]) -> None:
    assert misplaced(path, body) is None


def test_only_two_routes_are_translated() -> None:
    assert isinstance(for_route("/v1/responses"), Responses)
    assert for_route("/v1/messages") is not None
    assert for_route("/v1/chat/completions") is None
    assert for_route("/v1/messages/count_tokens") is None


@settings(deadline=None, max_examples=50)
@given(texts)
def test_ids_come_from_the_request(text: str) -> None:
    made = [Responses() for _ in range(2)]
    for each in made:
        asked(each, {"input": text}, "req-abc-1")
    one, two = (json.loads(each.answer(Talk(said=["a"]).whole())) for each in made)
    assert one == two
    assert one["id"] == "resp_abc-1"
