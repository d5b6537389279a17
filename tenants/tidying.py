"""Drops old usage, and before that what explains it, in batches that keep no writer waiting."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q

from tenants.models import Usage

BATCH = 1000
MOST_BATCHES = 200
"""What is left after these waits for the next time."""
QUIET_BATCHES = 10
"""So many in a row without an explanation, and all that is older has been here before."""


@dataclass(frozen=True, slots=True)
class Tidied:
    rows: int
    explanations: int


def tidy(now: datetime, *, keep_rows: timedelta, keep_explained: timedelta) -> Tidied:
    """What went. Each batch is a statement of its own, so that others write between them."""
    return Tidied(rows=_drop(now - keep_rows), explanations=_forget(now - keep_explained))


def _drop(before: datetime) -> int:
    gone = 0
    for _ in range(MOST_BATCHES):
        oldest = Usage.objects.filter(at__lt=before).order_by("at", "pk").values_list("pk", flat=True)
        some = list(oldest[:BATCH])
        if not some:
            break
        gone += Usage.objects.filter(pk__in=some).delete()[0]
    return gone


def _forget(before: datetime) -> int:
    """From the newest of the old ones backwards, for no index tells which rows still are explained."""
    rows, forgotten, quiet = Usage.objects.filter(at__lt=before), 0, 0
    for _ in range(MOST_BATCHES):
        some = list(rows.order_by("-at", "-pk").values_list("at", "pk")[:BATCH])
        if not some or quiet == QUIET_BATCHES:
            break
        found = Usage.objects.filter(pk__in=[pk for _, pk in some], explained__isnull=False).update(explained=None)
        forgotten += found
        quiet = 0 if found else quiet + 1
        at, pk = some[-1]
        rows = Usage.objects.filter(Q(at__lt=at) | Q(at=at, pk__lt=pk), at__lte=at)
    return forgotten
