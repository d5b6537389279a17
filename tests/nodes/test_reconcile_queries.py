"""What a pass asks of the store does not depend on how large the fleet is, or on how much finds no place."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from agent import protocol
from nodes import actions, passes
from nodes.models import ModelStatus, Node
from tests.factories import make_model, make_node, make_replica

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


def queries_of_a_register(shards: int) -> int:
    node = make_node(machine_id="m")
    running = []
    for _ in range(shards):
        replica = make_replica(node=node)
        row = replica.shards.get()
        told = protocol.ShardSpec(
            replica=replica.name,
            model=replica.model,
            profile=replica.profile,
            profile_digest=replica.profile_digest,
            engine=replica.engine,
            source="/weights/m",
        )
        status = protocol.ShardState(replica=replica.name, state="ready", port=row.port, pid=row.pid)
        running.append(protocol.Running(spec=told, status=status))
    register = protocol.Register(
        node=node.name,
        agent_version="1",
        machine_id="m",
        address="127.0.0.1",
        inventory=protocol.Inventory(hostname=node.name, os="Debian 13", kernel="6.12", cpu=protocol.Cpu(cores=8)),
        shards=tuple(running),
    )
    with CaptureQueriesContext(connection) as queries:
        answer = actions.register_node(node=node, register=register, connection="c", now=timezone.now())
    assert isinstance(answer, protocol.Welcome)
    return len(queries)


def test_a_node_that_comes_back_as_it_was_asks_as_often_however_much_runs_there() -> None:
    queries_of_a_register(shards=1)  # which makes rows that all of them share
    assert queries_of_a_register(shards=6) == queries_of_a_register(shards=1)
