"""Requests that other gateways answered with a 500, let through or changed on their way, on real sockets."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from catalog import spec
from tests.routing.conftest import Start
from tests.routing.gateways import CHAT, KEY, Running, code, contents, endpoint, raw_chat
from tests.stubs.mock_engine import MockEngine

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "hi"}


# --- bodies that are odd and right -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "more",
    [
        dict.fromkeys(("max_tokens", "stream", "tools", "tool_choice", "stop", "user", "metadata", "seed")),
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": "1"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"tools": [], "tool_choice": "auto"},
        {"max_tokens": 5, "max_completion_tokens": 7},
        {"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}]},
        {"input": "of another route, beside the messages"},
        {"user": "x'; SELECT pg_sleep(5)--", "stop": ["%", "_"]},
    ],
)
async def test_what_is_for_the_engine_to_judge_reaches_it_byte_for_byte(
    gateway: Running, engine: MockEngine, more: dict[str, Any]
) -> None:
    body = json.dumps({**CHAT, **more}).encode()
    response = await gateway.chat(body)
    assert response.status_code == 200
    assert engine.requests[-1].body == body


@pytest.mark.parametrize("kind", [b"", b"Content-Type: text/plain\r\n", b"Content-Type: \xff\r\n"])
async def test_json_is_taken_whatever_the_content_type_says(gateway: Running, kind: bytes) -> None:
    got = await gateway.raw(raw_chat(json.dumps(CHAT).encode(), extra=kind + b"Connection: close\r\n"))
    assert got.startswith(b"HTTP/1.1 200 ")


# --- bodies that are wrong -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body",
    [
        b"42",
        b"null",
        b"\xef\xbb\xbf" + json.dumps(CHAT).encode(),
        b'{"model":"m","messages":[],"a":NaN}',
        b'{"model":"\\ud800","messages":[]}',
        b'{"model":"m","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b"\x28\xb5\x2f\xfd" + bytes(50),
    ],
)
async def test_what_is_no_body_is_a_400_in_json(gateway: Running, engine: MockEngine, body: bytes) -> None:
    response = await gateway.chat(body)
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    assert code(response) == "body_invalid"
    assert engine.requests == []


async def test_encodings_may_be_stacked_and_unknown_ones_are_named(gateway: Running, engine: MockEngine) -> None:
    body = json.dumps(CHAT).encode()
    twice = gzip.compress(gzip.compress(body))
    assert (await gateway.chat(twice, headers={"content-encoding": "gzip, gzip"})).status_code == 200
    assert engine.requests[-1].body == body
    for name in ("foo", "zstd", "gzip, foo"):
        response = await gateway.chat(twice, headers={"content-encoding": name})
        assert (response.status_code, code(response)) == (415, "encoding_unsupported")
        assert name.split(", ")[-1] in response.json()["error"]["message"]


# --- names -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["org/name:tag@rev", "n" * 300, "м" * 100, "a b", "日本/モデル"])
async def test_whatever_a_model_is_called_it_serves_at_the_first_attempt(
    start: Start, engine: MockEngine, name: str
) -> None:
    models = [spec.Model(name="m", aliases=(name,)), spec.Model(name=name + "2")]
    ready = (endpoint(engine.port), endpoint(engine.port, model=name + "2"))
    async with start(contents(*ready, models=models)) as gateway:
        for asked, served in ((name, "m"), (name + "2", name + "2")):
            headers = {"openai-organization": b"\xff", "x-request-id": b"\xc3\xa9\xff"}
            response = await gateway.chat({"model": asked}, headers=headers)
            assert response.status_code == 200
            assert response.headers["x-llmgw-model"].isascii()
            assert engine.requests[-1].json["model"] == served
        assert len(engine.requests) == 2


@pytest.mark.parametrize("name", ["a\r\nX-Evil: 1", "a\x00b", "' OR '1'='1", "%", "_", "x" * 5000, "../m"])
async def test_a_name_that_nobody_gave_is_unknown_and_stands_in_no_header(gateway: Running, name: str) -> None:
    response = await gateway.chat({"model": name})
    assert (response.status_code, code(response)) == (404, "model_unknown")
    assert "x-evil" not in response.headers
    assert len(response.content) < 1000


# --- keys ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "key",
    [
        "' OR '1'='1",
        "x'; SELECT pg_sleep(5)--",
        '" UNION SELECT * FROM tenants_key--',
        "%",
        "_" * len(KEY),
        KEY[:-1] + "_",
        KEY[:7] + "%",
        KEY.upper(),
        KEY[:-1],
    ],
)
async def test_a_key_is_itself_or_nothing(gateway: Running, engine: MockEngine, key: str) -> None:
    response = await gateway.chat(key=key)
    assert (response.status_code, code(response)) == (401, "key_unknown")
    listed = await gateway.http.get("/v1/models", headers={"x-api-key": key})
    assert (listed.status_code, code(listed)) == (401, "key_unknown")
    assert engine.requests == []


@pytest.mark.parametrize("key", [b"a\x00b", b"\xc3\xa9\xff", KEY.encode() + b"\x00", b"k" * 1_000_000])
async def test_a_key_that_no_header_should_carry_is_refused_by_its_head(
    gateway: Running, engine: MockEngine, key: bytes
) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer " + key + b"\r\n\r\n"
    status = int((await gateway.raw(head)).split(b" ", 2)[1])
    assert status in (400, 401, 431)
    assert (await gateway.chat()).status_code == 200


# --- heads -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [b"/v1/models", b"http://other/v1/models", b"http://other/health/../v1/models"])
@pytest.mark.parametrize(
    "lines",
    [
        b"Host: x\r\nHost: localhost/health\r\n",
        b"Host:\r\n",
        b"Host: x\r\nX-Forwarded-Host: evil\r\n",
        b"Host: x\r\nX-Original-URL: /health\r\n",
        b"Host: x\r\nX-Rewrite-URL: /health\r\n",
        b"Host: x\r\nX-Forwarded-Prefix: /health\r\n",
    ],
)
async def test_no_header_opens_an_address_that_needs_a_key(gateway: Running, lines: bytes, path: bytes) -> None:
    got = await gateway.raw(b"GET %b HTTP/1.1\r\n%bConnection: close\r\n\r\n" % (path, lines))
    status = int(got.split(b" ", 2)[1])
    assert status in (400, 401, 404)
    assert b'"data"' not in got
    assert b"evil" not in got
