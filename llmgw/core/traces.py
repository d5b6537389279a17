"""Which decision a thing belongs to, as W3C Trace Context writes it. A context carries it, so nobody passes it on."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_current: ContextVar[str] = ContextVar("traceparent", default="")


def current() -> str:
    """The traceparent of what is being done; empty outside of `within`."""
    return _current.get()


def child(of: str = "") -> str:
    """A new span: in the same trace where `of` is a traceparent, else in a trace of its own."""
    trace, flags = (of[3:35], of[-2:]) if _FORM.fullmatch(of) else (secrets.token_hex(16), "01")
    return f"00-{trace}-{secrets.token_hex(8)}-{flags}"


@contextmanager
def within(traceparent: str = "") -> Iterator[str]:
    """What is done inside belongs to one trace: to that of `traceparent`, to the one that is open, or to a new one."""
    token = _current.set(child(traceparent or current()))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
