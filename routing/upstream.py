"""The edge towards engines: a small pooled HTTP/1.1 client on httptools.

A `Connection` carries one request at a time: connecting -> idle -> waiting for the head -> body -> idle or closed.
Its owner waits on one future, which wakes for whatever comes next: data, the end, or a failure.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import httptools

from routing.table import Target

HIGH_WATER_BYTES = 64 * 1024
"""Unread bytes of one answer after which no more is read from the engine."""
HEAD_LIMIT_BYTES = 64 * 1024
IDLE_S = 4.0
"""Engines close kept-alive connections after 5 s or more; ours go first."""
MAX_IDLE = 256
MAX_CONNECTIONS = 2048
"""Per endpoint."""


class UpstreamError(Exception):
    """The engine did not do its part."""


class ConnectFailed(UpstreamError):
    """Nothing listens there, or it does not answer in time."""


class Broken(UpstreamError):
    """The connection was lost, or what came is not HTTP, before the answer was whole."""


class Silent(UpstreamError):
    """Nothing came within the limit."""


class Full(UpstreamError):
    """Every connection that an endpoint may have is in use."""


class Connection(asyncio.Protocol):
    __slots__ = (
        "_chunks",
        "_head_bytes",
        "_keeps_alive",
        "_loop",
        "_parser",
        "_paused",
        "_pool",
        "_sink",
        "_waiter",
        "buffered",
        "ended",
        "error",
        "fed",
        "framed",
        "headers",
        "idle",
        "idle_since",
        "reused",
        "status",
        "transport",
    )

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool, self._loop = pool, loop
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self.idle = self.reused = False
        self.idle_since = 0.0
        self.error: Exception | None = None
        self._reset()

    def _reset(self) -> None:
        self._chunks: list[bytes] = []
        self._sink: Callable[[bytes], None] | None = None
        self._head_bytes = self.buffered = self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._keeps_alive = self._paused = self.framed = self.ended = self.fed = False

    # --- what the owner calls ----------------------------------------------------------------------------------------
    def send(self, head: bytes, body: bytes) -> None:
        assert self.transport is not None, "connected"
        if len(body) < HIGH_WATER_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    async def connected(self) -> None:
        while self.transport is None and self.error is None:
            await self._next()
        if self.error is not None:
            raise self.error

    async def head(self) -> None:
        """Until status and headers are there. Raises what the connection failed with."""
        while not self.status and self.error is None:
            await self._next()
        if self.error is not None and not self.ended:
            raise self.error

    async def more(self) -> bool:
        """Until there is something to take (True) or the answer has ended (False). Raises what it failed with."""
        while not self._chunks:
            if self.ended:
                return False
            if self.error is not None:
                raise self.error
            await self._next()
        return True

    async def _next(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> bytes:
        """What came since the last call; lets the engine go on sending."""
        chunks = self._chunks
        if not chunks:
            return b""
        self._chunks = []
        self.buffered = 0
        self.resume()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def pause(self) -> None:
        """Read no more from the engine for now."""
        if not self._paused and not self.ended and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.transport is not None:
            self._paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    async def pipe(self, sink: Callable[[bytes], None]) -> None:
        """Hand all that comes to `sink` until the answer has ended. Raises what the connection failed with."""
        if self._chunks:
            sink(self.take())
        self._sink = sink
        while not self.ended and self.error is None:
            await self._next()
        if self.error is not None and not self.ended:
            raise self.error

    def fail(self, error: Exception) -> None:
        """End it from this side, at once: the engine sees its client go."""
        if self.error is None and not self.ended:
            self.error = error
        if self.transport is not None:
            self.transport.abort()
        self._wake()

    def release(self) -> None:
        """Give it back: kept for the next request when the answer was whole, closed otherwise."""
        transport = self.transport
        if (
            transport is not None
            and self.ended
            and self.error is None
            and self._keeps_alive
            and not transport.is_closing()
        ):
            self._reset()
            self.reused = True
            self._pool.put(self)
        else:
            if self.error is None:
                self.error = Broken("it was given up")
            if transport is not None:
                transport.abort()
            self._pool.closed(self)

    # --- what the transport and the parser call ----------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if self.error is not None:
            self.transport.abort()  # type: ignore[union-attr]
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self.idle or self.ended:
            self._lost("it sent more than its answer")
            return
        self.fed = True
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lost(f"what it sent is not HTTP ({error})")
            return
        if not self.status and self._head_bytes > HEAD_LIMIT_BYTES:
            self._lost("its headers do not end")
            return
        if self._sink is not None:
            if self._chunks:
                chunks, self._chunks, self.buffered = self._chunks, [], 0
                self._sink(chunks[0] if len(chunks) == 1 else b"".join(chunks))
            if self.ended:
                self._wake()
            return
        if self.buffered > HIGH_WATER_BYTES:
            self.pause()
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        if status < 200:
            self.headers = []
            return
        self.status = status
        for name, value in self.headers:
            if name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked")):
                self.framed = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self.buffered += len(body)

    def on_message_complete(self) -> None:
        if self.status:
            self.ended = True
            self._keeps_alive = self._parser.should_keep_alive()  # known only here

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended and self.error is None:
            if self.status and not self.framed and exc is None:
                self.ended = True  # for an answer that names no length, this is its end
            else:
                self.error = Broken("the connection was lost")
        self._pool.closed(self)
        self._wake()

    def _lost(self, why: str) -> None:
        self.fail(Broken(why))
        self._pool.closed(self)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Pool:
    """Connections to one endpoint, the most recently used first."""

    __slots__ = ("_all", "_idle", "_loop", "_opening", "host", "port")

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._loop = asyncio.get_running_loop()
        self._idle: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def idle(self) -> Connection | None:
        """One that is open already."""
        while self._idle:
            connection = self._idle.pop()
            connection.idle = False
            if connection.transport is not None and not connection.transport.is_closing():
                return connection
        return None

    def open(self) -> Connection:
        """A fresh one, on its way: wait for `connected()`. Raises Full."""
        if len(self._all) >= MAX_CONNECTIONS:
            raise Full(f"{MAX_CONNECTIONS} connections to it are in use")
        connection = Connection(self, self._loop)
        self._all.add(connection)
        task = self._loop.create_task(self._connect(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return connection

    async def _connect(self, connection: Connection) -> None:
        try:
            await self._loop.create_connection(lambda: connection, self.host, self.port)
        except OSError as error:
            connection.fail(ConnectFailed(error.strerror or str(error)))
            self.closed(connection)

    def put(self, connection: Connection) -> None:
        if len(self._idle) >= MAX_IDLE:
            assert connection.transport is not None
            connection.transport.close()
            return
        connection.idle, connection.idle_since = True, self._loop.time()
        self._idle.append(connection)

    def closed(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection.idle:
            connection.idle = False
            self._idle.remove(connection)

    def prune(self, now: float) -> None:
        """Close what has not been used for a while."""
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            connection = self._idle.popleft()
            connection.idle = False
            if connection.transport is not None:
                connection.transport.close()

    async def close(self) -> None:
        for task in tuple(self._opening):
            task.cancel()
        for connection in tuple(self._all):
            connection.idle = False
            connection.fail(Broken("the gateway stops"))
        self._idle.clear()
        self._all.clear()
        await asyncio.gather(*tuple(self._opening), return_exceptions=True)


class Pools:
    """The pool of each endpoint; those of endpoints that are gone are dropped."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, str, int], Pool] = {}

    def of(self, target: Target) -> Pool:
        pool = self._pools.get(target.address)
        if pool is None:
            pool = self._pools[target.address] = Pool(target.host, target.port)
        return pool

    def prune(self, now: float) -> None:
        for pool in self._pools.values():
            pool.prune(now)

    def keep(self, targets: tuple[Target, ...], now: float) -> None:
        """Forget the pools of endpoints that are no more; requests still on them end on their own."""
        known = {target.address for target in targets}
        for address in [each for each in self._pools if each not in known]:
            self._pools.pop(address).prune(now + 2 * IDLE_S)

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._pools.clear()
