"""A lean way past uvicorn's request cycle for POST /v1/… (GW-63): one write for a whole answer, chunks pushed straight
from the engine's connection, and a leaving client told at once instead of asked for by a task.

Serve with `http="routing.edge:GatewayProtocol"`. Everything else stays uvicorn's, and plain ASGI works without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from routing.client import Client, ClientLeft, Headers, Receive

SCOPE_KEY = "llmgw.client"
"""Where the request's DirectClient stands in its ASGI scope."""
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class DirectClient(Client):
    direct = True

    def __init__(self, protocol: GatewayProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle
        self._receive: Receive = cycle.receive  # type: ignore[assignment]
        self._transport = cycle.transport
        self._chunked = True
        self.on_left: Callable[[], None] | None = None
        """Called when the client goes before its answer has ended."""
        self.on_drained: Callable[[], None] | None = None
        """Called when `push` may go on."""

    async def read(self) -> tuple[bytes, bool]:
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return await super().read()
        body, cycle.body = bytes(cycle.body), bytearray()  # all there already, as for most requests
        return body, False

    async def answer(self, status: int, headers: Headers, body: bytes, *, close: bool = False) -> None:
        parts = self._head(status, headers, close)
        parts += (b"content-length: %d\r\n\r\n" % len(body), body)
        self._write(b"".join(parts))
        self._ended()

    async def start(self, status: int, headers: Headers, *, close: bool = False) -> None:
        parts = self._head(status, headers, close)
        self._chunked = not any(name == b"content-length" for name, _ in headers)
        parts.append(b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n")
        self._write(b"".join(parts))

    async def write(self, data: bytes) -> None:
        if not self.push(data):
            await self._cycle.flow.drain()
        if self._cycle.disconnected:
            raise ClientLeft

    async def end(self, data: bytes = b"") -> None:
        if not self._chunked:
            self._write(data)
        elif data:
            self._write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            self._write(b"0\r\n\r\n")
        self._ended()

    def push(self, data: bytes) -> bool:
        """Send without waiting. False: the client is behind; go on at `on_drained`."""
        if data:
            self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return not self._cycle.flow.write_paused

    def abort(self) -> None:
        if not self._cycle.response_complete:
            self._transport.abort()

    def _head(self, status: int, headers: Headers, close: bool) -> list[bytes]:
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        if close:
            cycle.keep_alive = False
        parts = [_STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for name, value in cycle.default_headers:
            parts += (name, b": ", value, b"\r\n")
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        return parts

    def _write(self, data: bytes) -> None:
        if data and not self._cycle.disconnected:
            self._transport.write(data)

    def _ended(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        self._protocol.asking.remove(self)
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()

    def lost(self) -> None:
        self._cycle.disconnected = True
        if self.on_left is not None:
            self.on_left()


class GatewayProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with a DirectClient in the scope of each POST under /v1/."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.asking: list[DirectClient] = []
        """Requests whose answers have not ended; several when the client pipelines."""
        super().connection_made(cast(asyncio.Transport, transport))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        if scope["method"] == "POST" and scope["http_version"] == "1.1" and scope.get("path", "").startswith("/v1/"):
            client = scope[SCOPE_KEY] = DirectClient(self, self.cycle)
            self.asking.append(client)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for client in tuple(self.asking):
            client.lost()
        self.asking.clear()

    def resume_writing(self) -> None:
        super().resume_writing()
        for client in self.asking:
            if client.on_drained is not None:
                client.on_drained()
