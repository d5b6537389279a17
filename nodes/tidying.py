"""Drops what nobody looks at any more, in batches, so that no table grows without end."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from nodes.models import Command, Event, ReplicaLoad

BATCH = 1000
MOST_BATCHES = 100
"""What is left after these waits for the next time, so that writers are never kept waiting long."""
ANSWERED_COMMANDS_KEPT = timedelta(days=1)
LOADS_KEPT = timedelta(hours=1)


def tidy(now: datetime, *, keep_events: timedelta) -> int:
    """Delete old events, answered commands and the figures of gateways that are gone; how many rows went."""
    return sum(
        (
            _drop(Event.objects.filter(at__lt=now - keep_events)),
            _drop(Command.objects.filter(acknowledged_at__lt=now - ANSWERED_COMMANDS_KEPT)),
            _drop(ReplicaLoad.objects.filter(at__lt=now - LOADS_KEPT)),
        )
    )


def _drop(rows: QuerySet[Any]) -> int:
    gone = 0
    for _ in range(MOST_BATCHES):
        some = list(rows.order_by("pk").values_list("pk", flat=True)[:BATCH])
        if not some:
            break
        rows.filter(pk__in=some).delete()
        gone += len(some)
    return gone
