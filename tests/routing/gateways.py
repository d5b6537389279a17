"""A gateway over a real port, with a store in memory: what the tests of this room stand on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from django.db import OperationalError

from catalog import spec
from llmgw.config import Endpoint as EndpointSettings
from llmgw.config import Gateway as GatewaySettings
from llmgw.config import Redis, Settings, Usage
from nodes.engine_keys import engine_key
from nodes.state import Endpoint
from routing.asgi import Gateway
from routing.shapes import Record
from routing.store import LoadRow
from routing.table import Contents
from tenants.keys import Grant, digest
from tenants.limits import Budget
from tenants.periods import bounds

EDGES = ("routing.edge:GatewayProtocol", "httptools")
"""Both ways in: the lean one, and plain ASGI under uvicorn."""
SECRET = b"s" * 32
GRACE_S = 1
"""What requests that are still under way have at the end."""
KEY = "sk-test" + "k" * 40


def grant(key: str = KEY, **changes: Any) -> Grant:
    made = Grant(digest=digest(key), key_id=1, prefix=key[:7], project_id=1, user_id=None, models=None, expires_at=None)
    return replace(made, **changes)


def endpoint(port: int | None, replica: str = "m-1", model: str = "m", **changes: Any) -> Endpoint:
    made = Endpoint(
        replica=replica,
        node="node-1",
        model=model,
        profile="cpu",
        engine="llamacpp",
        host="127.0.0.1",
        port=port,
        slots=4,
        state="ready",
        draining=False,
        lost=False,
    )
    return replace(made, **changes)


@dataclass
class MemoryStore:
    """The store seam without a database. `away` makes every call fail as a lost database does."""

    now: Contents
    usage: dict[str, Record] = field(default_factory=dict)
    loads: dict[str, LoadRow] = field(default_factory=dict)
    key_use: dict[int, float] = field(default_factory=dict)
    away: bool = False
    full: bool = False
    """Takes no usage, as on a full disk."""
    refused: int = 0
    demand: list[str] = field(default_factory=list)
    """Models that were asked for, once for each message."""

    def _reach(self) -> None:
        if self.away:
            raise OperationalError("connection refused")

    def revision(self) -> int:
        self._reach()
        return self.now.revision

    def contents(self) -> Contents:
        self._reach()
        return self.now

    def spent(self, budgets: Sequence[Budget]) -> dict[int, tuple[float, int]]:
        self._reach()
        found: dict[int, tuple[float, int]] = {}
        for budget in budgets:
            start, _ = bounds(budget.period, budget.time_zone, time.time())
            mine = [row for row in self.usage.values() if row.at >= start]
            tokens = sum((row.prompt_tokens or 0) + (row.completion_tokens or 0) for row in mine)
            cost = sum(row.cost or 0 for row in mine)
            found[budget.budget_id] = start, cost if budget.unit == "money" else tokens
        return found

    def save_demand(self, models: Sequence[str], cold: bool) -> None:
        self._reach()
        self.demand += models

    def save_usage(self, records: Sequence[Record]) -> None:
        self._reach()
        if self.full:
            self.refused += 1
            raise OperationalError("database or disk is full")
        for record in records:
            self.usage.setdefault(record.request_id, record)

    def save_key_use(self, used: dict[int, float]) -> None:
        self._reach()
        self.key_use.update(used)

    def save_loads(self, gateway: str, rows: Sequence[LoadRow]) -> None:
        self._reach()
        self.loads.update((row.replica, row) for row in rows)

    def forget_loads(self, gateway: str) -> None:
        self._reach()
        self.loads.clear()

    def close(self) -> None:
        pass

    def change(self, **changes: Any) -> None:
        self.now = replace(self.now, revision=self.now.revision + 1, **changes)


def contents(
    *endpoints: Endpoint, models: Sequence[spec.Model] = (), grants: Sequence[Grant] | None = None
) -> Contents:
    published = tuple(models) or tuple(spec.Model(name=name) for name in dict.fromkeys(e.model for e in endpoints))
    return Contents(
        revision=1,
        grants=(grant(),) if grants is None else tuple(grants),
        models=published or (spec.Model(name="m"),),
        endpoints=endpoints,
        engine_secret=SECRET,
    )


def code(response: httpx.Response) -> str:
    """The error code of an answer."""
    found = response.json()["error"]["code"]
    assert isinstance(found, str)
    return found


def key_of(replica: str) -> str:
    return engine_key(SECRET, replica)


@dataclass
class Running:
    gateway: Gateway
    store: MemoryStore
    port: int
    http: httpx.AsyncClient
    server: uvicorn.Server

    async def chat(
        self, body: dict[str, Any] | bytes | None = None, *, key: str = KEY, **changes: Any
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps({**CHAT, **(body or {})}).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **changes.pop("headers", {})}
        path = changes.pop("path", "/v1/chat/completions")
        return await self.http.post(path, content=content, headers=headers, **changes)

    async def raw(self, data: bytes, *, until: bytes | None = None, timeout_s: float = 20) -> bytes:
        """Send bytes on a socket of its own; what comes back until `until`, or until the gateway closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            await writer.drain()
            got = b""
            async with asyncio.timeout(timeout_s):
                while until is None or until not in got:
                    data = await reader.read(65536)
                    if not data:
                        break
                    got += data
            return got
        finally:
            writer.close()

    async def records(self, count: int = 1) -> list[Record]:
        """What the store has once `count` requests are in it."""
        await eventually(lambda: len(self.store.usage) >= count)
        return list(self.store.usage.values())

    async def quiet(self) -> None:
        """Until no request is under way any more."""
        await eventually(lambda: not self.gateway.plane.active)


