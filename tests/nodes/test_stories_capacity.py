"""Stories of models that share too few cards: who makes way, for whom, in which words."""

from __future__ import annotations

from typing import Any

import pytest

from catalog import models as catalog
from nodes.models import ModelStatus, Replica, ReplicaLoad
from nodes.snapshot import current_summary
from tests.factories import make_model
from tests.worlds import World

pytestmark = pytest.mark.django_db
CARDS: dict[str, Any] = {"engine": "vllm", "gpu_class": "h100-80g", "tp": 2, "gpus_per_node": 2}


@pytest.fixture
def world() -> World:
    """One machine with two cards, and gateways that hold no requests."""
    world = World()
    world.add_cards("one")
    world.loads = lambda: nobody_busy(world)
    return world


def nobody_busy(world: World) -> None:
    for name in Replica.objects.values_list("name", flat=True):
        ReplicaLoad.objects.update_or_create(gateway="g", replica=name, defaults={"in_flight": 0, "at": world.now})


def ask(world: World, model: str) -> None:
    ModelStatus.objects.update_or_create(model=model, defaults={"demand_at": world.now})


def test_two_on_demand_models_take_turns_on_one_machine(world: World) -> None:
    for name in ("day", "night"):
        make_model(name, min=0, max=1, profiles=(CARDS,))
    ask(world, "day")
    world.run(8)
    assert world.ready("day")
    for _ in range(20):  # while it is lately ready, it stays whoever asks
        ask(world, "night")
        world.run(4, step=4)
    assert world.ready("day")
    for _ in range(30):
        ask(world, "night")
        world.run(4, step=4)
    assert world.ready("night")
    assert not world.ready("day")
    assert world.starts == 2
    assert any("nobody asks for day now, and night is asked for and needs its place" in text for text in world.told())


def test_an_on_demand_model_stops_when_nobody_has_asked_for_its_idle_time(world: World) -> None:
    make_model("day", min=0, max=1, idle_timeout_s=120, profiles=(CARDS,))
    ask(world, "day")
    world.run(8)
    assert world.ready("day")
    world.run(150, step=5)
    assert not world.engines()
    assert any("nobody asked for day for 120 s (its idle time)" in text for text in world.told())
    world.run(300, step=30)
    assert world.starts == 1


def test_a_guaranteed_model_takes_the_cards_of_a_spot_one_and_gives_them_back(world: World) -> None:
    make_model("batch", profiles=(CARDS | {"capacity_class": "spot"},))
    world.run(8)
    assert world.ready("batch")
    make_model("chat", profiles=(CARDS | {"capacity_class": "guaranteed"},))
    world.run(15)
    assert world.ready("chat")
    assert not world.engines()[1:]
    [reason] = ModelStatus.objects.get(model="batch").reasons
    assert reason.startswith("one (")
    assert any("chat (guaranteed) needs its place, and is of a higher class" in text for text in world.told())
    starts = world.starts
    world.run(200, step=20)
    assert world.starts == starts  # the lower class waits, and takes nothing back
    catalog.Model.objects.filter(name="chat").delete()
    world.run(15)
    assert world.ready("batch")


def test_a_model_of_the_same_class_waits(world: World) -> None:
    make_model("first", profiles=(CARDS,))
    world.run(8)
    make_model("second", profiles=(CARDS,))
    world.run(60, step=5)
    assert world.ready("first")
    assert world.starts == 1
    assert ModelStatus.objects.get(model="second").reasons


@pytest.mark.parametrize("registers", [False, True])
def test_cards_of_an_engine_that_does_not_end_are_given_to_nobody_until_it_has_ended(
    world: World, registers: bool
) -> None:
    make_model("day", profiles=(CARDS,))
    agent = world.agents["one"]
    world.run(8)
    [engine] = world.engines()
    agent.stuck = True
    catalog.Model.objects.filter(name="day").update(scaling_min=0, scaling_max=0)
    make_model("night", profiles=(CARDS,))
    world.run(900, step=5)
    assert (world.engines(), world.starts) == ([engine], 1)
    assert any("was told to stop" in alert.text for alert in current_summary(world.now).alerts)
    agent.stuck = False
    if registers:  # without it: its process died with the agent
        agent.engines.clear()
        agent.connect()
    else:
        engine.state = "stopped"
        agent.tell(engine)
    world.run(10)
    assert world.ready("night")
