"""The client of a request that came straight from the connection."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from uvicorn.protocols.http.flow_control import FlowControl

from routing.client import Client, ClientLeft, Headers
from routing.run import Run, Signal

if TYPE_CHECKING:
    from routing.edge import GatewayProtocol

STATUS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_OK: Final = STATUS[200]
_usual: tuple[list[tuple[bytes, bytes]], bytes] = ([], b"")


def _usual_lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Date and the like, as lines; the server makes a new list of them each second."""
    global _usual
    if _usual[0] is not headers:
        _usual = headers, b"".join(b"%b: %b\r\n" % pair for pair in headers)
    return _usual[1]


class DirectClient(Client):
    """To uvicorn's protocol this is the request's cycle: it fills `body`, and says news by `message_event.set()`.

    Nothing of a request that is over refers to itself in a circle: it is gone at once, and its memory used again."""

    direct = True
    keep_alive = True
    disconnected = False
    response_started = False
    response_complete = False
    _chunked = True
    on_left: Callable[[], None] | None = None
    """Called when the client goes before its answer has ended."""
    on_drained: Callable[[], None] | None = None
    """Called when `push` may go on."""

    def __init__(self, protocol: GatewayProtocol, *, body: bytes, more_body: bool, waits_to_send: bool = False) -> None:
        self._protocol = protocol
        self._transport = protocol.transport
        self._flow: FlowControl = protocol.flow
        self.body, self.more_body, self._waits_to_send = body, more_body, waits_to_send
        self.message_event = Signal()
        """More of the body came, it has ended, or the client is gone."""

    async def read(self) -> tuple[bytes, bool]:
        if self._waits_to_send and not self.disconnected:
            self._waits_to_send = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while self.more_body and not self.body and not self.disconnected:
            self._flow.resume_reading()
            await self.message_event
        if self.disconnected:
            raise ClientLeft
        return self.take(), self.more_body

    def take(self) -> bytes:
        """What of the body is there."""
        body, self.body = self.body, b""
        if not self.more_body:
            self._flow.resume_reading()  # a large last part has paused it, and a client that leaves is read too
        return body

    async def answer(self, status: int, headers: Headers, body: bytes, *, close: bool = False) -> None:
        parts = self._head(status, headers, close)
        if status == HTTPStatus.NO_CONTENT:  # which has no length either
            parts.append(b"\r\n")
        else:
            parts += (b"content-length: %d\r\n\r\n" % len(body), body)
        self._write(b"".join(parts))
        self._ended()

    def answer_at_once(self, lines: bytes, body: bytes) -> None:
        """`answer` with 200, the header lines at hand."""
        self._waits_to_send = False
        self.response_started = True
        usual = _usual_lines(self._protocol.server_state.default_headers)
        close = b"" if self.keep_alive else b"connection: close\r\n"
        length = str(len(body)).encode()  # what bytes make of %d costs five times as much
        self._write(_OK + usual + lines + close + b"content-length: " + length + b"\r\n\r\n" + body)
        self._ended()

    async def start(self, status: int, headers: Headers, *, close: bool = False) -> None:
        parts = self._head(status, headers, close)
        self._chunked = not any(name == b"content-length" for name, _ in headers)
        parts.append(b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n")
        self._write(b"".join(parts))

    async def write(self, data: bytes) -> None:
        if not self.push(data):
            await self._flow.drain()
        if self.disconnected:
            raise ClientLeft

    async def end(self, data: bytes = b"") -> None:
        if not self._chunked:
            self._write(data)
        elif data:
            self._write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            self._write(b"0\r\n\r\n")
        self._ended()

    def push(self, data: bytes, framed: bytes | None = None) -> bool:
        """Send without waiting; `framed` is the same as a chunk, where it is at hand. False: the client is behind; go
        on at `on_drained`."""
        if not self._chunked:
            framed = data
        elif framed is None:
            framed = b"%x\r\n%b\r\n" % (len(data), data)
        if data and not self.disconnected:
            self._transport.write(framed)
        return not self._flow.write_paused

    def abort(self) -> None:
        if not self.response_complete:
            self._transport.abort()

    def lost(self) -> None:
        self.disconnected = True
        self.message_event.set()
        if self.on_left is not None:
            self.on_left()

    def _head(self, status: int, headers: Headers, close: bool) -> list[bytes]:
        self._waits_to_send = False
        self.response_started = True
        if close:
            self.keep_alive = False
        parts = [STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for name, value in self._protocol.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        return parts

    def _write(self, data: bytes) -> None:
        if data and not self.disconnected:
            self._transport.write(data)

    def _ended(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._transport.close()
        self._protocol.on_response_complete()

    def finished(self, run: Run) -> None:
        """Its request is over: an answer without an end must not look like one."""
        self._protocol.tasks.discard(run)  # type: ignore[arg-type]
        self.on_left = self.on_drained = None
        if not self.response_complete:
            self._transport.abort()
