"""Somebody asks for a model that nothing serves: what is written down, and what the fleet makes of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from nodes.actions import note_demand
from nodes.models import Backoff, ModelStatus, Replica
from routing.store import DjangoStore
from tests.factories import make_model
from tests.worlds import World

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture
def world() -> World:
    return World()


# --- what is written -------------------------------------------------------------------------------------------------
def test_demand_is_one_row_a_model_and_the_last_one_counts() -> None:
    note_demand(["a", "b"], cold=False, now=NOW)
    note_demand(["b", "c"], cold=False, now=NOW + timedelta(seconds=5))
    asked = dict(ModelStatus.objects.values_list("model", "demand_at"))
    later = NOW + timedelta(seconds=5)
    assert asked == {"a": NOW, "b": later, "c": later}


def test_demand_leaves_what_else_is_known_of_the_model_alone() -> None:
    ModelStatus.objects.create(model="a", reasons=["one: is cordoned"], reasons_at=NOW)
    note_demand(["a"], cold=False, now=NOW)
    row = ModelStatus.objects.get()
    assert (row.reasons, row.reasons_at) == (["one: is cordoned"], NOW)
    assert row.demand_at == NOW


@pytest.mark.parametrize(("cold", "pokes"), [(True, 1), (False, 0)])
def test_only_cold_demand_asks_for_a_pass(cold: bool, pokes: int, django_capture_on_commit_callbacks: Any) -> None:
    with django_capture_on_commit_callbacks() as callbacks:
        note_demand(["a"], cold=cold, now=NOW)
    assert len(callbacks) == pokes


def test_demand_of_nobody_and_of_a_model_that_is_gone_is_harmless(world: World) -> None:
    note_demand([], cold=True, now=world.now)
    note_demand(["gone"], cold=True, now=world.now)
    world.add("one")
    world.run(3)
    assert not world.engines()


def test_gateways_tell_it_through_the_store() -> None:
    before = timezone.now() - timedelta(seconds=5)  # by the store's clock, which rounds
    DjangoStore().save_demand(["a", "b"], True)
    assert all(at is not None and at >= before for at in ModelStatus.objects.values_list("demand_at", flat=True))
    assert ModelStatus.objects.count() == 2


# --- what comes of it ------------------------------------------------------------------------------------------------
def test_however_often_it_is_asked_for_one_replica_starts(world: World) -> None:
    make_model(min=0, max=3)
    world.add("one")
    world.add("two")
    world.run(3)
    assert not world.engines()
    for _ in range(500):
        note_demand(["smollm2"], cold=True, now=world.now)
    world.run(6)
    for _ in range(50):
        note_demand(["smollm2"], cold=True, now=world.now)
        world.run(1)
    assert world.starts == 1
    assert len(world.ready("smollm2")) == 1


def test_other_models_are_not_started_by_it(world: World) -> None:
    make_model("a", min=0, max=1)
    make_model("b", min=0, max=1)
    world.add("one")
    note_demand(["a"], cold=True, now=world.now)
    world.run(6)
    assert (len(world.ready("a")), len(world.ready("b"))) == (1, 0)


def test_a_model_that_is_switched_off_is_not_started_by_demand(world: World) -> None:
    make_model(min=0, max=0)
    world.add("one")
    note_demand(["smollm2"], cold=True, now=world.now)
    world.run(6)
    assert not world.engines()


def test_a_replica_that_loads_longer_than_the_idle_time_is_left_to_finish(world: World) -> None:
    make_model(min=0, max=1, idle_timeout_s=5)
    agent = world.add("one")
    note_demand(["smollm2"], cold=True, now=world.now)
    work, agent.work = agent.work, lambda: None  # type: ignore[method-assign]
    world.run(20)
    assert [engine.state for engine in world.engines()] == ["starting"]
    agent.work = work  # type: ignore[method-assign]
    note_demand(["smollm2"], cold=False, now=world.now)  # as long as somebody waits, gateways say so
    world.run(4)
    assert world.starts == 1
    assert world.ready("smollm2")


def test_a_lost_replica_comes_back_only_while_there_is_demand(world: World) -> None:
    make_model(min=0, max=1, idle_timeout_s=60)
    agent = world.add("one")
    note_demand(["smollm2"], cold=True, now=world.now)
    world.run(6)
    [engine] = world.engines()
    agent.kill(engine)
    world.run(30)
    assert world.ready("smollm2")
    [engine] = world.engines()
    world.run(60)
    if world.engines():
        agent.kill(world.engines()[0])
    world.run(60)
    assert not world.engines()
    assert not Replica.objects.exists()


def test_demand_for_a_model_that_does_not_start_makes_no_loop_of_starts(world: World) -> None:
    make_model(min=0, max=1)
    world.add("one").broken = "cannot load the weights"
    for _ in range(300):
        note_demand(["smollm2"], cold=True, now=world.now)
        world.run(1)
    assert 3 <= world.starts <= 10
    held = Backoff.objects.get()
    assert held.reason == "cannot load the weights"
    [failing] = DjangoStore().contents().failing
    assert (failing.model, failing.reason) == ("smollm2", "cannot load the weights")
