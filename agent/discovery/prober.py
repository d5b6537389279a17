"""Reads hardware apart from everything else: a driver that hangs holds up one thread, once, and no heartbeat (AG-1)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

PERIOD_S = 15.0
OVERDUE_S = 90.0
"""A probe that takes longer than this is taken to hang. A busy machine may well need seconds."""


@dataclass(frozen=True, slots=True)
class Latest(Generic[T]):
    """What is known. `age_s`: since it was read. `fault`: why it is not to be relied on any more; empty while it is."""

    value: T | None = None
    age_s: float | None = None
    fault: str = ""


class ProbeError(Exception):
    """A reader got no answer; `str()` says from whom and what to do."""


class Prober(Generic[T]):
    """`read` may block for ever. At most one call of it is outstanding, whatever happens to it."""

    def __init__(
        self,
        name: str,
        read: Callable[[], T],
        *,
        period_s: float = PERIOD_S,
        overdue_s: float = OVERDUE_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._name = name
        self._read = read
        self._period_s = period_s
        self._overdue_s = overdue_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began_at: float | None = None
        self._running = False
        self._value: T | None = None
        self._read_at: float | None = None
        self._error = ""
        self._said = ""
        self._first = threading.Event()

    def latest(self) -> Latest[T]:
        """What is known now; begins the next probe when it is time. Never waits."""
        with self._lock:
            now = self._clock()
            if not self._running and (self._began_at is None or now - self._began_at >= self._period_s):
                self._running, self._began_at = True, now
                threading.Thread(target=self._probe, name=f"probe {self._name}", daemon=True).start()
            hangs = self._running and self._began_at is not None and now - self._began_at >= self._overdue_s
            if hangs:
                fault = f"{self._name} has not answered for more than {self._overdue_s:g} s"
            elif self._value is None and not self._error:
                fault = "they are being read for the first time"
            else:
                fault = self._error
            self._say(fault if hangs or self._error else "")
            return Latest(self._value, None if self._read_at is None else now - self._read_at, fault)

    def wait(self, limit_s: float) -> None:
        """Until the first probe is over, as far as it comes in this time."""
        self.latest()
        self._first.wait(limit_s)

    def _probe(self) -> None:
        value, error = None, ""
        try:
            value = self._read()
        except ProbeError as problem:
            error = str(problem)
        except Exception as problem:  # the agent's boundary: whatever a driver says, the next probe is made
            log.exception("%s cannot be read", self._name)
            error = f"{type(problem).__name__}: {problem}"
        with self._lock:
            self._error = error
            if value is not None:
                self._value, self._read_at = value, self._clock()
            self._running = False
        self._first.set()

    def _say(self, fault: str) -> None:
        if fault != self._said:
            self._said = fault
            if fault:
                log.warning("%s: %s", self._name, fault)
            else:
                log.info("%s answers again", self._name)
