"""What happens when an engine, a client or the store does not do its part, over a real port and both ways in."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import Any

import httpx
import pytest

from catalog import spec
from routing import loops, sse
from tests.routing.conftest import Start
from tests.routing.gateways import (
    CHAT,
    KEY,
    MemoryStore,
    Running,
    contents,
    endpoint,
    eventually,
    grant,
    key_of,
    raw_chat,
)
from tests.stubs import mock_engine
from tests.stubs.mock_engine import DONE, TOKEN, MockEngine, Seen, chunk, usage_event


def code(response: httpx.Response) -> str:
    found = response.json()["error"]["code"]
    assert isinstance(found, str)
    return found


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- streams ---------------------------------------------------------------------------------------------------------
FRAMINGS: dict[str, list[bytes]] = {
    "crlf, the blank line in two writes": [
        TOKEN.replace(b"\n\n", b"\r\n\r"),
        b"\n",
        usage_event(1).replace(b"\n\n", b"\r\n\r"),
        b"\n",
        b"data: [DONE]\r\n\r\n",
    ],
    "no space after data:": [(TOKEN + usage_event(1) + DONE).replace(b"data: ", b"data:")],
    "everything in one write": [TOKEN * 5 + usage_event(5) + DONE],
    "comments and a split character": [
        b": ping\n\n",
        b'data: {"choices":[{"x":"h\xc3',
        b'\xa9"}]}\n\n',
        usage_event(1),
        DONE,
    ],
    "one byte at a time": [bytes([byte]) for byte in TOKEN + usage_event(1) + DONE],
}


@pytest.mark.parametrize("name", list(FRAMINGS))
async def test_every_framing_passes_unchanged_and_is_counted(gateway: Running, engine: MockEngine, name: str) -> None:
    engine.behaviour = mock_engine.streams(*FRAMINGS[name], pause_s=0)
    whole = b"".join(FRAMINGS[name])
    start = _usage_at(whole)
    without = whole[:start] + whole[_event_end(whole, start) :]
    assert (await gateway.chat({"stream": True})).content == without
    asking = {"stream": True, "stream_options": {"include_usage": True}}
    assert (await gateway.chat(asking)).content == whole
    for record in await gateway.records(2):
        assert (record.estimated, record.prompt_tokens) == (False, 10)


def _usage_at(whole: bytes) -> int:
    return whole.rindex(b"data:", 0, whole.index(b'"usage"'))


def _event_end(whole: bytes, start: int) -> int:
    found = [whole.find(end, start) + len(end) for end in (b"\n\n", b"\r\n\r\n") if whole.find(end, start) >= 0]
    return min(found)


async def test_each_event_arrives_when_the_engine_sends_it(gateway: Running, engine: MockEngine) -> None:
    loop, last = asyncio.get_running_loop(), 0.0
    headers = {"authorization": f"Bearer {KEY}"}
    body = {**CHAT, "stream": True, "max_tokens": 4, "delay": 0.2}
    gaps = []
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        async for _ in response.aiter_bytes():
            now = loop.time()
            gaps.append(now - last)
            last = now
    assert sum(gap > 0.15 for gap in gaps[1:]) >= 3


async def test_an_engine_that_never_says_usage_is_estimated_and_marked(gateway: Running, engine: MockEngine) -> None:
    engine.behaviour = mock_engine.streams(TOKEN, TOKEN, DONE)
    assert (await gateway.chat({"stream": True})).content == TOKEN * 2 + DONE
    (record,) = await gateway.records()
    assert record.estimated
    assert record.completion_tokens == 3
    assert record.prompt_tokens is not None
    assert record.prompt_tokens > 0


async def test_a_stream_that_breaks_ends_with_one_error_event_and_is_counted(
    gateway: Running, engine: MockEngine
) -> None:
    engine.behaviour = mock_engine.streams(TOKEN, TOKEN, TOKEN[:20], then_close=True)
    response = await gateway.chat({"stream": True})
    assert response.status_code == 200
    head, event = response.text.rsplit("event: error\n", 1)
    assert head == (TOKEN * 2).decode()  # the half event was never passed
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "engine_failed"
    (record,) = await gateway.records()
    assert (record.status, record.error_code, record.estimated) == (502, "engine_failed", True)
    assert record.completion_tokens is not None
    assert record.completion_tokens >= 2


async def test_a_stream_that_breaks_inside_a_passed_event_ends_that_event_first(
    gateway: Running, engine: MockEngine
) -> None:
    engine.behaviour = mock_engine.streams(TOKEN, TOKEN[:20], then_close=True)
    response = await gateway.chat({"stream": True, "stream_options": {"include_usage": True}})
    assert response.content.startswith(TOKEN + TOKEN[:20] + b"\n\nevent: error\ndata: ")
    assert response.content.endswith(b"\n\n")


async def test_an_endless_event_is_cut_with_an_error(gateway: Running, engine: MockEngine) -> None:
    piece = b"a" * (1 << 20)
    count = sse.EVENT_LIMIT_BYTES // len(piece) + 4
    engine.behaviour = mock_engine.streams(b"data: ", *[piece] * count, pause_s=0)
    response = await gateway.chat({"stream": True})
    assert b"event: error" in response.content[-600:]
    assert len(response.content) < sse.EVENT_LIMIT_BYTES + 4 * len(piece)


async def settled(value: Callable[[], int]) -> int:
    """What `value()` is once it has not changed for a while."""
    last = -1
    for _ in range(50):
        if (now := value()) == last:
            return now
        last = now
        await asyncio.sleep(0.3)
    raise AssertionError("it never settled")


async def test_a_slow_client_stops_the_read_from_the_engine(gateway: Running, engine: MockEngine) -> None:
    written = 0

    async def floods(connection: Any, seen: Seen) -> None:
        nonlocal written
        connection.transport.write(mock_engine.STREAM_HEAD)
        big = chunk(b"data: " + b"x" * 60_000 + b"\n\n")
        while not connection.transport.is_closing() and written < 200_000_000:
            await connection.can_write.wait()
            connection.transport.write(big)
            written += len(big)
            await asyncio.sleep(0)

    engine.behaviour = floods
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=2**16)
    writer.write(raw_chat(json.dumps({**CHAT, "stream": True}).encode()))
    await reader.readuntil(b"\r\n\r\n")
    held = await settled(lambda: written)
    assert held < 40_000_000  # what the kernel's socket buffers hold, on two hops
    await reader.readexactly(5_000_000)
    await eventually(lambda: written > held)
    writer.close()
    async with asyncio.timeout(5):
        await engine.requests[0].gone.wait()
    await gateway.quiet()


async def test_a_client_that_takes_nothing_is_let_go_after_the_silence_limit(start: Start, engine: MockEngine) -> None:
    engine.behaviour = mock_engine.streams(*[b"data: " + b"x" * 500_000 + b"\n\n"] * 100, pause_s=0)
    async with start(contents(endpoint(engine.port)), idle_timeout_s=0.5) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=2**16)
        writer.write(raw_chat(json.dumps({**CHAT, "stream": True}).encode()))
        seen = await engine.next_request()
        async with asyncio.timeout(5):
            await seen.gone.wait()
        (record,) = await gateway.records()
        assert (record.status, record.error_code) == (499, "client_left")
        writer.close()


# --- clients that leave ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_byte_aborts_the_engines_request(
    gateway: Running, engine: MockEngine, stream: bool
) -> None:
    engine.behaviour = mock_engine.hangs
    for _ in range(3):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_chat(json.dumps({**CHAT, "stream": stream}).encode()))
        seen = await engine.next_request()
        writer.close()
        async with asyncio.timeout(1):
            await seen.gone.wait()
        assert sum(each.open is not None for each in engine.connections) == 0
    records = await gateway.records(3)
    assert {(record.status, record.error_code) for record in records} == {(499, "client_left")}
    assert gateway.gateway.plane.table.targets[0].in_flight == 0
    engine.behaviour = None
    assert (await gateway.chat()).status_code == 200


async def test_a_client_that_leaves_mid_stream_aborts_it_and_is_counted(gateway: Running, engine: MockEngine) -> None:
    _, writer = reader_writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(raw_chat(json.dumps({**CHAT, "stream": True, "max_tokens": 1000, "delay": 0.02}).encode()))
    await reader_writer[0].readuntil(b"hello")
    seen = await engine.next_request()
    writer.close()
    async with asyncio.timeout(1):
        await seen.gone.wait()
    (record,) = await gateway.records()
    assert (record.status, record.estimated) == (499, True)
    assert record.completion_tokens is not None
    assert record.completion_tokens >= 1


async def test_a_client_that_leaves_while_it_sends_is_forgotten(gateway: Running, engine: MockEngine) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(raw_chat(b"x" * 5000)[:-3000])
    await eventually(lambda: gateway.gateway.plane.active)
    writer.close()
    await gateway.quiet()
    assert engine.requests == []


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
    async with start(contents(endpoint(engine.port)), first_byte_timeout_s=0.3) as gateway:
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
    gateway: Running, engine: MockEngine
) -> None:
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
    async with start(contents(endpoint(engine.port)), idle_timeout_s=0.2, first_byte_timeout_s=5) as gateway:
        assert (await gateway.chat({"stream": True})).text == "{}"
    async with start(contents(endpoint(engine.port)), idle_timeout_s=5, first_byte_timeout_s=0.2) as gateway:
        response = await gateway.chat({"stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "engine_silent")


# --- the store -------------------------------------------------------------------------------------------------------
async def test_a_revoked_key_and_a_new_endpoint_take_effect_within_a_second(start: Start, engine: MockEngine) -> None:
    store = MemoryStore(contents(endpoint(engine.port)))
    async with start(store) as gateway:
        assert (await gateway.chat()).status_code == 200
        store.change(grants=())
        await eventually(lambda: not gateway.gateway.plane.table.grants, timeout_s=1)
        for _ in range(20):
            assert (await gateway.chat()).status_code == 401  # never let in again
        async with MockEngine(key=key_of("n-1")) as other:
            store.change(grants=(grant(),), endpoints=(endpoint(other.port, "n-1", "n"),), models=())
            await eventually(lambda: not gateway.gateway.plane.table.names)
            assert (await gateway.chat()).status_code == 404


async def test_load_and_health_survive_a_new_table_only_where_nothing_moved(start: Start, engine: MockEngine) -> None:
    store = MemoryStore(contents(endpoint(engine.port)))
    async with start(store) as gateway:
        plane = gateway.gateway.plane
        (before,) = plane.table.targets
        store.change(endpoints=(endpoint(engine.port, slots=9),))
        await eventually(lambda: plane.table.targets[0].weight == 9)
        assert plane.table.targets[0] is before
        store.change(endpoints=(endpoint(engine.port + 1),))
        await eventually(lambda: plane.table.targets[0] is not before)


async def test_without_the_store_it_serves_on_what_it_knows_says_so_and_stops_in_time(
    start: Start, engine: MockEngine
) -> None:
    store = MemoryStore(contents(endpoint(engine.port)))
    async with start(store, stale_for_s=0.6) as gateway:
        store.away = True
        await eventually(lambda: gateway.gateway.plane.store_away)
        assert (await gateway.chat()).status_code == 200
        assert "llmgw_table_stale 1.0" in (await gateway.http.get("/metrics")).text
        assert (await gateway.http.get("/ready")).status_code == 200
        await asyncio.sleep(0.8)
        response = await gateway.chat()
        assert (response.status_code, code(response)) == (503, "store_unreachable")
        assert (await gateway.http.get("/ready")).status_code == 503
        assert store.usage == {}
        store.away = False
        await gateway.records(1)  # what was served meanwhile arrives
        await eventually(lambda: not gateway.gateway.plane.store_away)
        assert (await gateway.chat()).status_code == 200


async def test_a_store_that_hangs_without_failing_is_said_to_be_away(
    start: Start, engine: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "SILENT_S", 0.2)
    asked, answers = Event(), Event()

    class Hangs(MemoryStore):
        def revision(self) -> int:
            if asked.is_set():
                answers.wait(10)
            return super().revision()

    try:
        async with start(Hangs(contents(endpoint(engine.port)))) as gateway:
            asked.set()
            await eventually(lambda: gateway.gateway.plane.store_away)
            assert "llmgw_table_stale 1.0" in (await gateway.http.get("/metrics")).text
            assert (await gateway.chat()).status_code == 200
            answers.set()
            await eventually(lambda: not gateway.gateway.plane.store_away)
    finally:
        answers.set()


async def test_scraped_load_and_own_requests_are_told_to_the_store(start: Start, engine: MockEngine) -> None:
    async with start(contents(endpoint(engine.port))) as gateway:
        (target,) = gateway.gateway.plane.table.targets
        await eventually(lambda: target.running is not None)
        loops = gateway.gateway.loops
        assert loops is not None
        await loops.report_loads()
        row = gateway.store.loads["m-1"]
        assert (row.in_flight, row.running, row.waiting, row.kv_used) == (0, 0, 0, None)
        engine.metrics = b"<html>"
        await eventually(lambda: target.running is None)  # unknown, not zero
        await loops.report_loads()
        assert gateway.store.loads["m-1"].running is None
        gateway.store.loads.clear()
        await loops.report_loads()
        assert gateway.store.loads == {}  # nothing changed, nothing written


async def test_a_drained_replicas_requests_are_told_each_time_until_it_is_gone(
    start: Start, engine: MockEngine
) -> None:
    async with start(contents(endpoint(engine.port))) as gateway:
        loops = gateway.gateway.loops
        assert loops is not None
        gateway.store.change(endpoints=(endpoint(engine.port, draining=True),))
        await eventually(lambda: bool(gateway.gateway.plane.table.leaving))
        for _ in range(2):
            gateway.store.loads.clear()
            await loops.report_loads()
            assert gateway.store.loads["m-1"].in_flight == 0
        gateway.store.change(endpoints=(), models=(spec.Model(name="m"),))
        await eventually(lambda: not gateway.gateway.plane.table.leaving)
        gateway.store.loads.clear()
        await loops.report_loads()
        assert gateway.store.loads == {}


async def test_a_store_that_takes_no_usage_but_answers_is_said_once_and_serving_is_not_called_stale(
    start: Start, engine: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(contents(endpoint(engine.port)), full=True)
    async with start(store) as gateway:
        with caplog.at_level("INFO"):
            assert (await gateway.chat()).status_code == 200
            await eventually(lambda: store.refused >= 3)
            assert "llmgw_table_stale 0.0" in (await gateway.http.get("/metrics")).text
            store.full = False
            await gateway.records(1)
            await eventually(lambda: "answers again (usage)" in caplog.text)
        said = [line.message for line in caplog.records if "The store" in line.message]
        assert len(said) == 2
        assert "finished requests wait in the journal" in said[0]


async def test_stopping_ends_streams_with_an_error_and_loses_no_record(start: Start, engine: MockEngine) -> None:
    store = MemoryStore(contents(endpoint(engine.port)))
    async with start(store) as gateway:
        for _ in range(20):
            assert (await gateway.chat()).status_code == 200
        streaming = asyncio.create_task(gateway.chat({"stream": True, "max_tokens": 10_000, "delay": 0.05}))
        await engine.next_request()
        await eventually(lambda: len(gateway.gateway.plane.active) == 1)
        await asyncio.sleep(0.2)
        await gateway.gateway.stop()
        response = await streaming
        assert '"gateway_stopping"' in response.text
    assert len(store.usage) == 21
    assert store.key_use.keys() == {1}
    assert not list((gateway.gateway.settings.data_dir / "journal").iterdir())
