"""One connection at the lean way in: heads without end, upgrades, what is no HTTP, and clients that leave unseen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from routing import edge, measures
from tests.routing.gateways import CHAT, Running, contents, endpoint, eventually, raw_chat, running
from tests.stubs import mock_engine
from tests.stubs.mock_engine import ANSWER, MockEngine

BODY = json.dumps(CHAT).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
BODY_OF_ANSWER = ANSWER[-20:]
CLOSE = b"Connection: close\r\n"


@pytest.fixture
async def lean(tmp_path: Path, engine: MockEngine) -> AsyncIterator[Running]:
    async with running(
        tmp_path, contents(endpoint(engine.port)), http_protocol=edge.__name__ + ":GatewayProtocol"
    ) as it:
        yield it


def code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


# --- heads -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("start", [b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n", b"GET /", b"\r\n"])
async def test_a_head_without_end_is_refused_and_not_kept(lean: Running, start: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", lean.port)
    writer.write(start)
    piece = b"\r\n" * 20_000 if start == b"\r\n" else b"a" * 40_000
    for _ in range(20):
        writer.write(b"x: " * (b"Host" in start) + piece + b"\r\n" * (b"Host" in start))
        try:
            await writer.drain()
        except ConnectionError:
            break
        await asyncio.sleep(0.001)
    async with asyncio.timeout(20):
        assert code(await reader.read()) == (431, "headers_too_large")
    writer.close()


async def test_a_head_that_does_not_come_is_not_waited_for(lean: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "HEAD_S", 0.5)
    assert await lean.raw(b"") == b"", "one that says nothing is closed without a word"
    assert code(await lean.raw(b"POST /v1/chat/completions HT")) == (408, "headers_too_slow")

    async def trickle(writer: asyncio.StreamWriter) -> None:
        for byte in b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx: " + b"a" * 100:
            writer.write(bytes((byte,)))
            await asyncio.sleep(0.01)

    reader, writer = await asyncio.open_connection("127.0.0.1", lean.port)
    trickling = asyncio.create_task(trickle(writer))
    async with asyncio.timeout(20):
        assert code(await reader.read(4096)) == (408, "headers_too_slow")
    trickling.cancel()
    writer.close()


async def test_the_next_head_of_a_kept_connection_is_bounded_too_and_stray_blanks_do_not_keep_it(
    lean: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "HEAD_S", 0.5)
    got = await lean.raw(raw_chat(BODY) + b"POST /v1/ch")
    first, _, rest = got.partition(b"HTTP/1.1 408")
    assert first.startswith(b"HTTP/1.1 200")
    assert b"headers_too_slow" in rest
    reader, writer = await asyncio.open_connection("127.0.0.1", lean.port)
    writer.write(raw_chat(BODY))
    await reader.readuntil(BODY_OF_ANSWER)
    writer.write(b"\r\n")
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_a_slow_answer_outlives_the_limit_of_the_next_head(
    lean: Running, engine: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "HEAD_S", 0.3)
    engine.behaviour = mock_engine.streams(*[b"data: x\n\n"] * 5, pause_s=0.15)
    body = json.dumps({**CHAT, "stream": True}).encode()
    got = await lean.raw(raw_chat(body) + b"GET /v1/mod")
    assert got.count(b"data: x") == 5
    assert b"HTTP/1.1 408" in got


async def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(lean: Running) -> None:
    for head in (
        b"\x16\x03\x01\x02\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    ):
        assert code(await lean.raw(head)) == (400, "request_malformed")
    smuggled = raw_chat(BODY, extra=b"Transfer-Encoding: chunked\r\n")
    assert code(await lean.raw(smuggled)) == (400, "request_malformed")


async def test_garbage_behind_a_request_never_stands_in_its_answer(lean: Running, engine: MockEngine) -> None:
    engine.behaviour = mock_engine.streams(*[b"data: x\n\n"] * 50, pause_s=0.01)
    body = json.dumps({**CHAT, "stream": True}).encode()
    assert b"request_malformed" not in await lean.raw(raw_chat(body) + b"\0garbage\r\n\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", lean.port)
    writer.write(raw_chat(body))
    await reader.readuntil(b"data: x")
    writer.write(b"\0garbage\r\n\r\n")
    assert b"request_malformed" not in await reader.read()
    writer.close()


async def test_trailers_are_no_headers(lean: Running, engine: MockEngine) -> None:
    chunks = b"%x\r\n%b\r\n0\r\nX-Api-Key: sk-other\r\nUser-Agent: smuggled\r\n\r\n" % (len(BODY), BODY)
    request = raw_chat(b"", extra=CLOSE + b"Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b"")
    for path in (b"/v1/chat/completions", b"/v1/chat%2Fcompletions"):
        got = await lean.raw(request.replace(b"/v1/chat/completions", path) + chunks)
        assert got.startswith(b"HTTP/1.1 200")
        assert engine.requests[-1].header(b"user-agent") is None


# --- upgrades --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("upgrade", [H2C, b"Connection: upgrade\r\nUpgrade: websocket\r\n"])
async def test_an_upgrade_that_is_not_followed_leaves_the_request_and_the_connection_whole(
    lean: Running, engine: MockEngine, upgrade: bytes
) -> None:
    asked = raw_chat(BODY, extra=upgrade)
    for first in (asked, asked + asked, raw_chat(BODY) + asked):
        got = await lean.raw(first + raw_chat(BODY, extra=CLOSE))
        assert got.count(b"HTTP/1.1 ") == got.count(b"HTTP/1.1 200 OK") == first.count(b"POST") + 1
    assert all(seen.body == BODY for seen in engine.requests)


async def test_the_body_after_an_upgrade_may_come_later_and_chunked(lean: Running) -> None:
    for extra in (b"Content-Length: %d\r\n" % len(BODY), b"Transfer-Encoding: chunked\r\n"):
        head = raw_chat(b"", extra=H2C + extra).replace(b"Content-Length: 0\r\n", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", lean.port)
        writer.write(head)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(BODY if b"Length" in extra else b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        async with asyncio.timeout(20):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


# --- clients that leave ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [60_000, 100_000, 240_000, 1_000_000])
async def test_a_client_with_a_long_prompt_that_leaves_aborts_the_engines_request(
    lean: Running, engine: MockEngine, size: int
) -> None:
    engine.behaviour = mock_engine.hangs
    whole = raw_chat(json.dumps({**CHAT, "pad": "x" * size}).encode())
    cut = whole.index(b"\r\n\r\n") + 4
    for parts in ((whole,), (whole[:cut], whole[cut:]), (whole[:-90_000], whole[-90_000:])):
        _, writer = await asyncio.open_connection("127.0.0.1", lean.port)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        seen = await engine.next_request()
        writer.close()
        async with asyncio.timeout(20):
            await seen.gone.wait()
    await eventually(lambda: not lean.gateway.plane.active)


@pytest.mark.parametrize("behind", [1, 2, 5])
async def test_a_client_that_leaves_with_more_requests_behind_aborts_the_one_that_runs(
    lean: Running, engine: MockEngine, behind: int
) -> None:
    engine.script.append(mock_engine.says(ANSWER))
    engine.behaviour = mock_engine.hangs
    reader, writer = await asyncio.open_connection("127.0.0.1", lean.port)
    writer.write(raw_chat(BODY) * (1 + behind))
    await reader.readuntil(BODY_OF_ANSWER)
    await eventually(lambda: len(engine.requests) == 2)
    writer.close()
    await lean.quiet()
    await eventually(lambda: not engine.connections)
    assert [row.status for row in await lean.records(2)] == [200, 499]


@pytest.mark.parametrize("length", [b"1000", b"50000000"])
async def test_a_client_that_leaves_while_it_is_refused_is_no_failure_of_the_gateway(
    lean: Running, caplog: pytest.LogCaptureFixture, length: bytes
) -> None:
    refused = measures.ERRORS.of("key_unknown")
    before = refused.value
    head = raw_chat(b"", key="wrong").replace(b"Content-Length: 0", b"Content-Length: " + length)
    for _ in range(5):
        _, writer = await asyncio.open_connection("127.0.0.1", lean.port)
        writer.write(head + b"half")
        await writer.drain()
        writer.transport.abort()
    await eventually(lambda: refused.value == before + 5)
    await lean.quiet()
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []
