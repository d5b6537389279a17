"""What a request costs in the gateway's own code: GatewayProtocol between two transports that are not there.

No socket and no other process takes part, so the figures are steadier than `gateway`'s and leave out the kernel: for
looking at a change to the request path. Each line is the least of some rounds, which are interleaved.
"""

# ruff: noqa: E402  Django is set up before what needs it is imported.
from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")

import django

django.setup(set_prefix=False)

import uvicorn
import uvloop
from uvicorn.server import ServerState

from llmgw.config import Settings
from routing.asgi import Gateway
from routing.client import Client
from routing.dialing import Line
from routing.edge import STATE_KEY, GatewayProtocol
from routing.exchange import Exchange
from routing.heads import Head
from routing.loops import Loops
from routing.pools import Pool
from routing.run import Run
from routing.table import Contents
from routing.upstream import Connection
from tenants.limits import Budget, Limit
from tenants.money import Price
from tests.routing.gateways import KEY, MemoryStore, contents, endpoint, grant
from tests.stubs import mock_engine

REQUESTS, CHUNKS, ROUNDS = 4000, 8000, 5


class Wire(asyncio.Transport):
    """Hands what is written to a function."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        super().__init__()
        self.on_write = on_write

    def write(self, data: Any) -> None:
        self.on_write(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Task:
    """Runs a request's coroutine as a task of asyncio, as it would be without routing.run."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], on_end: Callable[[Any], None]) -> None:
        self.coroutine, self.on_end = coroutine, on_end

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self.coroutine)
        self.task.add_done_callback(lambda _: self.on_end(self))


class AsTasks(Gateway):
    def begin(self, head: Head, client: Client, on_end: Callable[[Run], None]) -> Run:
        return cast(Run, Task(Exchange(self.plane, head, client).run(), on_end))


class Engine:
    """The way to every endpoint: answers at once, in chunks where `stream` says so."""

    def __init__(self, stream: bool) -> None:
        self.stream = stream

    async def connect(self, protocol: Any) -> None:
        connection = cast(Connection, protocol)
        loop, chunk = asyncio.get_running_loop(), mock_engine.chunk(mock_engine.TOKEN)
        end = mock_engine.chunk(mock_engine.usage_event(CHUNKS)) + mock_engine.chunk(mock_engine.DONE)

        def send(left: int) -> None:
            if left:
                connection.data_received(chunk)
                loop.call_soon(send, left - 1)
            else:
                connection.data_received(end + mock_engine.LAST)

        def answer(_: bytes) -> None:
            if self.stream:
                loop.call_soon(connection.data_received, mock_engine.STREAM_HEAD)
                loop.call_soon(send, CHUNKS)
            else:
                loop.call_soon(connection.data_received, mock_engine.ANSWER)

        connection.connection_made(Wire(answer))


@dataclass(frozen=True)
class Way:
    """What is measured: `limited` by rates, places and a budget, with a price; `endpoints` to choose from, which then
    is explained; as `tasks` instead of runs."""

    name: str
    stream: bool = False
    limited: bool = True
    endpoints: int = 2
    tasks: bool = False


WAYS = (
    Way("request"),
    Way("request, nothing limited", limited=False),
    Way("request, one endpoint", endpoints=1),
    Way("request, as a task", tasks=True),
    Way("chunk", stream=True),
)


def rows(way: Way) -> Contents:
    places = [endpoint(9, f"m-{number}", engine="vllm", slots=99) for number in range(way.endpoints)]
    if not way.limited:
        return contents(*places)
    rates = {"requests_per_minute": 2 * 10**9, "tokens_per_minute": 10**12, "concurrent": 10**5}
    held = grant(
        limits=(Limit("project", 1, "p", **rates), Limit("key", 1, "k", **rates)),
        budgets=(Budget(1, "project", 1, "p", "money", 10**15, "month"),),
    )
    return replace(contents(*places, grants=(held,)), prices=(Price("m", 0.0, 50_000_000, 150_000_000),))


async def microseconds(way: Way, folder: Path) -> float:
    """CPU a request, or a chunk."""
    store = MemoryStore(rows(way))
    made = AsTasks if way.tasks else Gateway
    gateway = made(settings=Settings(data_dir=folder), store=store, roles=frozenset({"gateway"}))
    plane = gateway.plane
    await Loops(plane, store).reload()
    for target in plane.table.targets:
        plane.pools._pools[target.address] = Pool(target.host, target.port, cast(Line, Engine(way.stream)))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await gateway(scope, receive, send)

    config = uvicorn.Config(app, http=GatewayProtocol, log_config=None, access_log=False, lifespan="off", ws="none")
    config.load()
    protocol = GatewayProtocol(config, ServerState(), {STATE_KEY: gateway})
    payload = {"model": "m", "messages": [{"role": "user", "content": "hi " * 50}], "stream": way.stream}
    body = json.dumps(payload).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\n"
    request += b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    loop, done, left = asyncio.get_running_loop(), asyncio.Event(), 1 if way.stream else REQUESTS

    def answered(data: bytes) -> None:
        nonlocal left
        if way.stream:
            if data.endswith(mock_engine.LAST):
                done.set()
            return
        assert data.startswith(b"HTTP/1.1 200"), data
        left -= 1
        if left:
            loop.call_soon(protocol.data_received, request)
        else:
            done.set()

    protocol.connection_made(Wire(answered))
    began = time.process_time()
    protocol.data_received(request)
    async with asyncio.timeout(60):
        await done.wait()
    spent = time.process_time() - began
    protocol.connection_lost(None)
    await plane.pools.close()
    plane.journal.close()
    return spent * 1e6 / (CHUNKS if way.stream else REQUESTS)


def main() -> None:
    least: dict[str, float] = {}
    for _ in range(ROUNDS):
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as folder:
                spent = uvloop.run(microseconds(way, Path(folder)))
            least[way.name] = min(spent, least.get(way.name, spent))
    for name, spent in least.items():
        print(json.dumps({"bench": "hot_path", "name": name, "cpu_us": round(spent, 2)}), flush=True)


if __name__ == "__main__":
    main()
