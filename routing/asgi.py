"""The gateway as an ASGI application: `/v1/`, and the open addresses `/health`, `/ready`, `/metrics`.

Nothing here touches Django's middleware; the store is asked by background loops alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import time
from collections.abc import Callable

from asgiref.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope, Scope

from llmgw import config
from llmgw.core import compiled, doorbell, metrics
from routing import answers, openai
from routing.client import Client, Headers
from routing.edge import STATE_KEY
from routing.exchange import Exchange
from routing.heads import Head
from routing.loops import Loops
from routing.openai import Refusal
from routing.plane import Plane
from routing.run import Run
from routing.store import DjangoStore, Store

log = logging.getLogger(__name__)

OPEN = frozenset({"/health", "/ready", "/metrics"})
_HEADER_NAMES = re.compile(rb"^[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}$")
_USUAL_HEADERS = b"authorization, content-type"
MAX_STOP_S = 20.0


class Gateway:
    """Made once a process, without any I/O; `lifespan` starts and stops what runs beside the requests."""

    def __init__(
        self,
        *,
        settings: config.Settings | None = None,
        store: Store | None = None,
        roles: frozenset[str] | None = None,
    ) -> None:
        self.settings = settings or config.current()
        self.roles = roles or frozenset(os.environ.get("LLMGW_ROLES", "gateway,web").split(","))
        self.plane = Plane(self.settings)
        self._store = store
        self.loops: Loops | None = None
        self._made_at = int(time.time())

    @property
    def carries_requests(self) -> bool:
        return "gateway" in self.roles

    def serves(self, path: str) -> bool:
        return path in OPEN or (self.carries_requests and path.startswith("/v1/")) or path == "/v1"

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        assert scope["type"] == "http", "websockets under /v1/ are not served"
        client = Client(receive, send)  # type: ignore[arg-type]
        method, path = scope["method"], scope["path"]
        if method == "POST" and path.startswith("/v1/"):
            await self._carry(scope, client)
        elif path in OPEN:
            await self._open(scope, client)
        elif method == "OPTIONS":
            await self._options(scope, client)
        elif method in ("GET", "HEAD") and (path == "/v1/models" or path.startswith("/v1/models/")):
            await self._models(scope, client)
        else:
            await self._carry(scope, client)

    def begin(self, head: Head, client: Client, on_end: Callable[[Run], None]) -> Run:
        """One request, to be started by whoever has its client."""
        exchange = Exchange(self.plane, head, client)
        run = exchange.task = Run(exchange.run(), on_end)
        return run

    async def _carry(self, scope: HTTPScope, client: Client) -> None:
        ended = asyncio.Event()
        run = self.begin(_head(scope), client, lambda _: ended.set())
        run.start()
        try:
            await ended.wait()
        except asyncio.CancelledError:
            run.cancel()
            async with asyncio.timeout(1):
                await ended.wait()

    # --- open addresses ----------------------------------------------------------------------------------------------
    async def _open(self, scope: HTTPScope, client: Client) -> None:
        status, body, kind = 200, b"ok\n", b"text/plain; charset=utf-8"
        if scope["method"] not in ("GET", "HEAD"):
            status, body = 405, b"use GET\n"
        elif scope["path"] == "/ready":
            if not self.plane.ready(time.monotonic()):
                status, body = 503, b"no ready endpoint\n"
        elif scope["path"] == "/metrics":
            body, kind = metrics.text(), metrics.CONTENT_TYPE.encode()
        await client.answer(status, [(b"content-type", kind)], body)

    async def _options(self, scope: HTTPScope, client: Client) -> None:
        """Preflights carry no key. Origins that are not listed get a clear no."""
        asked = dict(scope["headers"])
        origin = asked.get(b"origin")
        headers = answers.cors(self.plane.cors, origin)
        if b"access-control-request-method" not in asked:
            await client.answer(204, [*headers, (b"allow", b"GET, HEAD, POST, OPTIONS")], b"")
            return
        if not any(name == b"access-control-allow-origin" for name, _ in headers):
            refusal = Refusal(
                "origin_forbidden",
                "Pages of this origin may not call here; an operator lists it in gateway.cors_origins.",
            )
            headers += answers.error_headers(refusal, self.plane.next_id())
            await client.answer(refusal.kind.status, headers, openai.envelope(refusal))
            return
        wanted = asked.get(b"access-control-request-headers", b"")
        headers += [
            (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS"),
            (
                b"access-control-allow-headers",
                wanted if _HEADER_NAMES.match(wanted) else b"authorization, content-type",
            ),
            (b"access-control-max-age", answers.PREFLIGHT_AGE),
        ]
        await client.answer(204, headers, b"")

    # --- models ------------------------------------------------------------------------------------------------------
    async def _models(self, scope: HTTPScope, client: Client) -> None:
        """GW-2: what the key may use, whether or not it is ready now."""
        exchange = Exchange(self.plane, _head(scope), client)
        extra = answers.cors(self.plane.cors, exchange.headers.get(b"origin"))
        try:
            grant = exchange.authenticate()
            names = self.plane.table.visible(grant)
            wanted = scope["path"].removeprefix("/v1/models").strip("/")
            if not wanted:
                body = openai.model_list(sorted(names), self._made_at)
            elif wanted in (visible := set(names)):
                body = openai.model_card(wanted, self._made_at)
            else:
                raise openai.model_unknown(wanted, sorted(visible))
        except Refusal as refusal:
            await exchange.refuse(refusal)
            return
        headers: Headers = [answers.JSON, (b"x-request-id", exchange.request_id.encode()), *extra]
        await client.answer(200, headers, body)

    # --- life --------------------------------------------------------------------------------------------------------
    async def lifespan(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        await receive()
        async with doorbell.relayed():  # in each role: the web's streams of agents wait for rings too
            await self.start()
            if self.carries_requests and "state" in scope:
                scope["state"][STATE_KEY] = self  # type: ignore[typeddict-item]
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        self.plane.publish()
        if not self.carries_requests:
            return
        log.info("The request path runs %s", compiled.state)
        if not self.settings.gateway.auth and not _is_loopback(self.settings.listen.host):
            log.warning(
                "gateway.auth is off and %s can be reached by others: anybody may use every model",
                self.settings.listen.host,
            )
        self.loops = Loops(self.plane, self._store or DjangoStore())
        await self.loops.start()

    async def stop(self) -> None:
        """Cut what is still under way, hand usage over, close connections."""
        if self.loops is None:
            return
        for exchange in tuple(self.plane.active):
            if exchange.task is not None:
                exchange.task.cancel()
        for _ in range(20):
            if not self.plane.active:
                break
            await asyncio.sleep(0.05)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_STOP_S):
                await self.loops.stop()
        self.loops = None


def _head(scope: HTTPScope) -> Head:
    return Head(scope["method"], scope["path"], scope["raw_path"], scope["query_string"], scope["headers"])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
