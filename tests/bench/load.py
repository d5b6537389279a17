"""The load that benches put on a system, over real sockets, and what a process tree costs meanwhile, from /proc."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httptools
import httpx

TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024

Caller = tuple[str, str]
"""A key and the model that it asks for."""


class Client(asyncio.Protocol):
    """One connection that sends the same request `count` times, one after the other."""

    def __init__(self, request: bytes, count: int, load: Load) -> None:
        self.request, self.left, self.load = request, count, load
        self.done = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._send()

    def _send(self) -> None:
        self.started = time.perf_counter()
        self.last: float | None = None
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: ")
        if events:
            now = time.perf_counter()
            self.load.chunks += events
            if self.last is not None:
                self.load.gaps.append(now - self.last)
            self.last = now
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.load.bad += self.parser.get_status_code() != 200
        self.load.took.append(time.perf_counter() - self.started)
        self.left -= 1
        if self.left:
            self._send()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.bad += self.left
        if not self.done.done():
            self.done.set_result(None)


@dataclass
class Load:
    """What came of it. Times in seconds; `gaps` are between the events of one stream."""

    seconds: float = 0.0
    took: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    chunks: int = 0
    bad: int = 0


def request_of(url: httpx.URL, caller: Caller, extra: dict[str, Any]) -> bytes:
    key, model = caller
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi " * 50}], **extra}).encode()
    head = (
        f"POST {url.path} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def run(
    where: str,
    callers: Sequence[Caller],
    connections: int,
    count: int,
    load: Load | None = None,
    *,
    over_s: float = 0.0,
    **extra: Any,
) -> Load:
    """`count` requests on each of `connections`, which take the callers in turn and start within `over_s`. `extra`
    goes into the bodies; `load` fills up meanwhile."""
    url, load = httpx.URL(where), load or Load()
    loop, began, clients = asyncio.get_running_loop(), time.perf_counter(), []
    assert url.port is not None, "an address with its port"
    for number in range(connections):
        request = request_of(url, callers[number % len(callers)], extra)
        if over_s:
            await asyncio.sleep(max(0.0, began + over_s * number / connections - time.perf_counter()))
        _, client = await loop.create_connection(partial(Client, request, count, load), url.host, url.port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    load.seconds = time.perf_counter() - began
    return load


def quantile_ms(values: list[float], q: float) -> float | None:
    return round(sorted(values)[min(len(values) - 1, int(len(values) * q))] * 1e3, 2) if values else None


# --- what a process tree costs ---------------------------------------------------------------------------------------
def tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def cpu_us(pid: int) -> int:
    """User and system time so far."""
    return sum(user_and_system_us(pid))


def user_and_system_us(pid: int) -> tuple[int, int]:
    user = system = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            user, system = user + int(fields[11]), system + int(fields[12])
    return user * TICK_US, system * TICK_US


def rss_kib(pid: int) -> int:
    pages = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * PAGE_KIB
