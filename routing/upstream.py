"""The edge towards engines: a small HTTP/1.1 client on httptools.

A `Connection` carries one request at a time: connecting -> idle -> waiting for the head -> body -> idle or closed.
Its owner waits on one signal, which is set for whatever comes next: data, the end, or a failure.

Two short cuts go past the parser, for what is nearly all of the traffic: an answer whose head is the last one of this
endpoint again and whose body came with it, and whole chunks of a stream that is being piped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import httptools

from routing import heads
from routing.failures import Broken
from routing.run import Signal

if TYPE_CHECKING:
    from routing.pools import Pool

HIGH_WATER_BYTES: Final = 64 * 1024
"""Unread bytes of one answer after which no more is read from the engine."""
HEAD_LIMIT_BYTES: Final = 64 * 1024
_SIZES: Final = {b"%x" % size: size for size in range(1, 8192)} | {b"%X" % size: size for size in range(1, 8192)}
"""Chunk sizes as they are usually written; any other goes to the parser."""
_BODILESS: Final = frozenset({204, 304})
"""Statuses whose answers have no body, whatever length they tell."""
_KEPT: Final = frozenset({b"content-type", b"content-encoding", b"content-disposition", b"retry-after"})


class Answer:
    """The head of an engine's answer. `kept`: the headers that its client gets; `length` as it was written."""

    __slots__ = ("content_type", "framed", "kept", "kept_lines", "length", "retry_after", "status")

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.kept = [pair for pair in headers if pair[0] in _KEPT]
        self.kept_lines = b"".join(b"%b: %b\r\n" % pair for pair in self.kept)
        self.content_type = b""
        self.length: bytes | None = None
        self.retry_after: bytes | None = None
        self.framed = False
        """Whether its end can be told from the connection's."""
        for name, value in headers:
            if name == b"content-type":
                self.content_type = value.lower()
            elif name == b"content-length":
                self.length, self.framed = value, True
            elif name == b"transfer-encoding":
                self.framed = self.framed or value.lower().endswith(b"chunked")
            elif name == b"retry-after":
                self.retry_after = value


_NOTHING: Final = Answer(0, [])


