"""A request's line and headers as the gateway uses them, and their recognition when the same client sends them again.

Programs send the same head with every request of a connection but for the body's length. One that is byte for byte the
last one, digits of `content-length` apart, means the same again, so nothing of it is parsed, split or hashed twice.
Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final

from tenants.keys import MAX_LENGTH

PASSED: Final = frozenset(
    (
        b"content-type",
        b"accept",
        b"traceparent",
        b"tracestate",
        b"user-agent",
        b"anthropic-version",
        b"anthropic-beta",
        b"openai-beta",
    )
)
"""The client's headers that an engine gets; no other, so no credential ever does."""
_READ: Final = frozenset(
    (
        b"authorization",
        b"x-api-key",
        b"api-key",
        b"content-encoding",
        b"content-length",
        b"transfer-encoding",
        b"expect",
        b"origin",
        b"content-type",
        b"x-llmgw-progress",
    )
)
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ ]*([0-9]{1,10})(?=\r\n)", re.IGNORECASE)
LONGEST: Final = 8192
"""Longer heads are not worth keeping a copy of."""


class Head:
    """One request's line and headers. `headers`: those that the gateway reads, joined where they came twice."""

    __slots__ = ("_token", "digest", "engine_part", "headers", "method", "path", "query", "raw_path")

    def __init__(
        self, method: str, path: str, raw_path: bytes, query: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> None:
        self.method, self.path, self.raw_path, self.query = method, path, raw_path, query
        passed: list[bytes] = []
        found: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in PASSED:
                passed += (name, b": ", value, b"\r\n")
            if name in _READ:
                found[name] = found[name] + b"," + value if name in found else value
        self.headers = found
        self.engine_part = b"".join(passed)
        """The header lines that an engine gets."""
        self._token = _token(found)
        self.digest = ""
        """SHA-256 of the key that came with it; empty without one, or with one too long to be a key."""
        if self._token is not None and len(self._token) <= MAX_LENGTH:
            self.digest = hashlib.sha256(self._token).hexdigest()

    @property
    def token(self) -> bytes | None:
        """The key as it was sent; None without one."""
        return self._token

    @property
    def content_type(self) -> bytes:
        return self.headers.get(b"content-type", b"")


def _token(headers: dict[bytes, bytes]) -> bytes | None:
    authorization = headers.get(b"authorization")
    if authorization is not None:
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() == b"bearer" and (token := token.strip()):
            return token
    return headers.get(b"x-api-key") or headers.get(b"api-key") or None


class Known:
    """A head with a length, as bytes around the digits of that length."""

    __slots__ = ("_after", "_before", "_length")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before, self._after = before, after
        self._length = len(before) + len(after)

    def body_of(self, data: bytes) -> bytes | None:
        """The body, when `data` is this head with any length and exactly that much after it."""
        rest = len(data) - self._length
        digits = len(str(rest))  # of a number that is larger by as many as it has digits
        for many in (digits, digits - 1):
            size = rest - many
            written = str(size)
            if size >= 0 and len(written) == many:
                head = self._before + written.encode() + self._after
                if data[: len(head)] == head:
                    return data[len(head) :]
        return None


def learn(data: bytes, start: bytes) -> Known | None:
    """`data` begins with a head that a parser has accepted, whose first bytes are `start`: the same, to recognise."""
    end = data.find(b"\r\n\r\n", 0, LONGEST)
    if end < 0 or not data.startswith(start):
        return None
    head = data[: end + 4]
    found = _LENGTH.search(head)
    if found is None or head.lower().count(b"\ncontent-length") != 1:
        return None
    return Known(head[: found.start(1)], head[found.end(1) :])
