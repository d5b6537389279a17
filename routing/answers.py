"""The gateway's own answers: errors of the table, and the headers that every answer carries."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from routing.client import Client, ClientLeft, Headers
from routing.openai import Refusal

JSON: Final = (b"content-type", b"application/json")
NO_BUFFER: Final[Headers] = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
SMALL_BYTES: Final = 64 * 1024
LINGER_S: Final = 2.0
"""How long the rest of a refused body is read, so that its sender gets to read the answer."""
EXPOSED: Final = b"x-request-id, x-llmgw-model, x-llmgw-replica, x-llmgw-queue-ms, retry-after"
PREFLIGHT_AGE: Final = b"600"


def error_headers(refusal: Refusal, request_id: str) -> Headers:
    headers: Headers = [JSON, (b"x-request-id", request_id.encode())]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % refusal.retry_after_s))
    if refusal.kind.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


async def refuse_unread(
    client: Client, refusal: Refusal, headers: Headers, body: bytes, *, small: bool, waits_to_send: bool
) -> None:
    """Answer with an error though the body has not come whole: the connection cannot serve another request unless it
    is `small` and read first. `waits_to_send`: its sender waits for 100 Continue and never gets it."""
    if small and not waits_to_send and await _read_rest(client):
        await client.answer(refusal.kind.status, headers, body)
    elif waits_to_send:
        await client.answer(refusal.kind.status, headers, body, close=True)
    else:
        headers.append((b"content-length", b"%d" % len(body)))
        with suppress(ClientLeft):
            await client.start(refusal.kind.status, headers, close=True)
            await client.write(body)
            await _read_rest(client)
            await client.end()


async def _read_rest(client: Client) -> bool:
    """Whether the body ended within LINGER_S."""
    try:
        async with asyncio.timeout(LINGER_S):
            while (await client.read())[1]:
                pass
    except (TimeoutError, ClientLeft):
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
