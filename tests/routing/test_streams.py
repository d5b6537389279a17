"""Streams pass unchanged, and clients that are slow or leave cost nobody anything; over a real port, both ways in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from routing import sse
from tests.routing.conftest import Start
from tests.routing.gateways import (
    CHAT,
    KEY,
    Running,
    contents,
    endpoint,
    eventually,
    raw_chat,
)
from tests.stubs import mock_engine
from tests.stubs.mock_engine import DONE, TOKEN, MockEngine, Seen, chunk, usage_event

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
    arrived = asyncio.Semaphore(1)

    async def waits_for_the_client(connection: Any, seen: Seen) -> None:
        connection.transport.write(mock_engine.STREAM_HEAD)
        for piece in (TOKEN, TOKEN, TOKEN, DONE):
            await arrived.acquire()
            connection.transport.write(chunk(piece))
        connection.transport.write(mock_engine.LAST)

    engine.behaviour = waits_for_the_client
    headers = {"authorization": f"Bearer {KEY}"}
    got = []
    async with gateway.http.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers
    ) as it:
        async for piece in it.aiter_bytes():
            got.append(piece)
            arrived.release()
    assert got == [TOKEN, TOKEN, TOKEN, DONE]


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
    assert held < 100_000_000  # of 200 million: what the kernel's socket buffers hold, on two hops
    await reader.readexactly(5_000_000)
    await eventually(lambda: written > held)
    writer.close()
    async with asyncio.timeout(20):
        await engine.requests[0].gone.wait()
    await gateway.quiet()


async def test_a_client_that_takes_nothing_is_let_go_after_the_silence_limit(start: Start, engine: MockEngine) -> None:
    engine.behaviour = mock_engine.streams(*[b"data: " + b"x" * 500_000 + b"\n\n"] * 100, pause_s=0)
    async with start(contents(endpoint(engine.port)), idle_timeout_s=0.5) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=2**16)
        writer.write(raw_chat(json.dumps({**CHAT, "stream": True}).encode()))
        seen = await engine.next_request()
        async with asyncio.timeout(20):
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
        async with asyncio.timeout(20):
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
    async with asyncio.timeout(20):
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
