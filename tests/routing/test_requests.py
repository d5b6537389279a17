"""What clients get, over a real port and both ways in: answers, errors, headers, bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from typing import Any

import httpx
import openai
import pytest

from catalog import spec
from routing.openai import ERRORS
from tests.routing.conftest import Start
from tests.routing.gateways import CHAT, KEY, MemoryStore, Running, contents, endpoint, grant, key_of, raw_chat
from tests.stubs import mock_engine
from tests.stubs.mock_engine import ANSWER, MockEngine


def error(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req-")
    found = response.json()["error"]
    assert found["code"] in ERRORS or found["code"] == "engine_refused"
    assert isinstance(found, dict)
    return found


async def test_an_answer_passes_byte_for_byte_with_its_headers(gateway: Running, engine: MockEngine) -> None:
    body = b'{ "model" : "m",\n"messages":[{"role":"user","content":"h\xc3\xa9"}], "unknown":{"a":[1,2]} }'
    response = await gateway.chat(body, headers={"traceparent": "00-abc-def-01", "cookie": "secret=1"})
    assert response.status_code == 200
    assert response.content == ANSWER.split(b"\r\n\r\n", 1)[1]
    assert response.headers["x-llmgw-model"] == "m"
    assert response.headers["x-llmgw-replica"] == "m-1"
    assert response.headers["x-llmgw-queue-ms"] == "0"
    seen = engine.requests[-1]
    assert seen.body == body
    assert seen.header(b"authorization") == b"Bearer " + key_of("m-1").encode()
    assert seen.header(b"traceparent") == b"00-abc-def-01"
    assert seen.header(b"x-request-id") == response.headers["x-request-id"].encode()
    assert KEY.encode() not in b"".join(value for _, value in seen.headers)
    (record,) = await gateway.records()
    assert (record.status, record.prompt_tokens, record.completion_tokens) == (200, 10, 40)
    assert (record.project, record.key, record.node, record.estimated) == (1, 1, "node-1", False)


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({}, 0),
        ({"stream_options": None}, 0),
        ({"stream_options": {"include_usage": False}}, 0),
        ({"stream_options": {"include_usage": True}}, 1),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, 1),
    ],
)
async def test_a_stream_has_a_usage_chunk_only_for_who_asked_and_is_counted_anyway(
    gateway: Running, options: dict[str, Any], chunks: int
) -> None:
    response = await gateway.chat({"stream": True, "max_tokens": 3, **options})
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.text.count('"choices":[]') == chunks
    assert response.text.count("hello") == 3
    assert response.text.endswith("data: [DONE]\n\n")
    (record,) = await gateway.records()
    assert (record.prompt_tokens, record.completion_tokens, record.estimated) == (10, 3, False)
    assert record.streamed
    assert record.first_token_ms is not None


async def test_openais_own_client_works(gateway: Running) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=KEY, max_retries=0)
    try:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 40
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=4
        )
        texts = [chunk.choices[0].delta.content async for chunk in stream]
        assert texts == [" hello"] * 4
        assert [model.id async for model in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError, match="No model"):
            await client.chat.completions.create(model="q", messages=[])
    finally:
        await client.close()


async def test_an_alias_is_replaced_by_the_name_that_the_engine_knows(start: Start, engine: MockEngine) -> None:
    models = [spec.Model(name="org/m", aliases=("中文模型", "chat"))]
    async with start(contents(endpoint(engine.port, model="org/m"), models=models)) as gateway:
        response = await gateway.chat({"model": "中文模型"})
        assert response.status_code == 200
        assert engine.requests[-1].json == {**CHAT, "model": "org/m"}
        assert response.headers["x-llmgw-model"] == "org/m"
        (record,) = await gateway.records()
        assert (record.model, record.explained and record.explained.asked) == ("org/m", "中文模型")
        listed = (await gateway.http.get("/v1/models", headers={"x-api-key": KEY})).json()
        assert [card["id"] for card in listed["data"]] == ["chat", "org/m", "中文模型"]
        for path in ("/v1/models/org/m", "/v1/models/org%2Fm", "/v1/models/%E4%B8%AD%E6%96%87%E6%A8%A1%E5%9E%8B"):
            assert (await gateway.http.get(path, headers={"api-key": KEY})).status_code == 200
        form = {"files": {"file": ("a.wav", b"RIFF")}, "data": {"model": "chat"}}
        sent = gateway.http.build_request("POST", "/v1/audio/transcriptions", headers={"api-key": KEY}, **form)
        await sent.aread()
        with pytest.raises(json.JSONDecodeError):  # the mock reads only JSON; what matters is what it was sent
            json.loads(sent.content)
        engine.behaviour = mock_engine.says(ANSWER)
        assert (await gateway.http.send(sent)).status_code == 200
        assert b"\r\n\r\norg/m\r\n" in engine.requests[-1].body


async def test_a_name_outside_latin_1_serves_and_is_percent_encoded_in_headers(
    start: Start, engine: MockEngine
) -> None:
    async with start(contents(endpoint(engine.port, model="中文"))) as gateway:
        response = await gateway.chat({"model": "中文"}, headers={"x-request-id": b"\xc3\xa9", "user-agent": b"\xff"})
        assert response.status_code == 200
        assert response.headers["x-llmgw-model"] == "%E4%B8%AD%E6%96%87"


PASSED_ON = ["/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/new/thing"]


async def test_whatever_an_engine_serves_under_v1_is_passed_on(gateway: Running, engine: MockEngine) -> None:
    for path in PASSED_ON:
        sent = {"prompt": "hi", "input": "hi"}
        assert (await gateway.chat(sent, path=path + "?beta=true")).status_code == 200
        assert engine.requests[-1].path == path + "?beta=true"


async def test_a_get_is_passed_on_to_the_engine_that_its_query_names(gateway: Running, engine: MockEngine) -> None:
    headers = {"authorization": f"bearer {KEY}"}
    assert (await gateway.http.get("/v1/things?model=m", headers=headers)).status_code == 200
    assert engine.requests[-1].method == "GET"
    assert error(await gateway.http.get("/v1/things", headers=headers))["param"] == "model"
    assert error(await gateway.http.get("/v1/things?" + "a=1&" * 60, headers=headers))["param"] == "model"


NOBODYS = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/adapters/x",
    "/v1/streams",
    "/v1/..%2fslots",
    "/v1//slots",
    "/v1/%2e%2e/metrics",
    "/v1/a%5cb",
    "/v1/a%00b",
]


async def test_engines_own_switches_and_crooked_paths_are_nobodys(gateway: Running, engine: MockEngine) -> None:
    for path in NOBODYS:
        assert error(await gateway.chat(path=path))["code"] == "route_unknown"
        assert engine.requests == []


NO_KEYS: list[tuple[dict[str, Any], str]] = [
    ({}, "key_missing"),
    ({"authorization": ""}, "key_missing"),
    ({"authorization": "Bearer"}, "key_missing"),
    ({"authorization": f"Basic {KEY}"}, "key_missing"),
    ({"authorization": b"Bearer \xc3\xa9\xff"}, "key_unknown"),
    ({"authorization": "Bearer ' OR '1'='1"}, "key_unknown"),
    ({"authorization": "Bearer sk-7Qf2abc"}, "key_unknown"),
    ({"authorization": "Bearer " + "k" * 60_000}, "key_unknown"),
    ({"authorization": f"Bearer {KEY}x"}, "key_unknown"),
    ({"x-api-key": "nope"}, "key_unknown"),
]


async def test_without_a_known_key_it_is_401_and_says_what_to_do(gateway: Running, engine: MockEngine) -> None:
    for headers, code in NO_KEYS:
        body = json.dumps(CHAT).encode()
        response = await gateway.http.post("/v1/chat/completions", content=body, headers=headers)
        found = error(response)
        assert (response.status_code, found["code"]) == (401, code)
        assert response.headers["www-authenticate"] == "Bearer"
        assert "project" in found["message"]
        if "sk-7Qf2abc" in str(headers):
            assert "Key sk-7Qf2… does not exist or was revoked" in found["message"]
        assert engine.requests == []
        assert gateway.store.usage == {}


async def test_blanks_around_a_key_do_not_matter_and_blanks_alone_are_none(gateway: Running) -> None:
    body = json.dumps(CHAT).encode()
    assert b" 401 " in await gateway.raw(raw_chat(body, key="  "), until=b"}}")
    assert b" 200 " in await gateway.raw(raw_chat(body, key=f" {KEY} \t"), until=b"}}")


async def test_two_authorization_headers_are_no_key(gateway: Running) -> None:
    twice = raw_chat(json.dumps(CHAT).encode(), extra=b"Authorization: Bearer other\r\n")
    assert b" 401 " in await gateway.raw(twice, until=b"}}")


@pytest.mark.parametrize("headers", [{"authorization": f"BEARER   {KEY}"}, {"api-key": KEY}, {"x-api-key": KEY}])
async def test_a_key_is_taken_from_each_header_that_clients_use(gateway: Running, headers: dict[str, str]) -> None:
    assert (await gateway.http.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_keys_end_when_they_expire_and_allow_only_their_models(start: Start, engine: MockEngine) -> None:
    old, narrow = "sk-old" + "a" * 40, "sk-nar" + "b" * 40
    grants = [grant(old, expires_at=1.0), grant(narrow, models=frozenset({"other"}))]
    models = [spec.Model(name="m"), spec.Model(name="other")]
    async with start(contents(endpoint(engine.port), models=models, grants=grants)) as gateway:
        assert "expired" in error(await gateway.chat(key=old))["message"]
        response = await gateway.chat(key=narrow)
        assert (response.status_code, error(response)["code"]) == (403, "model_forbidden")
        listed = (await gateway.http.get("/v1/models", headers={"x-api-key": narrow})).json()
        assert [card["id"] for card in listed["data"]] == ["other"]
        assert (await gateway.http.get("/v1/models/m", headers={"x-api-key": narrow})).status_code == 404
        assert "Did you mean" not in error(await gateway.chat({"model": "n"}, key=narrow))["message"]


async def test_with_auth_off_anybody_may_ask_and_usage_has_no_owner(start: Start, engine: MockEngine) -> None:
    async with start(contents(endpoint(engine.port)), auth=False) as gateway:
        assert (await gateway.chat(key="whatever")).status_code == 200
        (record,) = await gateway.records()
        assert (record.project, record.key) == (None, None)


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        (None, "no_endpoint", 503),
        ({"state": "loading", "port": None}, "model_loading", 503),
        ({"state": "fetching", "port": None}, "model_loading", 503),
        ({"state": "ready", "port": None}, "model_loading", 503),
        ({"state": "failed"}, "engine_down", 503),
        ({"state": "ready", "draining": True}, "no_endpoint", 503),
        ({"state": "ready", "lost": True}, "no_endpoint", 503),
    ],
)
async def test_a_published_model_without_an_endpoint_says_why_and_when_to_ask_again(
    start: Start, engine: MockEngine, state: dict[str, Any] | None, code: str, status: int
) -> None:
    endpoints = [] if state is None else [endpoint(engine.port, **state) if "port" not in state else endpoint(**state)]
    async with start(contents(*endpoints), on_demand_wait_s=0.2) as gateway:
        response = await gateway.chat()
        assert (response.status_code, error(response)["code"]) == (status, code)
        assert int(response.headers["retry-after"]) >= 1
        assert (await gateway.http.get("/ready")).status_code == 503
        assert (await gateway.http.get("/v1/models/m", headers={"x-api-key": KEY})).status_code == 200
        assert error(await gateway.chat({"model": "n"}))["code"] == "model_unknown"
        unknown = next(each for each in await gateway.records(2) if each.error_code == "model_unknown")
        assert (unknown.model, unknown.explained and unknown.explained.asked) == ("", "n")


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model":"m","model":"m"}', b'{"model":"m","stream":"true"}', b"\xff"])
async def test_a_bad_body_is_400_and_never_reaches_an_engine(gateway: Running, engine: MockEngine, body: bytes) -> None:
    response = await gateway.chat(body, headers={"content-type": "text/plain"})
    assert (response.status_code, error(response)["code"]) == (400, "body_invalid")
    assert engine.requests == []
    (record,) = await gateway.records()
    assert (record.status, record.error_code, record.prompt_tokens) == (400, "body_invalid", None)


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", lambda data: data)]
)
async def test_a_compressed_body_reaches_the_engine_plain(
    gateway: Running, engine: MockEngine, encoding: str, pack: Any
) -> None:
    body = json.dumps({**CHAT, "pad": "x" * 400_000}).encode()
    response = await gateway.chat(pack(body), headers={"content-encoding": encoding})
    assert response.status_code == 200
    assert engine.requests[-1].body == body
    assert engine.requests[-1].header(b"content-length") == str(len(body)).encode()


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (b"{}", "br", 415),
        (b"{}", "gzip", 400),
        (gzip.compress(json.dumps(CHAT).encode(), mtime=0)[:-6], "gzip", 400),
        (gzip.compress(json.dumps(CHAT).encode(), mtime=0), "identity", 400),
        (gzip.compress(b" " * 200_000_000, mtime=0), "gzip", 413),
    ],
)
async def test_a_compressed_body_that_cannot_be_taken_is_refused(
    gateway: Running, body: bytes, encoding: str, status: int
) -> None:
    response = await gateway.chat(body, headers={"content-encoding": encoding})
    assert response.status_code == status
    error(response)


async def test_a_body_over_the_limit_is_413_with_a_length_and_without(start: Start, engine: MockEngine) -> None:
    async with start(contents(endpoint(engine.port)), body_limit_bytes=100_000) as gateway:
        big = b'{"model":"m","a":"' + b"x" * 300_000 + b'"}'
        assert error(await gateway.chat(big))["code"] == "body_too_large"

        async def pieces() -> Any:
            for at in range(0, len(big), 10_000):
                yield big[at : at + 10_000]

        headers = {"authorization": f"Bearer {KEY}"}
        response = await gateway.http.post("/v1/chat/completions", content=pieces(), headers=headers)
        assert error(response)["code"] == "body_too_large"
        assert engine.requests == []


async def test_65_mib_are_refused_at_once(gateway: Running) -> None:
    head = raw_chat(b"").replace(b"Content-Length: 0", b"Content-Length: %d" % (65 << 20))
    answer = await gateway.raw(head, until=b"}}")  # not after a byte of the body
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"body_too_large"' in answer


async def test_expect_100_is_honoured_for_a_known_key_and_not_for_another(gateway: Running) -> None:
    body = json.dumps({**CHAT, "pad": "x" * 2000}).encode()
    head = raw_chat(body, extra=b"Expect: 100-continue\r\n")[: -len(body)]
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head)
    async with asyncio.timeout(20):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    wrong = head.replace(KEY.encode(), b"wrong").replace(b"%d" % len(body), b"50000000")
    answer = await gateway.raw(wrong)  # closed at once, without waiting for 50 MB
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer.lower()
    assert b" 401 " in await gateway.raw(wrong.replace(b"100-continue", b"banana"), until=b"}}")


async def test_a_chunked_body_that_comes_at_once_is_held_to_the_limit(start: Start, engine: MockEngine) -> None:
    async with start(contents(endpoint(engine.port)), body_limit_bytes=2000) as gateway:
        body = json.dumps({**CHAT, "pad": "x" * 3000}).encode()
        head = raw_chat(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        answer = await gateway.raw(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), until=b"}}")
        assert answer.startswith(b"HTTP/1.1 413")
        assert engine.requests == []


async def test_pipelined_and_kept_alive_requests_are_answered_in_order(gateway: Running) -> None:
    one = raw_chat(json.dumps(CHAT).encode())
    got = await gateway.raw(one + raw_chat(b"{}") + one.replace(b"\r\nHost", b"\r\nConnection: close\r\nHost"))
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"400", b"200"]


async def test_http_1_0_is_answered(gateway: Running) -> None:
    got = await gateway.raw(raw_chat(json.dumps(CHAT).encode()).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert got.startswith(b"HTTP/1.1 200")
    assert got.endswith(ANSWER[-40:])


async def test_the_host_header_decides_nothing(gateway: Running) -> None:
    for host in (b"localhost:8000/#@x", b"localhost/health?x=", b"a/../b"):
        got = await gateway.raw(raw_chat(b"{}", key="no").replace(b"Host: x", b"Host: " + host), until=b"}}")
        assert b" 401 " in got.split(b"\r\n")[0]


async def test_without_cors_preflights_are_refused_clearly(gateway: Running) -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    response = await gateway.http.options("/v1/chat/completions", headers=asked)
    assert (response.status_code, error(response)["code"]) == (403, "origin_forbidden")
    assert (await gateway.http.options("/v1/models")).status_code == 204


@pytest.mark.parametrize("origins", [["https://app.example"], ["*"]])
async def test_with_cors_a_page_may_ask_and_may_read_its_errors(
    start: Start, engine: MockEngine, origins: list[str]
) -> None:
    async with start(contents(endpoint(engine.port)), cors_origins=origins) as gateway:
        asked = {
            "origin": "https://app.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os,x-stainless-retry-count",
        }
        preflight = await gateway.http.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code == 204
        assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in preflight.headers
        expected = origins[0] if origins == ["*"] else "https://app.example"
        for key in (KEY, "wrong"):
            response = await gateway.chat(key=key, headers={"origin": "https://app.example"})
            assert response.headers["access-control-allow-origin"] == expected
        listed = await gateway.http.get("/v1/models", headers={"x-api-key": KEY, "origin": "https://app.example"})
        assert listed.headers["access-control-allow-origin"] == expected
        other = await gateway.http.options("/v1/models", headers={**asked, "origin": "https://evil.example"})
        assert other.status_code == (204 if origins == ["*"] else 403)
        odd = await gateway.http.options(
            "/v1/models", headers={**asked, "access-control-request-headers": "a: b<script>"}
        )
        assert odd.headers["access-control-allow-headers"] == "authorization, content-type"


async def test_head_has_the_headers_of_get_and_no_body(gateway: Running, engine: MockEngine) -> None:
    for path, status in (("/v1/models", 200), ("/v1/models/q", 404), ("/health", 200), ("/ready", 200)):
        response = await gateway.http.head(path, headers={"x-api-key": KEY})
        assert (response.status_code, response.content) == (status, b"")
    response = await gateway.http.head("/v1/chat/completions", headers={"x-api-key": KEY})
    assert response.status_code == 405
    assert engine.requests == []


OTHER_METHODS = ["GET", "PUT", "DELETE", "PATCH"]


async def test_known_routes_take_only_post(gateway: Running) -> None:
    for method in OTHER_METHODS:
        response = await gateway.http.request(method, "/v1/chat/completions", headers={"x-api-key": KEY})
        assert (response.status_code, error(response)["code"]) == (405, "method_not_allowed")


async def test_other_methods_elsewhere_are_refused(gateway: Running) -> None:
    response = await gateway.http.delete("/v1/things?model=m", headers={"x-api-key": KEY})
    assert error(response)["code"] == "method_not_allowed"
    assert (await gateway.http.post("/health")).status_code == 405


async def test_a_process_without_the_gateway_role_serves_only_the_open_addresses(start: Start) -> None:
    async with start(contents(), roles=frozenset({"web"})) as gateway:
        assert (await gateway.http.get("/health")).status_code == 200
        assert (await gateway.http.get("/ready")).status_code == 503
        assert (await gateway.http.get("/metrics")).status_code == 200
        assert not gateway.gateway.serves("/v1/models")
        assert gateway.gateway.serves("/metrics")


async def test_a_gateway_that_does_not_know_anything_yet_says_so(start: Start) -> None:
    async with start(MemoryStore(contents(), away=True)) as gateway:
        response = await gateway.chat()
        assert (response.status_code, error(response)["code"]) == (503, "store_unreachable")
        assert int(response.headers["retry-after"]) > 0
