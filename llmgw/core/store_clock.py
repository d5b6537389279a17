"""The database's time, which all hosts agree on whatever their own clocks say (ND-10, ND-50).

It is asked for every few seconds, however often it is read; in between it goes on with the host's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import connection

from llmgw.core.clock import Clock, SystemClock

REFRESH_S = 5.0
"""A database whose own clock is set anew is followed within this time."""
QUICK_S = 1.0
"""An answer that took longer may be wrong by as much, and serves once."""

_ASK = {
    "postgresql": "SELECT to_char(statement_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')",
    "sqlite": "SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')",
}


@dataclass(frozen=True, slots=True)
class _Known:
    at: datetime
    monotonic: float
    until: float


class StoreClock:
    """A Clock. `now` may ask the database, so it is not for an event loop; it raises django.db.Error."""

    def __init__(self, host: Clock | None = None) -> None:
        self._host = host or SystemClock()
        self._known: _Known | None = None  # replaced as a whole, so that threads need no lock

    def now(self) -> datetime:
        known = self._known
        if known is None or self._host.monotonic() >= known.until:
            known = self._known = self._ask()
        return known.at + timedelta(seconds=self._host.monotonic() - known.monotonic)

    def monotonic(self) -> float:
        return self._host.monotonic()

    def _ask(self) -> _Known:
        began = self._host.monotonic()
        with connection.cursor() as cursor:
            cursor.execute(_ASK[connection.vendor])
            (text,) = cursor.fetchone()
        ended = self._host.monotonic()
        return _Known(
            at=datetime.fromisoformat(text).replace(tzinfo=UTC),
            monotonic=(began + ended) / 2,
            until=ended + REFRESH_S if ended - began < QUICK_S else ended,
        )


STORE_CLOCK = StoreClock()
"""This process's."""
