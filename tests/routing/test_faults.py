"""What happens when an engine does not do its part, over a real port and both ways in."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import pytest

from tests.routing.conftest import Start
from tests.routing.gateways import (
    CHAT,
    Running,
    code,
    contents,
    endpoint,
    eventually,
    key_of,
    raw_chat,
)
from tests.stubs import mock_engine
from tests.stubs.mock_engine import TOKEN, MockEngine, Seen, chunk


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- engines that fail -----------------------------------------------------------------------------------------------
FAILURES: list[tuple[str, Any, int, str]] = [
    ("resets", mock_engine.resets, 502, "engine_failed"),
    ("half a body", mock_engine.breaks_off, 502, "engine_failed"),
    ("500", mock_engine.fails(b"500 Oops"), 502, "engine_failed"),
    ("503", mock_engine.fails(b"503 Loading", b'{"error":{"message":"Loading model"}}'), 503, "engine_down"),
    ("401", mock_engine.fails(b"401 Unauthorized"), 502, "engine_failed"),
    ("html 502", mock_engine.fails(b"502 Bad", b"<html>bad</html>", b"text/html"), 502, "engine_failed"),
    ("not HTTP", mock_engine.says(b"SSH-2.0-OpenSSH\r\n"), 502, "engine_failed"),
    (
        "endless headers",
        mock_engine.says(b"HTTP/1.1 200 OK\r\n", *[b"x: " + b"y" * 9000 + b"\r\n"] * 9),
        502,
        "engine_failed",
    ),
    ("silence", mock_engine.hangs, 504, "engine_silent"),
    ("redirect", mock_engine.fails(b"307 Temporary Redirect", b""), 404, "route_unknown"),
    ("404 without a shape", mock_engine.fails(b"404 Not Found", b'{"detail":"Not Found"}'), 404, "route_unknown"),
    ("422 as html", mock_engine.fails(b"422 No", b"<p>no</p>", b"text/html"), 422, "engine_refused"),
]


@pytest.mark.parametrize(("name", "behaviour", "status", "expected"), FAILURES, ids=[each[0] for each in FAILURES])
async def test_each_way_to_fail_has_its_status_and_code(
    start: Start, engine: MockEngine, name: str, behaviour: Any, status: int, expected: str
) -> None:
    passed_on = 400 <= status < 500 and name != "redirect"
    async with start(contents(endpoint(engine.port)), first_byte_timeout_s=1 if name == "silence" else 60) as gateway:
        for stream in (True, False):
            engine.behaviour = behaviour
            response = await gateway.chat({"stream": stream})
            assert (response.status_code, code(response)) == (status, expected)
            assert response.headers["content-type"] == "application/json"
            assert ("retry-after" in response.headers) == (status == 503)
            assert gateway.gateway.plane.table.targets[0].in_flight == 0
            engine.behaviour = None
            assert (await gateway.chat()).status_code == 200
        records = sorted(await gateway.records(4), key=lambda record: record.request_id)
        assert [(record.status, record.error_code) for record in records] == [
            (status, "engine_refused" if passed_on else expected),
            (200, ""),
        ] * 2


async def test_an_engines_own_4xx_passes_as_it_is_once_and_never_counts_against_it(
    start: Start, engine: MockEngine
) -> None:
    body = b'{"error":{"message":"context too long","code":400,"n_ctx":1024}}'
    engine.behaviour = mock_engine.fails(b"400 Bad Request", body)
    async with (
        MockEngine(key=key_of("m-2")) as other,
        start(contents(endpoint(engine.port), endpoint(other.port, "m-2"))) as gateway,
    ):
        other.behaviour = engine.behaviour
        for _ in range(8):
            response = await gateway.chat()
            assert (response.status_code, response.content) == (400, body)
        assert len(engine.requests) + len(other.requests) == 8
        assert all(target.health.until is None for target in gateway.gateway.plane.table.targets)


async def test_501_is_passed_on_and_not_tried_elsewhere(gateway: Running, engine: MockEngine) -> None:
    body = b'{"error":{"message":"This server does not support embeddings","code":501}}'
    engine.behaviour = mock_engine.fails(b"501 Not Implemented", body)
    response = await gateway.chat(path="/v1/embeddings")
    assert (response.status_code, response.content) == (501, body)


@pytest.mark.parametrize(
    "behaviour",
    [mock_engine.resets, mock_engine.breaks_off, mock_engine.fails(b"500 Oops"), mock_engine.streams(then_close=True)],
    ids=["resets", "half a body", "500", "an empty broken stream"],
)
async def test_a_failure_before_the_first_byte_is_tried_on_another_endpoint(
    start: Start, engine: MockEngine, behaviour: Any
) -> None:
    engine.behaviour = behaviour
    async with (
        MockEngine(key=key_of("m-2")) as other,
        start(contents(endpoint(engine.port), endpoint(other.port, "m-2"))) as gateway,
    ):
        for _ in range(6):
            response = await gateway.chat()
            assert response.status_code == 200
            assert response.headers["x-llmgw-replica"] == "m-2"
        records = await gateway.records(6)
        assert len(records) == 6
        assert {(record.status, record.replica) for record in records} == {(200, "m-2")}


async def test_a_request_is_tried_a_bounded_number_of_times_each_endpoint_once(start: Start) -> None:
    engines = [await MockEngine(key=key_of(f"m-{number}")).start() for number in range(5)]
    try:
        for each in engines:
            each.behaviour = mock_engine.fails(b"500 Oops")
        endpoints = [endpoint(each.port, f"m-{number}") for number, each in enumerate(engines)]
        async with start(contents(*endpoints), attempts=3) as gateway:
            assert code(await gateway.chat()) == "engine_failed"
        assert sorted(len(each.requests) for each in engines) == [0, 0, 1, 1, 1]
    finally:
        for each in engines:
            await each.stop()


async def test_an_endpoint_that_is_down_is_ejected_and_a_probe_brings_it_back(start: Start) -> None:
    port = closed_port()
    async with start(contents(endpoint(port))) as gateway:
        for _ in range(4):
            response = await gateway.chat()
            assert (response.status_code, code(response)) == (503, "engine_down")
        (target,) = gateway.gateway.plane.table.targets
        assert target.health.until is not None
        target.health = replace(target.health, until=0.0)
        engine = await MockEngine(key=key_of("m-1")).start(port)
        try:
            assert (await gateway.chat()).status_code == 200
            assert target.health.until is None
        finally:
            await engine.stop()


async def test_one_bad_request_cannot_take_the_last_replica_from_everybody(
    gateway: Running, engine: MockEngine
) -> None:
    engine.behaviour = mock_engine.fails(b"500 Oops")
    for _ in range(6):
        assert code(await gateway.chat()) == "engine_failed"
    engine.behaviour = None
    assert (await gateway.chat()).status_code == 200


async def test_a_stranger_on_the_port_never_answers_for_a_model(start: Start) -> None:
    async with MockEngine(key=key_of("other-1")) as stranger, start(contents(endpoint(stranger.port))) as gateway:
        response = await gateway.chat()
        assert (response.status_code, code(response)) == (502, "engine_failed")
        assert "does not know the key of this replica" in response.json()["error"]["message"]


async def test_a_kept_alive_connection_that_the_engine_closed_is_replaced_invisibly_once(
    start: Start, engine: MockEngine
) -> None:
    async with start(contents(endpoint(engine.port)), scrape_s=3600) as gateway:  # a scrape would use it as well
        assert (await gateway.chat()).status_code == 200
        before = engine.accepted
        engine.script.append(mock_engine.resets)  # the kept-alive one
        assert (await gateway.chat()).status_code == 200
        assert engine.accepted == before + 1
        assert gateway.gateway.plane.table.targets[0].health.failures == 0
        engine.script.extend([mock_engine.resets, mock_engine.resets])  # and then the fresh one too
        assert code(await gateway.chat()) == "engine_failed"


async def test_connections_are_reused_and_closed_when_idle(gateway: Running, engine: MockEngine) -> None:
    for _ in range(10):
        assert (await gateway.chat()).status_code == 200
    assert engine.accepted <= 2  # one for requests, perhaps one for scrapes
    pools = gateway.gateway.plane.pools
    pools.prune(asyncio.get_running_loop().time() + 100)
    await eventually(lambda: engine.accepted > 2 or not engine.connections)


async def test_half_a_body_is_never_a_whole_200(gateway: Running, engine: MockEngine) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    big = b'{"data":"' + b"x" * 600_000
    for framing in (
        [head + b"Content-Length: 900000\r\n\r\n", big],
        [head + b"Transfer-Encoding: chunked\r\n\r\n", chunk(big)],
        [b"HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"ID3")],
    ):
        engine.behaviour = mock_engine.says(*framing, then_close=True, pause_s=0.05)
        got = await gateway.raw(raw_chat(json.dumps(CHAT).encode()))  # the gateway closes it
        assert got.startswith(b"HTTP/1.1 200")
        assert not got.endswith(b"0\r\n\r\n")
        length = got.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        assert not length or len(got.partition(b"\r\n\r\n")[2]) < int(length)
    records = await gateway.records(3)
    assert {record.status for record in records} == {502}


async def test_long_and_unframed_answers_pass_whole(gateway: Running, engine: MockEngine) -> None:
    usage = b',"usage":{"prompt_tokens":3,"total_tokens":3}}'
    body = b'{"data":"' + b"x" * 3_000_000 + b'"' + usage
    engine.behaviour = mock_engine.says(mock_engine.plain(body))
    assert (await gateway.chat(path="/v1/embeddings")).content == body
    unframed = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    engine.behaviour = mock_engine.says(unframed, b'{"a":1', usage, then_close=True)
    assert (await gateway.chat(path="/v1/embeddings")).content == b'{"a":1' + usage
    engine.behaviour = mock_engine.says(
        b"HTTP/1.1 100 Continue\r\n\r\n" + mock_engine.plain(b"hello", b"text/plain"), pause_s=0.01
    )
    assert (await gateway.chat()).text == "hello"
    records = await gateway.records(3)
    assert [record.prompt_tokens for record in records][:2] == [3, 3]


async def test_an_engine_that_falls_silent_mid_stream_is_cut_off(start: Start, engine: MockEngine) -> None:
    async def stalls(connection: Any, seen: Seen) -> None:
        connection.transport.write(mock_engine.STREAM_HEAD + chunk(TOKEN))
        await seen.gone.wait()

    engine.behaviour = stalls
    async with start(contents(endpoint(engine.port)), idle_timeout_s=0.3) as gateway:
        response = await gateway.chat({"stream": True})
        assert response.text.startswith(TOKEN.decode())
        assert '"engine_silent"' in response.text
        (record,) = await gateway.records()
        assert record.status == 504


@pytest.mark.parametrize(
    "head",
    [
        mock_engine.STREAM_HEAD,
        mock_engine.STREAM_HEAD.replace(b"text/event-stream", b"application/json"),
        mock_engine.STREAM_HEAD.replace(b"text/event-stream", b"audio/wav"),
    ],
)
async def test_a_head_sent_before_the_prompt_is_read_does_not_shorten_the_limit_of_the_first_byte(
    start: Start, engine: MockEngine, head: bytes
) -> None:
    async def thinks(connection: Any, seen: Seen) -> None:
        connection.transport.write(head)
        await asyncio.sleep(0.6)
        connection.transport.write(chunk(b"{}") + b"0\r\n\r\n")

    engine.behaviour = thinks
    async with start(contents(endpoint(engine.port)), idle_timeout_s=0.2, first_byte_timeout_s=60) as gateway:
        assert (await gateway.chat({"stream": True})).text == "{}"
    async with start(contents(endpoint(engine.port)), idle_timeout_s=60, first_byte_timeout_s=0.2) as gateway:
        response = await gateway.chat({"stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "engine_silent")
