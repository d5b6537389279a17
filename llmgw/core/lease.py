"""Who may act alone, kept in the store: taken, renewed and given back by conditional updates (ND-40, ND-50).

Every time in it is the database's, so that hosts whose clocks differ cannot both believe that they hold it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic as system_monotonic

from django.db import Error as StoreError
from django.db import connection
from django.db.models import F, Q
from django.db.models.functions import Now

from llmgw.core.models import Lease

LEADER = "leader"
"""The lease of the control plane that reconciles."""
STANDSTILL_S = 5
"""A transaction that acts under a lease is ended by PostgreSQL when nothing is heard of it for so long: a process that
was stopped in the middle of it would keep the lease's row locked, and nobody could take over."""
FAR = timedelta(minutes=15)
"""Nobody holds a lease for longer at a time. One that ends later was taken before the database's clock was set back: it
counts as free, so that whoever has it takes it anew, as after a step forward, and goes by what is said from then on."""


def new_holder() -> str:
    return f"{socket.gethostname()[:80]}:{os.getpid()}:{secrets.token_hex(4)}"


HOLDER = new_holder()
"""Who this process is."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease that `holder` has had since `since`. `turn` is how often anybody had acted under it when it was looked
    at, which was at `at`."""

    name: str
    holder: str
    fence: int
    turn: int
    since: datetime
    at: datetime


def acquire(name: str, *, ttl_s: float, holder: str = HOLDER) -> Held | None:
    """Take the lease or prolong it; None while somebody else has it. Taken anew, `fence` and `since` change."""
    expires_at = Now() + timedelta(seconds=ttl_s)
    rows = Lease.objects.filter(name=name)
    found = current(name)
    if found and found.holder != holder:
        return None
    if found and rows.filter(holder=holder, expires_at__gt=Now()).update(expires_at=expires_at):
        return found
    free = rows.filter(Q(expires_at__lte=Now()) | Q(expires_at__gt=Now() + FAR))
    if not free.update(holder=holder, fence=F("fence") + 1, since=Now(), expires_at=expires_at):
        new = Lease(name=name, holder=holder, fence=1, since=Now(), expires_at=expires_at)
        Lease.objects.bulk_create([new], ignore_conflicts=True)
    found = current(name)
    return found if found and found.holder == holder else None


def current(name: str) -> Held | None:
    """The lease as whoever has it now has it; None while nobody does. One query."""
    valid = Lease.objects.filter(name=name, expires_at__gt=Now(), expires_at__lte=Now() + FAR)
    row = valid.annotate(at=Now()).first()
    return Held(name, row.holder, row.fence, row.turn, row.since, row.at) if row else None


def advance(held: Held) -> bool:
    """Claim the right to act on what was seen since `held` was read; call first in the transaction that acts.

    False when the lease has gone to another meanwhile, or somebody has acted under it: decide again.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{STANDSTILL_S}s'")
    rows = Lease.objects.filter(name=held.name, holder=held.holder, fence=held.fence, turn=held.turn)
    return bool(rows.filter(expires_at__gt=Now()).update(turn=F("turn") + 1))


def overtake(name: str) -> None:
    """Make whoever is about to act on what it saw before now decide again; call in the transaction that changes it."""
    Lease.objects.filter(name=name).update(turn=F("turn") + 1)


def release(name: str, *, holder: str = HOLDER) -> bool:
    """Give the lease back so that the next one need not wait for its end. False when it was not held."""
    return bool(Lease.objects.filter(name=name, holder=holder, expires_at__gt=Now()).update(expires_at=Now()))


class Keeper:
    """Holds a lease for as long as `look` is called, and asks for it while another has it.

    One whose holder died is taken by another keeper within `ttl_s`: that is split into how long it is held for and
    how often it is asked for.
    """

    def __init__(
        self,
        name: str,
        *,
        ttl_s: float,
        holder: str = HOLDER,
        monotonic: Callable[[], float] = system_monotonic,
    ) -> None:
        self.name, self.holder = name, holder
        self.hold_s, self.renew_s, self.ask_s = ttl_s * 0.9, ttl_s * 0.3, min(0.5, ttl_s * 0.05)
        self.held: Held | None = None
        self.fault: StoreError | None = None
        """Why the last look failed."""
        self._monotonic = monotonic
        self._next_at = self._sure_until = float("-inf")

    def look(self) -> Held | None:
        """The lease while it is certainly ours. A query every now and then, whatever the pace of the calls."""
        began = self._monotonic()
        if began >= self._next_at:
            self._ask(began)
        elif began >= self._sure_until:
            self.held = None
        return self.held

    def _ask(self, began: float) -> None:
        try:
            self.held = acquire(self.name, ttl_s=self.hold_s, holder=self.holder)
            self._sure_until = began + self.hold_s if self.held else began
            self.fault = None
        except StoreError as error:
            connection.close()  # the next look begins with a new one
            self.fault = error
            if began >= self._sure_until:
                self.held = None
        pause_s = self.renew_s if self.held and not self.fault else self.ask_s
        self._next_at = self._monotonic() + pause_s

    def give_back(self) -> bool:
        """Let the next one have it at once. False when it was not held. Raises django.db.Error."""
        self.held, self._next_at = None, float("-inf")
        return release(self.name, holder=self.holder)
