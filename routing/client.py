"""The side of whoever asks: its body in, the answer out, and the news that it has left. Here over plain ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
"""An ASGI message."""
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class ClientLeft(Exception):
    """Nobody's fault here: whoever asked is gone."""


class Client:
    """One request's asker. An answer is either `answer`, or `start`, any number of `write` and one `end`."""

    direct = False
    """Whether bytes can be pushed without waiting, and leaving is told rather than asked for (see routing.edge)."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send

    async def read(self) -> tuple[bytes, bool]:
        """The next part of the body, and whether more follows. Raises ClientLeft."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        return message["body"], message["more_body"]

    async def wait_left(self) -> None:
        """Until it is gone; only once its body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, headers: Headers, body: bytes, *, close: bool = False) -> None:
        """All at once. `close`: the connection serves no further request."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))], close=close)
        await self.end(body)

    async def start(self, status: int, headers: Headers, *, close: bool = False) -> None:
        """Begin an answer, of the length that `content-length` says or else chunked."""
        headers = [*headers, (b"connection", b"close")] if close else headers
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Waits while the client does not take what it was sent."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def abort(self) -> None:
        """Leave an answer without its end, so that nobody takes it for whole. ASGI servers close the connection when
        the application returns without having ended."""
