"""Stories of two control planes and of a network that is cut: one acts, whatever the other believes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from django.db.models.functions import Now

from catalog import models as catalog
from llmgw.core import lease
from llmgw.core.models import Lease
from nodes import passes
from nodes.models import Command, Replica
from tests.factories import make_model
from tests.worlds import World, everything

pytestmark = pytest.mark.django_db


@pytest.fixture
def world() -> World:
    world = World()
    world.add("one")
    world.add("two")
    return world


def lead(world: World, who: str) -> lease.Held | None:
    """The lease as `who` has it, in the story's time."""
    held = lease.acquire(lease.LEADER, ttl_s=10, holder=who)
    return replace(held, since=world.since or world.now - timedelta(minutes=1)) if held else None


def the_lease_runs_out() -> None:
    Lease.objects.update(expires_at=Now() - timedelta(seconds=1))


def test_a_leader_that_stood_still_changes_nothing_when_it_goes_on(world: World) -> None:
    make_model(min=2, max=2)
    stopped = lead(world, "first")
    assert stopped is not None
    assert lead(world, "second") is None
    the_lease_runs_out()  # while the first one stands still, with SIGSTOP
    standby = lead(world, "second")
    assert standby is not None
    before = everything()
    assert not passes.run_pass(world.now, held=stopped)  # SIGCONT: it plans, and may not act
    assert everything() == before
    assert passes.run_pass(world.now, held=standby)
    assert Replica.objects.count() == 1


def test_two_passes_of_one_holder_that_saw_the_same_act_once(world: World) -> None:
    make_model(min=2, max=2)
    one, other = lead(world, "first"), lead(world, "first")
    assert passes.run_pass(world.now, held=one)
    assert not passes.run_pass(world.now, held=other)
    assert Replica.objects.count() == 1


def test_a_standby_that_takes_over_stops_no_engine_and_starts_none(world: World) -> None:
    make_model(min=2, max=2)
    world.run(10)
    before = {engine.pid for engine in world.engines()}
    for turn in range(6):
        the_lease_runs_out()
        world.since = world.now
        held = lead(world, f"control plane {turn % 2}")
        assert held is not None
        world.now += timedelta(seconds=3)
        assert not passes.run_pass(world.now, held=held)
        world.run(4)
    assert {engine.pid for engine in world.engines()} == before
    assert world.starts == 2


def test_after_a_cut_the_fleet_is_what_was_decided_meanwhile(world: World) -> None:
    """During the cut one model leaves, another shrinks, and the control plane restarts."""
    make_model("leaves")
    make_model("shrinks", min=2, max=2)
    world.run(12)
    assert len(world.engines()) == 3
    cut = next(agent for agent in world.agents.values() if len(agent.engines) == 2)
    cut.silent = True
    world.run(30, step=3)
    catalog.Model.objects.filter(name="leaves").delete()
    catalog.Model.objects.filter(name="shrinks").update(scaling_min=1, scaling_max=1)
    world.run(30, step=3)
    world.restart_control_plane()
    for agent in world.agents.values():
        if not agent.silent:
            agent.connect()
    world.run(330, step=10)
    world.run(10)
    assert len(world.ready("shrinks")) == 1
    sent = Command.objects.filter(node=cut.node.name, body__type="start_shard").count()
    cut.silent = False
    cut.connect()
    world.run(150, step=5)
    assert [engine.spec.model for engine in world.engines()] == ["shrinks"]
    assert len(world.ready("shrinks")) == 1
    assert Command.objects.filter(node=cut.node.name, body__type="start_shard").count() <= sent
    assert Replica.objects.count() == 1


@pytest.mark.parametrize("seconds", [30, 200])
def test_a_short_cut_keeps_what_serves_and_hears_of_what_was_decided(world: World, seconds: int) -> None:
    make_model("stays")
    make_model("leaves")
    world.run(10)
    pids = {engine.spec.model: engine.pid for engine in world.engines()}
    for agent in world.agents.values():
        agent.silent = True
    catalog.Model.objects.filter(name="leaves").delete()
    world.run(seconds, step=5)
    assert len(world.engines()) == 2
    for agent in world.agents.values():
        agent.silent = False
    world.run(90, step=3)
    assert {engine.spec.model: engine.pid for engine in world.engines()} == {"stays": pids["stays"]}
