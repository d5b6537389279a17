"""Django reads a request's whole body, to disk if need be, before anybody looks at it: this bounds what it may read."""

from __future__ import annotations

import json
from typing import Any, cast

from asgiref.typing import (
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    HTTPScope,
)

MAX_BYTES = 2 * 1024 * 1024 + 64 * 1024
"""The largest body that a page or API route takes, and room for a form's own words."""
_TEXT = f"The body is larger than {MAX_BYTES} bytes; send less at once."


class _TooMuch(Exception):
    """The body went over its limit while Django was reading it."""


class BoundedBodies:
    """Answers 413 and closes, at once where the length is announced, else as soon as too much has come."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        read = 0
        started = False

        async def bounded() -> ASGIReceiveEvent:
            nonlocal read
            event = await receive()
            if event["type"] == "http.request":
                read += len(event.get("body", b""))
                if read > MAX_BYTES:
                    raise _TooMuch
            return event

        async def sending(event: ASGISendEvent) -> None:
            nonlocal started
            started = True
            await send(event)

        try:
            if _announced(scope) > MAX_BYTES:
                raise _TooMuch
            await self.app(scope, bounded, sending)
        except _TooMuch:
            if started:  # an answer that did not wait for the body has been given already
                return
            await _refuse(scope, send)


def _announced(scope: HTTPScope) -> int:
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return max((int(value) for value in lengths if value.isdigit() and len(value) < 20), default=0)


async def _refuse(scope: HTTPScope, send: ASGISendCallable) -> None:
    if scope["path"].startswith("/api/"):
        kind, text = b"application/json", json.dumps({"error": {"code": "too_large", "message": _TEXT, "fields": {}}})
    else:
        kind, text = b"text/plain; charset=utf-8", _TEXT
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(text)), (b"connection", b"close")]
    await send(cast(Any, {"type": "http.response.start", "status": 413, "headers": headers}))
    await send(cast(Any, {"type": "http.response.body", "body": text.encode()}))