class Connection:  # a protocol of asyncio by its methods: derived from asyncio.Protocol, it could not be compiled whole
    __slots__ = (
        "_aligned",
        "_chunks",
        "_head_bytes",
        "_headers",
        "_keeps_alive",
        "_parser",
        "_paused",
        "_pool",
        "_signal",
        "_sink",
        "answer",
        "buffered",
        "ended",
        "error",
        "fed",
        "idle",
        "idle_since",
        "reused",
        "status",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._signal = Signal()
        self.idle = self.reused = False
        self.idle_since = 0.0
        self.error: Exception | None = None
        self._reset()

    def _reset(self) -> None:
        self._chunks: list[bytes] = []
        self._sink: Callable[[bytes, bytes | None], None] | None = None
        self._head_bytes = self.buffered = self.status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self.answer = _NOTHING
        self._keeps_alive = self._paused = self._aligned = self.ended = self.fed = False

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
            await self._signal
        if self.error is not None:
            raise self.error

    async def head(self) -> None:
        """Until status and headers are there. Raises what the connection failed with."""
        while not self.status and self.error is None:
            await self._signal
        if self.error is not None and not self.ended:
            raise self.error

    async def more(self) -> bool:
        """Until there is something to take (True) or the answer has ended (False). Raises what it failed with."""
        while not self._chunks:
            if self.ended:
                return False
            if self.error is not None:
                raise self.error
            await self._signal
        return True

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

    async def pipe(self, sink: Callable[[bytes, bytes | None], None]) -> None:
        """Hand all that comes to `sink` until the answer has ended: the bytes, and the same in their chunk where they
        came as one. Raises what the connection failed with."""
        if self._chunks:
            sink(self.take(), None)
        self._sink = sink
        while not self.ended and self.error is None:
            await self._signal
        if self.error is not None and not self.ended:
            raise self.error

    def fail(self, error: Exception) -> None:
        """End it from this side, at once: the engine sees its client go."""
        if self.error is None and not self.ended:
            self.error = error
        if self.transport is not None:
            self.transport.abort()
        self._signal.set()

    def release(self) -> None:
        """Give it back: kept for the next request when the answer was whole, closed otherwise."""
        transport = self.transport
        if (
            transport is not None
            and self.ended
            and self.error is None
            and self._keeps_alive
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # it answered a request that it has not read
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
        self._signal.set()

    def data_received(self, data: bytes) -> None:
        if self._aligned and self._sink is not None:
            at = data.find(b"\r\n", 0, 8)
            size = _SIZES.get(data[:at]) if at > 0 else None
            if size is not None and len(data) == at + size + 4 and data.endswith(b"\r\n"):
                self._sink(data[at + 2 : -2], data)
                return
        elif not self.fed and not self.idle:
            known = self._pool.known
            body = known[0].body_of(data) if known is not None else None
            if body is not None:
                self.answer = known[1]  # type: ignore[index]
                self.status = self.answer.status
                self._chunks.append(body)
                self.fed = self.ended = self._keeps_alive = True
                self._signal.set()
                return
        if self.idle or self.ended:
            self._lost("it sent more than its answer")
            return
        first, self.fed = not self.fed, True
        if not self.status:
            self._head_bytes += len(data)
        self._aligned = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.ended:
                self._lost(f"what it sent is not HTTP ({error})")
                return
            self._keeps_alive = False  # what came behind the answer takes nothing from it
        if not self.status and self._head_bytes > HEAD_LIMIT_BYTES:
            self._lost("its headers do not end")
            return
        if self._aligned:
            self._aligned = not self.ended and data.endswith(b"\r\n")  # or the next chunk's size has begun
        if self._sink is not None:
            if self._chunks:
                chunks, self._chunks, self.buffered = self._chunks, [], 0
                self._sink(chunks[0] if len(chunks) == 1 else b"".join(chunks), None)
            if self.ended:
                self._signal.set()
            return
        if first and self.ended and self._keeps_alive and self.answer.length is not None:
            self._learn(data)
        if self.buffered > HIGH_WATER_BYTES:
            self.pause()
        self._signal.set()

    def _learn(self, data: bytes) -> None:
        if self.status in _BODILESS or b"transfer-encoding" in (name for name, _ in self._headers):
            return
        known = heads.learn(data, b"HTTP/1.1 %d" % self.status)
        if known is not None:
            self._pool.known = known, self.answer

    def on_message_begin(self) -> None:
        if self.ended:
            self._keeps_alive = False  # a second answer, to nobody: nothing of it may be taken for the first one's

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.ended:
            return
        status: int = self._parser.get_status_code()
        if status < 200:
            self._headers = []
            return
        self.status = status
        self.answer = Answer(status, self._headers)

    def on_chunk_header(self) -> None:
        self._aligned = False

    def on_chunk_complete(self) -> None:
        self._aligned = True

    def on_body(self, body: bytes) -> None:
        if self.ended:
            return
        self._chunks.append(body)
        self.buffered += len(body)

    def on_message_complete(self) -> None:
        self._aligned = False
        if self.status and not self.ended:
            self.ended = True
            self._keeps_alive = self._parser.should_keep_alive()  # known only here

    def eof_received(self) -> None:
        """Nothing more will come: the transport closes."""

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended and self.error is None:
            if self.status and not self.answer.framed and exc is None:
                self.ended = True  # for an answer that names no length, this is its end
            else:
                self.error = Broken("the connection was lost")
        self._pool.closed(self)
        self._signal.set()

    def _lost(self, why: str) -> None:
        self.fail(Broken(why))
        self._pool.closed(self)
