"""Old rows go, in batches; what is young, unanswered or current stays."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from nodes import tidying
from nodes.models import Command, Event, Node, ReplicaLoad

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
pytestmark = pytest.mark.django_db


def test_only_old_events_answered_commands_and_loads_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying, "BATCH", 2)
    node = Node.objects.create(name="one")
    for days in (40, 35, 31, 1):
        Event.objects.create(at=NOW - timedelta(days=days), kind="start", text=f"{days} days ago")
    old = NOW - timedelta(days=3)
    Command.objects.create(node=node, body={}, made_at=old, acknowledged_at=old, ok=True)
    waiting = Command.objects.create(node=node, body={}, made_at=old)
    ReplicaLoad.objects.create(gateway="gone", replica="r", at=old)
    ReplicaLoad.objects.create(gateway="here", replica="r", at=NOW)

    assert tidying.tidy(NOW, keep_events=timedelta(days=30)) == 5

    assert [event.text for event in Event.objects.all()] == ["1 days ago"]
    assert list(Command.objects.all()) == [waiting]
    assert [load.gateway for load in ReplicaLoad.objects.all()] == ["here"]
    assert tidying.tidy(NOW, keep_events=timedelta(days=30)) == 0
