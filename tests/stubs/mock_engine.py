"""A mock engine: OpenAI's API over a real port, fast enough to measure gateways against, strict about what it is sent,
and able to fail in every way that engines do.

As a program: `python -m tests.stubs.mock_engine PORT [KEY]`. In a test: `async with MockEngine(key=…) as engine`.
A request may say how its stream flows: `max_tokens` (events), `delay` (seconds between them).
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self, cast
from urllib.parse import parse_qs, urlsplit

import httptools

BASE = {"id": "chatcmpl-1", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 10, "completion_tokens": 40, "total_tokens": 50}
FORBIDDEN = (b"x-api-key", b"api-key", b"cookie", b"expect", b"content-encoding", b"transfer-encoding")
"""Headers that a gateway must never pass on."""
METRICS = b"""# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing %d
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 0
"""
VLLM_METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 0
vllm:num_requests_waiting 0
vllm:kv_cache_usage_perc 0
"""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def plain(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK", extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (status, kind, len(body), extra) + body


ANSWER = plain(
    json.dumps(
        {
            **BASE,
            "object": "chat.completion",
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello " * 40}}
            ],
            "usage": USAGE,
        }
    ).encode()
)
TOKEN = event(
    {
        **BASE,
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"content": " hello"}, "finish_reason": None}],
    }
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"
MODELS = plain(b'{"object":"list","data":[{"id":"m","object":"model"}]}')


def usage_event(tokens: int) -> bytes:
    usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
    return event({**BASE, "object": "chat.completion.chunk", "choices": [], "usage": usage})


@dataclass
class Seen:
    """One request as the engine got it."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its connection was closed."""

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    def header(self, name: bytes) -> bytes | None:
        return next((value for each, value in self.headers if each == name), None)


Behaviour = Callable[["EngineConnection", Seen], Awaitable[None]]


class EngineConnection(asyncio.Protocol):
    def __init__(self, engine: MockEngine) -> None:
        self.engine = engine
        self.parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.open: Seen | None = None
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.engine.connections.add(self)
        self.engine.accepted += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.connections.discard(self)
        self.can_write.set()
        if self.open is not None:
            self.open.gone.set()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.can_write.clear()

    def resume_writing(self) -> None:
        self.can_write.set()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.headers, self.parts = b"", [], []  # type: ignore[var-annotated]

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        engine = self.engine
        if self.url == b"/metrics" or (engine.gives_by_name and self.url.startswith(b"/metrics/?")):
            running = sum(each.open is not None for each in engine.connections)
            page = engine.metrics or METRICS % running
            engine.scrapes.append(self.url.decode())
            self.transport.write(plain(of_names(page, self.url), b"text/plain"))
            return
        if self.url in (b"/health", b"/v1/models") and not engine.key:
            self.transport.write(MODELS)
            return
        if engine.key and dict(self.headers).get(b"authorization") != b"Bearer " + engine.key.encode():
            self.transport.write(plain(b'{"error":"Unauthorized"}', status=b"401 Unauthorized"))
            return
        seen = Seen(self.parser.get_method().decode(), self.url.decode(), self.headers, b"".join(self.parts))
        if engine.keep:
            engine.requests.append(seen)
            engine.arrived.set()
        wrong = [name for name, _ in self.headers if name in FORBIDDEN]
        if wrong:
            self.transport.write(plain(b'{"error":{"message":"forbidden header"}}', status=b"400 Bad Request"))
            return
        self.open = seen
        behaviour = engine.script.popleft() if engine.script else engine.behaviour
        if behaviour is not None:
            self.task = asyncio.ensure_future(self.follow(behaviour, seen))
            return
        body = json.loads(seen.body or b"{}")
        if body.get("stream"):
            self.task = asyncio.ensure_future(self.stream(body))
        else:
            self.transport.write(ANSWER)
            self.open = None

    async def follow(self, behaviour: Behaviour, seen: Seen) -> None:
        await behaviour(self, seen)
        self.open = None

    async def stream(self, body: dict[str, Any]) -> None:
        tokens, delay = body.get("max_tokens") or 100, body.get("delay", 0)
        write, data = self.transport.write, chunk(TOKEN)
        write(STREAM_HEAD)
        for _ in range(tokens):
            if self.transport.is_closing():
                return
            await self.can_write.wait()
            write(data)
            await asyncio.sleep(delay)
        if (body.get("stream_options") or {}).get("include_usage"):
            write(chunk(usage_event(tokens)))
        write(chunk(DONE) + LAST)
        self.open = None


class MockEngine:
    """`behaviour` answers every request in its way, `script` the next ones; without either the engine just works."""

    def __init__(self, *, key: str = "", keep: bool = True) -> None:
        self.key, self.keep = key, keep
        self.behaviour: Behaviour | None = None
        self.script: deque[Behaviour] = deque()
        self.requests: list[Seen] = []
        self.arrived = asyncio.Event()
        self.connections: set[EngineConnection] = set()
        self.accepted = 0
        self.metrics = b""
        self.gives_by_name = False
        """Whether its metrics can be asked for by name, as those of vLLM."""
        self.scrapes: deque[str] = deque(maxlen=1000)
        """Where metrics were asked for."""
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: EngineConnection(self), "127.0.0.1", port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in tuple(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def next_request(self, timeout_s: float = 20) -> Seen:
        """The request that comes next, counted from the last call."""
        async with asyncio.timeout(timeout_s):
            await self.arrived.wait()
        self.arrived.clear()
        return self.requests[-1]


@functools.lru_cache(maxsize=16)
def of_names(page: bytes, url: bytes) -> bytes:
    """The samples that `url` names; without any, the page."""
    names = parse_qs(urlsplit(url).query).get(b"name[]")
    if names is None:
        return page
    samples = (line for line in page.splitlines(keepends=True) if not line.startswith(b"#"))
    return b"".join(line for line in samples if re.split(rb"[{ ]", line)[0] in names)


# --- ways to behave --------------------------------------------------------------------------------------------------
def says(*pieces: bytes, then_close: bool = False, pause_s: float = 0.001) -> Behaviour:
    """Write these bytes, each on its own."""

    async def behave(connection: EngineConnection, _: Seen) -> None:
        for piece in pieces:
            await connection.can_write.wait()
            if connection.transport.is_closing():
                return
            connection.transport.write(piece)
            await asyncio.sleep(pause_s)
        if then_close:
            connection.transport.close()

    return behave


def streams(*pieces: bytes, then_close: bool = False, pause_s: float = 0.001) -> Behaviour:
    """An event stream of these pieces, each a chunk of its own; ended properly unless `then_close`."""
    end = () if then_close else (LAST,)
    return says(STREAM_HEAD, *(chunk(each) for each in pieces), *end, then_close=then_close, pause_s=pause_s)


def fails(status: bytes, body: bytes = b'{"error":{"message":"boom"}}', kind: bytes = b"application/json") -> Behaviour:
    return says(plain(body, kind, status))


async def resets(connection: EngineConnection, _: Seen) -> None:
    """Close without a byte."""
    connection.transport.abort()


async def hangs(connection: EngineConnection, seen: Seen) -> None:
    """Never answer."""
    await seen.gone.wait()


async def breaks_off(connection: EngineConnection, _: Seen) -> None:
    """Half a JSON body of a promised whole."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    connection.transport.write(head + b'{"id":"x","choices":[')
    connection.transport.close()


async def _serve(port: int, key: str) -> None:
    engine = await MockEngine(key=key, keep=False).start(port)
    engine.metrics = VLLM_METRICS + METRICS % 0
    print(engine.port, flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
