"""A lean way past uvicorn's request cycle for POST /v1/… (GW-63): no ASGI in between, one write for a whole answer,
chunks pushed straight from the engine's connection, and a leaving client told at once instead of asked for.

Serve with `http="routing.edge:GatewayProtocol"`. Everything else stays uvicorn's, and plain ASGI works without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from routing.client import Client, ClientLeft, Headers

STATE_KEY = "llmgw.gateway"
"""Where the gateway stands in the server's lifespan state, once it has started."""
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Exchanged(Protocol):
    task: asyncio.Task[None] | None

    def run(self) -> Coroutine[Any, Any, None]: ...


class Gateway(Protocol):
    def exchange(self, scope: Any, client: Client) -> Exchanged: ...


class DirectClient(Client):
    """To uvicorn's protocol this is the request's cycle: it fills `body`, and says news by `message_event.set()`."""

    direct = True
    more_body = True
    disconnected = response_complete = False
    body = b""
    _chunked = True
    _waiter: asyncio.Future[None] | None = None
    on_left: Callable[[], None] | None = None
    """Called when the client goes before its answer has ended."""
    on_drained: Callable[[], None] | None = None
    """Called when `push` may go on."""

    def __init__(self, protocol: GatewayProtocol, keep_alive: bool, waits_to_send: bool) -> None:
        self._protocol = protocol
        self._transport = protocol.transport
        self._flow: FlowControl = protocol.flow
        self.keep_alive, self._waits_to_send = keep_alive, waits_to_send
        self.message_event = self

    async def read(self) -> tuple[bytes, bool]:
        if self._waits_to_send and not self.disconnected:
            self._waits_to_send = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while self.more_body and not self.body and not self.disconnected:
            self._flow.resume_reading()
            self._waiter = self._protocol.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.disconnected:
            raise ClientLeft
        body, self.body = self.body, b""
        return body, self.more_body

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

    def push(self, data: bytes) -> bool:
        """Send without waiting. False: the client is behind; go on at `on_drained`."""
        if data:
            self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return not self._flow.write_paused

    def abort(self) -> None:
        if not self.response_complete:
            self._transport.abort()

    def set(self) -> None:
        """The protocol's news: more of the body came, it has ended, or the client is gone."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def lost(self) -> None:
        self.disconnected = True
        self.set()
        if self.on_left is not None:
            self.on_left()

    def _head(self, status: int, headers: Headers, close: bool) -> list[bytes]:
        self._waits_to_send = False
        if close:
            self.keep_alive = False
        parts = [_STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status]
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

    def finished(self, task: asyncio.Task[None]) -> None:
        """Its task is over: an answer without an end must not look like one."""
        self._protocol.tasks.discard(task)
        self.abort()


class GatewayProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, which hands each plain POST under /v1/ straight to the gateway."""

    client_side: DirectClient | None = None

    def on_headers_complete(self) -> None:
        url, parser = self.url, self.parser
        gateway: Gateway | None = self.app_state.get(STATE_KEY)
        if (
            gateway is None
            or not url.startswith(b"/v1/")
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or parser.should_upgrade()
            or b"%" in url
            or b"#" in url
            or not (self.cycle is None or self.cycle.response_complete)
        ):
            super().on_headers_complete()
            return
        raw_path, _, query = url.partition(b"?")
        scope: Any = self.scope
        scope["method"] = "POST"
        scope["path"], scope["raw_path"], scope["query_string"] = raw_path.decode("ascii"), raw_path, query
        client = DirectClient(self, parser.should_keep_alive(), self.expect_100_continue)
        self.cycle = self.client_side = client  # type: ignore[assignment]
        exchange = gateway.exchange(scope, client)
        task = exchange.task = self.loop.create_task(exchange.run())
        self.tasks.add(task)
        task.add_done_callback(client.finished)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.client_side is not None and not self.client_side.response_complete:
            self.client_side.lost()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.client_side is not None and self.client_side.on_drained is not None:
            self.client_side.on_drained()
