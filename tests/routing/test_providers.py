"""Providers (CAT-20) and static endpoints (GW-47) behind a gateway, over real sockets and TLS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from catalog import spec
from tests.routing.conftest import Start
from tests.routing.gateways import (
    CHAT,
    KEY,
    MemoryStore,
    Running,
    code,
    contents,
    endpoint,
    eventually,
    grant,
    key_of,
    raw_chat,
)
from tests.routing.providers import Provider, files
from tests.stubs import mock_engine
from tests.stubs.mock_engine import ANSWER, MockEngine, plain

SECRET = "sk-provider-secret"
INSIDE = {"external_private": True, "external_ca_file": files()[0]}


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with Provider(key=SECRET) as provider:
        yield provider


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "provider-key-file"
    file.write_text(f"{SECRET}\n")
    return file


def external(provider: Provider, key_file: Path | None, host: str = "localhost", **changes: Any) -> spec.Model:
    url = changes.pop("url", provider.url(host))
    there = spec.External(url, "gpt-there", None if key_file is None else str(key_file))
    return spec.Model(name="m", external=there, **changes)


@pytest.fixture
async def gateway(provider: Provider, key_file: Path, start: Start) -> AsyncIterator[Running]:
    """A gateway whose model `m` a provider serves."""
    async with start(contents(models=[external(provider, key_file, aliases=("n",))]), **INSIDE) as gateway:
        yield gateway


async def test_a_providers_model_answers_and_it_is_sent_what_it_needs_alone(
    gateway: Running, provider: Provider
) -> None:
    body = b'{ "model" : "n", "messages":[{"role":"user","content":"h\xc3\xa9"}], "unknown":{"a":[1, 2]} }'
    response = await gateway.chat(
        body,
        headers={
            "traceparent": "00-a-b-01",
            "x-forwarded-for": "10.9.8.7",
            "cookie": "c=1",
            "openai-organization": "o",
        },
        params={"api_key": "leak"},
    )
    assert response.status_code == 200
    assert response.content == ANSWER.split(b"\r\n\r\n", 1)[1]
    assert response.headers["x-llmgw-model"] == "m"
    assert response.headers["x-llmgw-replica"] == "external:m"
    head, sent = provider.raw.split(b"\r\n\r\n", 1)
    assert sent == body.replace(b'"n"', b'"gpt-there"')
    first, *lines = head.decode().split("\r\n")
    assert first == "POST /v1/chat/completions HTTP/1.1"
    assert sorted(lines) == [
        f"Authorization: Bearer {SECRET}",
        f"Host: localhost:{provider.port}",
        "accept: */*",
        f"content-length: {len(sent)}",
        "content-type: application/json",
    ]
    for told in (KEY, "req-", "10.9.8.7", "traceparent", "llmgw", "leak", "python", "cookie", "organization"):
        assert told.encode() not in provider.raw
    assert provider.server_names == ["localhost"]
    (record,) = await gateway.records()
    assert (record.status, record.model, record.replica, record.node) == (200, "m", "external:m", "")
    assert (record.prompt_tokens, record.completion_tokens, record.estimated) == (10, 40, False)


async def test_a_stream_is_counted_and_its_usage_taken_out_as_an_engines(gateway: Running, provider: Provider) -> None:
    response = await gateway.chat({"stream": True, "max_tokens": 3})
    assert response.headers["content-type"] == "text/event-stream"
    assert response.text.count("hello") == 3
    assert '"choices":[]' not in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    assert provider.requests[-1].json["stream_options"] == {"include_usage": True}
    assert provider.requests[-1].json["model"] == "gpt-there"
    (record,) = await gateway.records()
    assert (record.completion_tokens, record.estimated, record.streamed) == (3, False, True)


async def test_a_client_that_leaves_ends_the_providers_work(gateway: Running, provider: Provider) -> None:
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 10_000, "delay": 0.01}).encode()
    await gateway.raw(raw_chat(body), until=b"hello")
    async with asyncio.timeout(10):
        await provider.requests[-1].gone.wait()
    (record,) = await gateway.records()
    assert record.status == 499
    await gateway.quiet()


async def test_a_changed_key_is_sent_from_the_next_request_on(
    gateway: Running, provider: Provider, key_file: Path
) -> None:
    assert (await gateway.chat()).status_code == 200
    provider.key = "sk-rotated"
    key_file.write_text("sk-rotated")
    assert (await gateway.chat()).status_code == 200
    assert provider.accepted == 1, "the connection stays"


async def test_a_missing_key_file_says_which_model_and_heals_with_the_file(
    gateway: Running, provider: Provider, key_file: Path
) -> None:
    key_file.unlink()
    for _ in range(5):
        response = await gateway.chat()
        assert (response.status_code, code(response)) == (502, "engine_failed")
        message = response.json()["error"]["message"]
        assert message == "Model m cannot be reached: its key file does not exist. Tell an operator."
    assert provider.raw == b""
    key_file.write_text(SECRET)
    assert (await gateway.chat()).status_code == 200


@pytest.mark.parametrize("status", [b"401 Unauthorized", b"403 Forbidden", b"402 Payment Required"])
async def test_what_a_provider_says_of_the_key_is_not_for_clients(
    gateway: Running, provider: Provider, status: bytes
) -> None:
    provider.behaviour = mock_engine.fails(status, b'{"error":{"message":"Incorrect API key: sk-pr***et of org-7"}}')
    response = await gateway.chat()
    assert (response.status_code, code(response)) == (502, "engine_failed")
    assert "The provider of model m failed: it refused this gateway's key or account" in response.text
    assert "Incorrect" not in response.text
    assert "org-7" not in response.text
    (record,) = await gateway.records()
    assert (record.status, record.error_code) == (502, "engine_failed")
    (target,) = gateway.gateway.plane.table.targets
    assert target.health.failures == 1


async def test_a_redirection_is_not_followed(gateway: Running, provider: Provider) -> None:
    async with MockEngine() as inner:
        where = f"Location: http://127.0.0.1:{inner.port}/metrics\r\n".encode()
        provider.behaviour = mock_engine.says(plain(b"", status=b"307 Temporary Redirect", extra=where))
        response = await gateway.chat()
        assert (response.status_code, code(response)) == (502, "engine_failed")
        assert "redirection (307), which is not followed" in response.text
        assert "location" not in response.headers
        assert inner.accepted == 0


async def test_a_provider_that_is_full_says_when_to_come_back(gateway: Running, provider: Provider) -> None:
    text = b'{"error":{"message":"Rate limit reached for org-7"}}'
    provider.behaviour = mock_engine.says(plain(text, status=b"429 Too Many Requests", extra=b"Retry-After: 17\r\n"))
    for _ in range(4):
        response = await gateway.chat()
        assert (response.status_code, code(response)) == (429, "rate_limited")
        assert response.headers["retry-after"] == "17"
        assert "org-7" not in response.text
    (target,) = gateway.gateway.plane.table.targets
    assert target.health.until is None


async def test_its_refusal_of_the_request_passes(gateway: Running, provider: Provider) -> None:
    provider.behaviour = mock_engine.fails(b"400 Bad Request", b'{"error":{"message":"max_tokens is too large"}}')
    response = await gateway.chat()
    assert response.status_code == 400
    assert response.json() == {"error": {"message": "max_tokens is too large"}}


async def test_its_failure_is_told_without_its_words(gateway: Running, provider: Provider) -> None:
    provider.behaviour = mock_engine.fails(b"500 Oops", b'{"error":{"message":"shard db-7.internal"}}')
    response = await gateway.chat()
    assert (response.status_code, code(response)) == (502, "engine_failed")
    assert "db-7" not in response.text


async def test_a_kept_connection_that_the_provider_closed_is_replaced_unseen(
    gateway: Running, provider: Provider
) -> None:
    assert (await gateway.chat()).status_code == 200
    provider.script.append(mock_engine.resets)
    assert (await gateway.chat()).status_code == 200
    assert provider.accepted == 2
    for connection in tuple(provider.connections):
        connection.transport.abort()
    await eventually(lambda: not provider.connections, 20)
    assert (await gateway.chat()).status_code == 200


async def test_half_an_answer_is_never_a_whole_one(gateway: Running, provider: Provider) -> None:
    provider.behaviour = mock_engine.breaks_off
    assert (await gateway.chat()).status_code == 502
    provider.behaviour = mock_engine.streams(mock_engine.TOKEN, then_close=True)
    response = await gateway.chat({"stream": True})
    assert "event: error" in response.text
    assert "[DONE]" not in response.text


async def test_the_operators_account_is_out_of_reach(gateway: Running, provider: Provider) -> None:
    listing = await gateway.http.get("/v1/files", params={"model": "m"}, headers={"authorization": f"Bearer {KEY}"})
    assert (listing.status_code, code(listing)) == (404, "route_unknown")
    job = await gateway.chat(path="/v1/fine_tuning/jobs")
    assert (job.status_code, code(job)) == (404, "route_unknown")
    assert provider.accepted == 0


async def test_a_provider_is_never_scraped_and_a_gateway_with_one_is_ready(
    provider: Provider, key_file: Path, start: Start
) -> None:
    async with MockEngine(key=key_of("l-1")) as local:
        models = [external(provider, key_file), spec.Model(name="local")]
        async with start(contents(endpoint(local.port, "l-1", "local"), models=models), **INSIDE) as gateway:
            replica, outside = gateway.gateway.plane.table.targets
            await eventually(lambda: replica.running == 0, 20)
            assert (outside.scraped_at, outside.running, provider.accepted) == (None, None, 0)
            await eventually(lambda: "l-1" in gateway.store.loads, 20)
            assert set(gateway.store.loads) == {"l-1"}
    async with start(contents(models=[external(provider, key_file)]), **INSIDE) as gateway:
        assert (await gateway.http.get("/ready")).status_code == 200


async def test_a_provider_that_lacks_a_route_is_asked_for_chat(gateway: Running, provider: Provider) -> None:
    provider.script.append(mock_engine.fails(b"404 Not Found"))
    for _ in range(2):
        response = await gateway.chat(b'{"model":"m","input":"hi"}', path="/v1/responses")
        assert response.status_code == 200
        assert response.json()["object"] == "response"
    chat = "/v1/chat/completions"
    assert [seen.path for seen in provider.requests] == ["/v1/responses", chat, chat]
    assert {seen.json["model"] for seen in provider.requests} == {"gpt-there"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"])
async def test_a_provider_inside_is_not_connected_to_unless_the_operator_lets_it(
    provider: Provider, key_file: Path, start: Start, host: str
) -> None:
    models = [external(provider, key_file, host)]
    async with start(contents(models=models), external_ca_file=files()[0]) as gateway:
        response = await gateway.chat()
        assert (response.status_code, code(response)) == (502, "engine_failed")
        assert "a loopback address, which nothing is sent to while gateway.external_private is off" in response.text
        assert provider.accepted == 0
        (target,) = gateway.gateway.plane.table.targets
        assert target.health.failures == 0


async def test_a_provider_whose_certificate_is_not_trusted_gets_nothing(
    provider: Provider, key_file: Path, start: Start
) -> None:
    async with start(contents(models=[external(provider, key_file)]), external_private=True) as gateway:
        response = await gateway.chat()
        assert (response.status_code, code(response)) == (503, "engine_down")
        assert "restarted" not in response.text
        assert provider.raw == b""


async def test_a_changed_catalog_changes_where_requests_go(provider: Provider, key_file: Path, start: Start) -> None:
    store = MemoryStore(contents(models=[external(provider, key_file)]))
    async with start(store, **INSIDE) as gateway, Provider(key=SECRET) as other:
        assert (await gateway.chat()).status_code == 200
        before = gateway.gateway.plane.table.targets
        store.change(grants=(grant(), grant("sk-other" + "k" * 40, key_id=2)))
        await eventually(lambda: len(gateway.gateway.plane.table.grants) == 2, 20)
        assert gateway.gateway.plane.table.targets == before
        store.change(models=(external(other, key_file),))
        await eventually(lambda: gateway.gateway.plane.table.targets != before, 20)
        assert (await gateway.chat()).status_code == 200
        assert (len(provider.requests), len(other.requests)) == (1, 1)
        store.change(models=(spec.Model(name="m"),))
        await eventually(lambda: not gateway.gateway.plane.table.targets, 20)
        assert code(await gateway.chat()) == "no_endpoint"


async def test_a_provider_serves_as_a_fallback_and_one_that_is_full_hands_on(
    provider: Provider, key_file: Path, start: Start
) -> None:
    far = external(provider, key_file, fallbacks=("spare",))
    models = [spec.Model(name="local", fallbacks=("m",)), far, spec.Model(name="spare")]
    async with MockEngine(key=key_of("s-1")) as spare:
        now = contents(endpoint(spare.port, "s-1", "spare"), models=models)
        async with start(now, **INSIDE) as gateway:
            response = await gateway.chat({"model": "local"})
            assert response.headers["x-llmgw-model"] == "m"
            assert provider.requests[-1].json["model"] == "gpt-there"
            provider.behaviour = mock_engine.fails(b"429 Too Many Requests")
            response = await gateway.chat({"model": "m"})
            assert response.headers["x-llmgw-model"] == "spare"
            assert spare.requests[-1].json["model"] == "spare"


# --- static endpoints ------------------------------------------------------------------------------------------------
async def test_a_static_endpoint_is_scraped_and_sent_to_as_a_replica(start: Start, key_file: Path) -> None:
    async with MockEngine(key=SECRET) as engine:
        listed = {
            "url": f"http://127.0.0.1:{engine.port}",
            "models": ["old"],
            "engine": "llamacpp",
            "key_file": key_file,
        }
        async with start(contents(), endpoints=[listed]) as gateway:
            response = await gateway.chat({"model": "old"}, headers={"traceparent": "00-a-b-01"})
            assert response.status_code == 200
            assert response.headers["x-llmgw-replica"] == f"127.0.0.1:{engine.port}"
            seen = engine.requests[-1]
            assert seen.json["model"] == "old"
            assert seen.header(b"traceparent") == b"00-a-b-01"
            assert seen.header(b"x-request-id") == response.headers["x-request-id"].encode()
            listing = await gateway.http.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
            assert {each["id"] for each in listing.json()["data"]} == {"m", "old"}
            (target,) = gateway.gateway.plane.table.targets
            await eventually(lambda: target.running == 0, 20)
            assert target.weight == 16


async def test_a_static_endpoint_joins_the_catalogs_model_and_takes_over_when_a_replica_fails(start: Start) -> None:
    async with MockEngine(key=key_of("m-1")) as replica, MockEngine() as outside:
        listed = {"name": "old-box", "url": f"http://127.0.0.1:{outside.port}/v1", "models": ["n"]}
        models = [spec.Model(name="m", aliases=("n",))]
        async with start(contents(endpoint(replica.port), models=models), endpoints=[listed]) as gateway:
            assert len(gateway.gateway.plane.table.names["m"].targets) == 2
            replica.behaviour = mock_engine.resets
            for _ in range(4):
                assert (await gateway.chat()).status_code == 200
            assert {seen.json["model"] for seen in outside.requests} == {"n"}
            await gateway.records(4)


async def test_with_static_endpoints_and_no_keys_a_gateway_needs_no_store(start: Start) -> None:
    store = MemoryStore(contents(), away=True)
    async with MockEngine() as engine:
        listed = {"url": f"http://127.0.0.1:{engine.port}", "models": ["old"]}
        async with start(store, endpoints=[listed], auth=False) as gateway:
            assert (await gateway.http.get("/ready")).status_code == 200
            assert (await gateway.chat({"model": "old"}, key="anything")).status_code == 200
            assert code(await gateway.chat({"model": "m"}, key="anything")) == "model_unknown"
            store.away = False  # for the end, which hands the journal over


# --- what a request may name -----------------------------------------------------------------------------------------
PICTURE = {"type": "image_url", "image_url": {"url": "https://images.example.org/a.png"}}


@pytest.mark.parametrize(
    ("policy", "status"),
    [("off", 400), (False, 400), ("any", 200), (["images.example.org"], 200), (["x.example"], 400)],
)
async def test_a_picture_by_address_passes_only_where_the_operator_lets_it(
    engine: MockEngine, start: Start, policy: Any, status: int
) -> None:
    async with start(contents(endpoint(engine.port)), media_urls=policy) as gateway:
        response = await gateway.chat({"messages": [{"role": "user", "content": [PICTURE]}]})
        assert response.status_code == status
        if status == 400:
            assert response.json()["error"]["param"] == "messages[0].content[0].image_url.url"
            assert not engine.requests
        inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
        assert (await gateway.chat({"messages": [{"role": "user", "content": [inline]}]})).status_code == 200
