"""Many requests at once, engines that hold them, and every way in which one can end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx

from routing.admission import Admission
from tests.routing.gateways import CHAT, KEY, Running, eventually, raw_chat
from tests.stubs import mock_engine
from tests.stubs.mock_engine import ANSWER, STREAM_HEAD, TOKEN, EngineConnection, MockEngine, Seen, chunk


class Gate:
    """Holds every request of an engine until it is told to let some go, and counts them."""

    def __init__(self, engine: MockEngine) -> None:
        self.inside = self.most = 0
        self.users: list[str] = []
        """The `user` of each request, in the order in which the engine got them."""
        self._held: list[asyncio.Event] = []
        self._open = False
        engine.behaviour = self._hold

    async def _hold(self, connection: EngineConnection, seen: Seen) -> None:
        self.users.append(str(seen.json.get("user", "")))
        self.inside += 1
        self.most = max(self.most, self.inside)
        event = asyncio.Event()
        self._held.append(event)
        try:
            if not self._open:
                await event.wait()
            if seen.json.get("stream"):
                connection.transport.write(STREAM_HEAD + chunk(TOKEN) + chunk(mock_engine.DONE) + mock_engine.LAST)
            else:
                connection.transport.write(ANSWER)
        finally:
            self.inside -= 1
            self._held.remove(event)

    def let_go(self, count: int = 1) -> None:
        """The ones that came first."""
        for event in [event for event in self._held if not event.is_set()][:count]:
            event.set()

    def open(self) -> None:
        """Hold nobody any more."""
        self._open = True
        self.let_go(len(self._held))


def admission(gateway: Running, model: str = "m") -> Admission:
    return gateway.gateway.plane.table.standings[model].admission


async def at_rest(gateway: Running) -> None:
    """Until nothing is under way; then no place, slot or endpoint may still be counted as taken."""
    await gateway.quiet()
    plane = gateway.gateway.plane
    for name, standing in plane.table.standings.items():
        held = standing.admission
        assert (held.in_flight, held.waiting) == (0, 0), name
    assert [target.in_flight for target in plane.table.targets] == [0] * len(plane.table.targets)
    assert [meter.name for meter in plane.limiter.meters.values() if meter.reserved] == []


async def leave(gateway: Running, body: dict[str, Any], when: Callable[[], object] | bytes, *, key: str = KEY) -> None:
    """Ask, and close the connection once `when()` holds, or those bytes came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(raw_chat(json.dumps({**CHAT, **body}).encode(), key=key))
    if isinstance(when, bytes):
        async with asyncio.timeout(20):
            await reader.readuntil(when)
    else:
        await eventually(when)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


# --- ways to end -----------------------------------------------------------------------------------------------------
Way = Callable[[Running, MockEngine, str], Awaitable[None]]


def _answered(status: int, body: dict[str, Any], behaviour: mock_engine.Behaviour | None = None) -> Way:
    async def way(gateway: Running, engine: MockEngine, key: str) -> None:
        engine.behaviour = behaviour
        response = await gateway.chat(body, key=key)
        assert response.status_code == status, response.text

    return way


async def _connect_refused(gateway: Running, engine: MockEngine, key: str) -> None:
    response = await gateway.chat({"model": "down"}, key=key)
    assert response.status_code == 503, response.text


async def _cut_mid_stream(gateway: Running, engine: MockEngine, key: str) -> None:
    engine.behaviour = mock_engine.streams(TOKEN, then_close=True)
    assert '"engine_failed"' in (await gateway.chat({"stream": True}, key=key)).text


async def _cut_while_it_is_passed_on(gateway: Running, engine: MockEngine, key: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\nTransfer-Encoding: chunked\r\n\r\n"
    engine.behaviour = mock_engine.says(head, chunk(b"ID3"), then_close=True)
    with suppress(httpx.RemoteProtocolError):
        await gateway.chat(key=key)


async def _leaves_before_the_first_byte(gateway: Running, engine: MockEngine, key: str) -> None:
    engine.behaviour = mock_engine.hangs
    before = len(engine.requests)
    await leave(gateway, {}, lambda: len(engine.requests) > before or gateway.gateway.plane.active, key=key)


async def _leaves_mid_stream(gateway: Running, engine: MockEngine, key: str) -> None:
    async def stalls(connection: EngineConnection, seen: Seen) -> None:
        connection.transport.write(STREAM_HEAD + chunk(TOKEN))
        await seen.gone.wait()

    engine.behaviour = stalls
    await leave(gateway, {"stream": True}, b"hello", key=key)


async def _leaves_while_it_sends(gateway: Running, engine: MockEngine, key: str) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(raw_chat(b"x" * 5000, key=key)[:-3000])
    await writer.drain()
    writer.close()


WAYS: dict[str, Way] = {
    "answered": _answered(200, {}),
    "streamed": _answered(200, {"stream": True, "max_tokens": 2}),
    "unknown model": _answered(404, {"model": "nobody"}),
    "broken body": _answered(400, {"model": 7}),
    "refused by the engine": _answered(400, {"messages": [{"role": "user2"}]}, mock_engine.fails(b"400 Bad Request")),
    "engine answers 502": _answered(502, {}, mock_engine.fails(b"502 Bad Gateway")),
    "engine resets": _answered(502, {}, mock_engine.resets),
    "half a body": _answered(502, {}, mock_engine.breaks_off),
    "engine silent": _answered(504, {}, mock_engine.hangs),
    "connect refused": _connect_refused,
    "cut mid-stream": _cut_mid_stream,
    "cut while it is passed on": _cut_while_it_is_passed_on,
    "client leaves before the first byte": _leaves_before_the_first_byte,
    "client leaves mid-stream": _leaves_mid_stream,
    "client leaves while it sends": _leaves_while_it_sends,
}
"""Ways in which a request ends; with a model `down` on a port where nothing listens, and `first_byte_s`."""


def first_byte_s(way: str) -> float:
    """The limit for the first byte: short where it is to pass, and where it is not too long for any machine to pass."""
    return 0.3 if way == "engine silent" else 60.0


async def queue_up(
    gateway: Running, users: list[tuple[str, str]], model: str = "m"
) -> list[asyncio.Task[httpx.Response]]:
    """One request after the other, (user, key) each, every one in its place before the next one comes."""
    tasks = []
    held = admission(gateway, model)
    for user, key in users:
        before = held.in_flight + held.waiting
        tasks.append(asyncio.create_task(gateway.chat({"model": model, "user": user}, key=key)))
        await eventually(lambda before=before: held.in_flight + held.waiting > before)  # type: ignore[misc]
    return tasks
