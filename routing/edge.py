"""A lean way past uvicorn's request cycle for POST /v1/… (GW-63): no ASGI in between, one write for a whole answer,
chunks pushed straight from the engine's connection, and a leaving client told at once instead of asked for.

Serve with `http="routing.edge:GatewayProtocol"`. Everything else stays uvicorn's, and plain ASGI works without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from routing import measures
from routing.answers import LINGER_S
from routing.client import Client
from routing.direct import STATUS, DirectClient
from routing.heads import Head, Known, learn
from routing.openai import Refusal, envelope
from routing.run import Run

STATE_KEY = "llmgw.gateway"
"""Where the gateway stands in the server's lifespan state, once it has started."""
HEAD_LIMIT_BYTES = 64 * 1024
"""Of a request's line and headers together. What came in one read with their beginning is not counted."""
HEAD_S = 30.0
"""How long a connection may take to say what it wants."""


class Gateway(Protocol):
    def begin(self, head: Head, client: Client, on_end: Callable[[Run], None]) -> Run: ...


class GatewayProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, which hands each plain POST under /v1/ straight to the gateway.

    What uvicorn leaves open is bounded here for every address: how long headers may be and take. What is no HTTP is
    refused in the shape of all errors. An upgrade that is not followed is a plain request, as RFC 9110 has it: Java's
    own client asks for h2c with every first request.
    """

    client_side: DirectClient | None = None
    _behind: RequestResponseCycle | None = None
    """Of the requests that came behind another one, that which was started last."""
    _gateway: Gateway | None = None
    _known: tuple[Known, Head] | None = None
    """The last request's head, to be recognised when it comes again."""
    _reading = b""
    """What is being parsed, until a request begins in it."""
    _first_bytes = b""
    """What was read last, when the request that is being parsed began with it."""
    _message_open = False
    """Whether the parser is within a request."""
    _starting: Head | None = None
    """Of the request that starts once the parser has read what came."""
    _idle_since: float | None = None
    """When the last answer ended, on the loop's clock, while no request has come since."""
    _in_head = True
    """Whether the headers of a request are still to come or to end."""
    _begun_now = False
    """Whether the request began within the last read."""
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _plain_head: bytes | None = None
    """The head of a request whose upgrade is not followed, without it."""
    _discarding = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_S, self._head_overdue)

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        if self._idle_since is not None:
            self._idle_since = None
            known = self._known
            if known is not None and not self._message_open and (body := known[0].body_of(data)) is not None:
                client = DirectClient(self, body=body, more_body=False)
                self.cycle = self.client_side = client  # type: ignore[assignment]
                self._begin(known[1], client)
                return
            self._reading = data
        while True:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserError:
                self._refuse(Refusal("request_malformed", "What was sent is not HTTP/1.1; check the client."))
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._plain_head is None:
                    self._stop_head_timer()
                    self.handle_websocket_upgrade()
                    return
                data = self._plain_head + data[upgrade.args[0] :]
                self._plain_head = None
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._reading = b""
        head, self._starting = self._starting, None
        if head is not None:
            assert self.client_side is not None
            self._begin(head, self.client_side)
        if self._in_head:
            self._bound_head(len(data))
        elif head is None and self.cycle is not None and self.cycle.response_complete:
            self._start_head_timer()  # what came is no request, and has ended the wait for the next

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._first_bytes, self._reading = self._reading, b""
        self._message_open = True
        self._in_head = self._begun_now = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # trailers, which would pass for headers
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._stop_head_timer()
        url, parser = self.url, self.parser
        if parser.should_upgrade() and not self._should_upgrade():
            self._plain_head = self._without_upgrade()
            return
        if self._gateway is None:
            self._gateway = self.app_state.get(STATE_KEY)
        if (
            self._gateway is None
            or not url.startswith(b"/v1/")
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or b"%" in url
            or b"#" in url
            or not (self.cycle is None or self.cycle.response_complete)
        ):
            super().on_headers_complete()
            return
        raw_path, _, query = url.partition(b"?")
        client = DirectClient(self, body=b"", more_body=True, waits_to_send=self.expect_100_continue)
        client.keep_alive = parser.should_keep_alive()
        self.cycle = self.client_side = client  # type: ignore[assignment]
        head = self._starting = Head("POST", raw_path.decode("ascii"), raw_path, query, self.headers)
        headers = head.headers
        if client.keep_alive and b"transfer-encoding" not in headers and b"expect" not in headers:
            known = learn(self._first_bytes, b"POST %b HTTP/1.1\r\n" % url)
            self._known = (known, head) if known is not None else None
        self._first_bytes = b""

    def _begin(self, head: Head, client: DirectClient) -> None:
        assert self._gateway is not None
        run = self._gateway.begin(head, client, client.finished)
        self.tasks.add(run)  # type: ignore[arg-type]
        run.start()

    def on_response_complete(self) -> None:
        """As uvicorn's, but with one timer a connection that looks when the last answer was, not one an answer."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._behind, app = self.pipeline.pop()
            self._start_asgi_task(self._behind, app)
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        since = self._idle_since
        if since is None:
            return  # a request is on its way; the end of its answer sets the timer again
        left = since + self.timeout_keep_alive - self.loop.time()
        if left > 0.01:
            self._look_again_in(left)
        else:
            super().timeout_keep_alive_handler()

    def _look_again_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def on_message_complete(self) -> None:
        self._message_open = False
        if self._plain_head is None:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_head_timer()
        if self.client_side is not None and not self.client_side.response_complete:
            self.client_side.lost()
        behind = self._behind
        if behind is not None and not behind.response_complete:  # uvicorn tells none but what came last
            behind.disconnected = True
            behind.message_event.set()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.client_side is not None and self.client_side.on_drained is not None:
            self.client_side.on_drained()

    # --- upgrades ----------------------------------------------------------------------------------------------------
    def _should_upgrade(self) -> bool:
        return bool(self.parser.get_method() == b"GET" and super()._should_upgrade())

    def _without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("nothing is tunnelled here")  # to the parser, this is not HTTP
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                kept = [each for each in value.split(b",") if each.strip().lower() in (b"close", b"keep-alive")]
                value = b",".join(kept)
            if name != b"upgrade" and value:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join((*lines, b"", b""))

    # --- bounds ------------------------------------------------------------------------------------------------------
    def _bound_head(self, size: int) -> None:
        self._start_head_timer()
        if self._begun_now:
            self._begun_now, self._head_bytes = False, 1
            return
        self._head_bytes += size
        if self._head_bytes > HEAD_LIMIT_BYTES:
            text = f"The request's line and headers are longer than {HEAD_LIMIT_BYTES:,} bytes; send less in them."
            self._refuse(Refusal("headers_too_large", text))

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._head_overdue)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_overdue(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_head_timer()  # an answer is on its way; the next request may take as long
        elif self._in_head and self._head_bytes:
            self._refuse(Refusal("headers_too_slow", f"No whole request came within {HEAD_S:g} s; send it again."))
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer, and end the connection. Nothing may stand within, or in the place of, another request's answer."""
        measures.ERRORS.of(refusal.code).value += 1
        cycle = self.cycle
        running = cycle is not None and not cycle.response_complete
        if running and (self.pipeline or cycle.response_started or not cycle.more_body):
            self.transport.close()
            return
        body = envelope(refusal)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS[refusal.kind.status] + head + body)
        self._discarding = True  # closed with bytes unread, the answer might never be seen
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)
