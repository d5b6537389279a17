"""The gateway's own answers over ASGI: JSON, errors of the table, and the headers that every answer carries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from routing.openai import Refusal, envelope

Message = dict[str, Any]
"""An ASGI message."""
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
NO_BUFFER: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
SMALL_BYTES = 64 * 1024
LINGER_S = 2.0
"""How long the rest of a refused body is read, so that its sender gets to read the answer."""
EXPOSED = b"x-request-id, x-llmgw-model, x-llmgw-replica, x-llmgw-queue-ms, retry-after"
PREFLIGHT_AGE = b"600"


async def send(send_: Send, status: int, headers: Headers, body: bytes, *, more: bool = False) -> None:
    await send_({"type": "http.response.start", "status": status, "headers": headers})
    await send_({"type": "http.response.body", "body": body, "more_body": more})


def error_headers(refusal: Refusal, body: bytes, request_id: str) -> Headers:
    headers: Headers = [JSON, (b"content-length", b"%d" % len(body)), (b"x-request-id", request_id.encode())]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % refusal.retry_after_s))
    if refusal.kind.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


async def refuse(
    send_: Send,
    receive: Receive,
    refusal: Refusal,
    request_id: str,
    extra: Headers,
    *,
    unread: bool,
    small: bool,
    waits_to_send: bool,
) -> None:
    """Answer with an error. `unread`: the body has not come whole, so the connection cannot serve another request
    unless it is `small` and read first; `waits_to_send`: its sender waits for 100 Continue and never gets it."""
    body = envelope(refusal)
    headers = error_headers(refusal, body, request_id) + extra
    if unread and small and not waits_to_send:
        unread = not await _read_rest(receive)
    if not unread:
        await send(send_, refusal.kind.status, headers, body)
        return
    headers.append((b"connection", b"close"))
    linger = not waits_to_send
    await send(send_, refusal.kind.status, headers, body, more=linger)
    if linger:
        await _read_rest(receive)
        await send_({"type": "http.response.body", "body": b"", "more_body": False})


async def _read_rest(receive: Receive) -> bool:
    """Whether the body ended within LINGER_S."""
    try:
        async with asyncio.timeout(LINGER_S):
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                pass
    except TimeoutError:
        return False
    return True


def cors(allowed: frozenset[bytes], origin: bytes | None) -> Headers:
    """What lets a browser page of an allowed origin read the answer; never with credentials."""
    if origin is None or not allowed:
        return []
    if b"*" in allowed:
        return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
    if origin not in allowed:
        return [(b"vary", b"origin")]
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"origin"),
    ]
