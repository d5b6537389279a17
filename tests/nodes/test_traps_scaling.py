"""Traps of scaling: controllers that disagree, copies that come and go, a cold model that is started once."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db.models import F

from catalog import models as catalog
from llmgw.core import lease
from llmgw.core.models import Lease
from nodes.actions import note_demand
from nodes.models import Event, Replica, ReplicaLoad
from nodes.plans import Drain, Start
from nodes.state import Cluster
from tests.factories import make_model
from tests.nodes.simulation import Simulation, a_model, machine
from tests.worlds import World

pytestmark = pytest.mark.django_db


class Controllers:
    """Several that would lead, and time that passes for them and for the store alike. Some stand still for a while."""

    def __init__(self, count: int, ttl_s: float = 10) -> None:
        self.now, self.ttl_s = 0.0, ttl_s
        self.keepers = [
            lease.Keeper("leader", ttl_s=ttl_s, holder=f"controller {i}", monotonic=lambda: self.now)
            for i in range(count)
        ]
        self.still_until = [0.0] * count
        self.led: list[str] = []
        """Who led, each time that changed."""

    def pass_time(self, seconds: float, step_s: float = 0.5) -> None:
        for _ in range(int(seconds / step_s)):
            self.now += step_s
            Lease.objects.update(expires_at=F("expires_at") - timedelta(seconds=step_s))
            awake = [k for k, until in zip(self.keepers, self.still_until, strict=True) if until <= self.now]
            sure = [keeper.holder for keeper in awake if keeper.look()]
            assert len(sure) <= 1, f"{sure} lead at once"
            if sure and self.led[-1:] != sure:
                self.led += sure


def test_one_of_three_controllers_leads_for_as_long_as_it_lives() -> None:
    three = Controllers(3)
    three.pass_time(120)
    assert len(three.led) == 1


def test_a_leader_that_is_stopped_for_twice_the_lease_is_followed_by_one_and_does_not_come_back() -> None:
    three = Controllers(3)
    three.pass_time(5)
    [first] = three.led
    index = int(first[-1])
    three.still_until[index] = three.now + 2 * three.ttl_s
    three.pass_time(three.ttl_s)
    assert len(three.led) == 2, "nobody took over within the time to live"
    three.pass_time(120)
    assert len(three.led) == 2


@pytest.mark.parametrize("seed", range(4))
def test_however_often_controllers_stand_still_never_two_lead(seed: int) -> None:
    chance = random.Random(seed)
    three = Controllers(3)
    for _ in range(30):
        three.still_until[chance.randrange(3)] = three.now + chance.uniform(0, 25)
        three.pass_time(chance.uniform(1, 8))
    assert three.led


def in_flight(world: World, count: int) -> None:
    for name in Replica.objects.values_list("name", flat=True):
        ReplicaLoad.objects.update_or_create(gateway="g", replica=name, defaults={"in_flight": count, "at": world.now})


def flips() -> int:
    return Event.objects.filter(kind__in=("start", "drain", "stop")).count()


def test_nothing_flips_while_nobody_asks() -> None:
    world = World()
    make_model("kept", min=1, max=3)
    make_model("sleeps", min=0, max=2)
    for name in ("one", "two"):
        world.add(name)
    world.run(20)
    before = flips()
    world.loads = lambda: in_flight(world, 0)
    world.run(300, step=10)
    assert flips() == before
    assert world.starts == 1


@pytest.mark.parametrize(("idle_timeout_s", "most_starts"), [(300, 1), (15, 10)])
def test_use_that_comes_and_goes_starts_and_stops_at_most_once_a_turn(idle_timeout_s: int, most_starts: int) -> None:
    """Requests for 20 s, then none for 20 s, ten times over."""
    model = a_model("sleeps", least=0, most=2)
    model = replace(model, scaling=replace(model.scaling, idle_timeout_s=idle_timeout_s))
    fleet = Simulation(Cluster(nodes=(machine("one", cards=2),), models=(model,)))
    for _ in range(10):
        fleet.busy = {"sleeps": 10}
        for _ in range(10):
            fleet.ask("sleeps")
            fleet.run(2, step=1)
        assert fleet.ready("sleeps")
        fleet.busy = {}
        fleet.run(20, step=1)
    starts = fleet.count(Start, "sleeps")
    assert 1 <= starts <= most_starts
    assert fleet.count(Drain, "sleeps") <= starts


def test_a_copy_that_loads_counts_as_one_that_is_there() -> None:
    world = World()
    make_model(min=0, max=3)
    for name in ("one", "two"):
        agent = world.add(name)
        agent.work = lambda: None  # type: ignore[method-assign]
    for _ in range(40):
        note_demand(["smollm2"], cold=True, now=world.now)
        world.run(3, step=3)
    assert world.starts == 1
    assert len(world.engines()) == 1


@pytest.mark.parametrize("shrinks", [True, False])
def test_a_copy_with_requests_in_flight_is_never_stopped_before_its_time_to_drain_is_over(shrinks: bool) -> None:
    world = World()
    make_model(min=0 if not shrinks else 2, max=2, idle_timeout_s=30)
    for name in ("one", "two"):
        world.add(name)
    if not shrinks:
        note_demand(["smollm2"], cold=True, now=world.now)
    world.run(10)
    world.loads = lambda: in_flight(world, 1)
    running = len(world.engines())
    assert running == (2 if shrinks else 1)
    if shrinks:
        catalog.Model.objects.update(scaling_min=1, scaling_max=1)
    world.run(50, step=2)
    assert len(world.engines()) == running
    world.loads = lambda: in_flight(world, 0)
    world.run(60, step=2)
    assert len(world.engines()) == running - 1
