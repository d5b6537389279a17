"""What a pass asks of the store does not depend on how large the fleet is, or on how much finds no place."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from nodes import passes
from nodes.models import ModelStatus, Node
from tests.factories import make_model, make_node

pytestmark = pytest.mark.django_db


def queries_of_a_quiet_pass() -> int:
    now = timezone.now()
    Node.objects.update(last_seen_at=now, registered_at=now)
    while passes.run_pass(now):
        pass
    passes.run_pass(now)  # which may have written why some find no place
    with CaptureQueriesContext(connection) as queries:
        assert not passes.run_pass(now)
    return len(queries)


def test_a_quiet_pass_asks_as_often_however_many_nodes_and_models_there_are() -> None:
    make_model("placed")
    make_node("first")
    few = queries_of_a_quiet_pass()
    for number in range(12):
        make_node(f"node{number}")
        make_model(f"unplaced{number}", required_memory_gb=500 + number)
    assert queries_of_a_quiet_pass() == few == 9
    assert ModelStatus.objects.exclude(reasons=[]).count() == 12
