"""Who may act alone, kept in the store: taken, renewed and given back by conditional updates (ND-40, ND-50).

Every time in it is the database's, so that hosts whose clocks differ cannot both believe that they hold it.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import F
from django.db.models.functions import Now

from llmgw.core.models import Lease

LEADER = "leader"
"""The lease of the control plane that reconciles."""


def new_holder() -> str:
    return f"{socket.gethostname()[:80]}:{os.getpid()}:{secrets.token_hex(4)}"


HOLDER = new_holder()
"""Who this process is. Children that it forks are the same holder: a worker leads as a whole."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease in hand since `since`. `turn` is how often its holder had acted when it was looked at."""

    name: str
    holder: str
    fence: int
    turn: int
    since: datetime


def acquire(name: str, *, ttl_s: float, holder: str = HOLDER) -> Held | None:
    """Take the lease or prolong it; None while somebody else has it. Taken anew, `fence` and `since` change."""
    expires_at = Now() + timedelta(seconds=ttl_s)
    mine = Lease.objects.filter(name=name, holder=holder)
    if not mine.filter(expires_at__gt=Now()).update(expires_at=expires_at):
        free = Lease.objects.filter(name=name, expires_at__lte=Now())
        taken = free.update(holder=holder, fence=F("fence") + 1, since=Now(), expires_at=expires_at)
        if not taken:
            Lease.objects.bulk_create(
                [Lease(name=name, holder=holder, fence=1, since=Now(), expires_at=expires_at)], ignore_conflicts=True
            )
    row = mine.first()
    if row is None:
        return None
    return Held(name=name, holder=holder, fence=row.fence, turn=row.turn, since=row.since)


def advance(held: Held) -> bool:
    """Claim the right to act on what was seen since `held` was acquired; call first in the transaction that acts.

    False when the lease has gone to another meanwhile, or a process of the same holder has acted: decide again.
    """
    rows = Lease.objects.filter(name=held.name, holder=held.holder, fence=held.fence, turn=held.turn)
    return bool(rows.filter(expires_at__gt=Now()).update(turn=F("turn") + 1))


def release(name: str, *, holder: str = HOLDER) -> bool:
    """Give the lease back so that the next one need not wait for its end. False when it was not held."""
    return bool(Lease.objects.filter(name=name, holder=holder, expires_at__gt=Now()).update(expires_at=Now()))