async def eventually(holds: Callable[[], object], timeout_s: float = 20) -> None:
    """Until `holds()`, looked at often; fails after the limit."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not holds():
        assert loop.time() < end, "it did not come to hold in time"
        await asyncio.sleep(0.01)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def raw_chat(body: bytes, *, key: str = KEY, extra: bytes = b"", path: bytes = b"/v1/chat/completions") -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\n%b\r\n"
        % (path, key.encode(), len(body), extra)
    ) + body


class _Server(uvicorn.Server):
    """Ends as uvicorn's does, but is not asleep meanwhile: a fifth of a second each for a thousand tests."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._over = asyncio.Event()

    async def main_loop(self) -> None:
        for second in count():
            await self.on_tick(10 * second)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._over.wait()
                return

    def end(self) -> None:
        self._over.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(AssertionError):
            await eventually(lambda: not (self.server_state.connections or self.server_state.tasks), GRACE_S)
        for task in tuple(self.server_state.tasks):
            task.cancel()
        await self.lifespan.shutdown()
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


@asynccontextmanager
async def served(application: Any, **changes: Any) -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """An ASGI application on a port of its own, under uvicorn."""
    config = uvicorn.Config(application, host="127.0.0.1", port=0, ws="none", log_config=None, **changes)
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done(), "the server ended while it started"
        await asyncio.sleep(0.01)
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.end()
        await task


@asynccontextmanager
async def running(
    data_dir: Path,
    store: MemoryStore | Contents,
    *,
    roles: frozenset[str] = frozenset({"gateway"}),
    http_protocol: str = EDGES[0],
    endpoints: Sequence[dict[str, Any]] = (),
    redis_url: str | None = None,
    **changes: Any,
) -> AsyncIterator[Running]:
    settings = Settings(
        data_dir=data_dir,
        usage=Usage(flush_s=0.05),
        gateway=GatewaySettings(**{"poll_s": 0.05, "scrape_s": 0.2, **changes}),
        endpoints=[EndpointSettings(**each) for each in endpoints],
        redis=Redis(url=redis_url),
    )
    store = MemoryStore(store) if isinstance(store, Contents) else store
    gateway = Gateway(settings=settings, store=store, roles=roles)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await gateway.lifespan(scope, receive, send)
        else:
            await gateway(scope, receive, send)

    async with (
        served(application, http=http_protocol) as (server, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False, verify=False) as http,
    ):
        yield Running(gateway, store, port, http, server)
