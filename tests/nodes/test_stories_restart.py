"""Stories of control planes that know less than the fleet: what runs is found before anything is placed (ND-45)."""

from __future__ import annotations

from typing import Any

import pytest

from agent import protocol
from catalog import models as catalog
from nodes.models import Command, ModelStatus, Replica, Shard
from tests.factories import make_model
from tests.worlds import World

pytestmark = pytest.mark.django_db
CARDS: dict[str, Any] = {"engine": "vllm", "gpu_class": "h100-80g", "tp": 2, "gpus_per_node": 2}


@pytest.fixture
def world() -> World:
    return World()


def forget(world: World) -> None:
    """A store that was restored from before anything ran, and a control plane that has just taken the lead."""
    Replica.objects.all().delete()
    Command.objects.all().delete()
    world.restart_control_plane()


def test_cards_that_are_in_use_are_reclaimed_before_anything_is_placed(world: World) -> None:
    make_model("runs", profiles=(CARDS,))
    agent = world.add_cards("one")
    world.run(8)
    [engine] = world.engines()
    forget(world)
    make_model("newcomer", profiles=(CARDS,))
    world.run(3)  # nobody has told what runs there
    assert world.starts == 1
    agent.connect()
    world.run(20)
    assert world.engines() == [engine]
    assert world.starts == 1
    assert sorted(Shard.objects.get().gpus) == ["one-0", "one-1"]
    [reason] = ModelStatus.objects.get(model="newcomer").reasons
    assert reason.startswith("one (")


def test_what_a_slow_node_runs_is_not_started_elsewhere_meanwhile(world: World) -> None:
    """Its register comes last, within the time that is given to settle."""
    make_model("runs", profiles=(CARDS,))
    world.add_cards("one")
    world.run(8)
    [engine] = world.engines()
    forget(world)
    world.add_cards("two")
    world.run(3)
    world.agents["one"].connect()
    world.run(20)
    assert world.engines() == [engine]
    assert world.starts == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_shard_whose_model_or_profile_left_the_catalog_meanwhile_is_stopped(world: World, whole: bool) -> None:
    make_model("stays")
    make_model("leaves")
    agent = world.add("one")
    world.run(10)
    pids = {engine.spec.model: engine.pid for engine in world.engines()}
    forget(world)
    if whole:
        catalog.Model.objects.filter(name="leaves").delete()
    else:
        catalog.Profile.objects.filter(model__name="leaves").update(name="other")
        catalog.Model.objects.filter(name="leaves").update(scaling_min=0, scaling_max=1)
    agent.connect()
    world.run(90, step=5)
    assert {engine.spec.model: engine.pid for engine in world.engines()} == {"stays": pids["stays"]}
    assert Replica.objects.count() == 1
    gone = "left model leaves" if not whole else "left the catalog"
    assert any(gone in text for text in world.told())


def test_a_profile_that_changed_meanwhile_rolls_once_what_runs_is_known(world: World) -> None:
    make_model()
    agent = world.add("one")
    world.run(6)
    [old] = world.engines()
    forget(world)
    catalog.Profile.objects.update(args=["--new"])
    world.run(3)
    assert world.engines() == [old]
    agent.connect()
    served = 0
    for _ in range(30):
        world.run(3, step=3)
        served += bool(world.ready("smollm2"))
    [new] = world.engines()
    assert new.spec.args == ("--new",)
    assert served == 30, "the old one serves until the new one does"


def test_an_agent_that_forgot_what_it_did_is_told_again_and_does_it_once(world: World) -> None:
    """It started the engine, and was killed before it could say so; the next one finds the engine running."""
    make_model()
    agent = world.add("one")
    agent.mute_acks = True
    world.run(2)
    [engine] = agent.engines.values()
    agent.mute_acks = False
    agent.start_anew()
    world.run(15)
    assert world.engines() == [engine]
    assert len(agent.applied) == 2, "the same command came again"
    assert set(agent.applied) == {Command.objects.get().pk}
    assert Command.objects.get().ok is True
    assert world.starts == 1


def test_a_stop_that_an_agent_forgot_is_told_again(world: World) -> None:
    make_model()
    agent = world.add("one")
    world.run(6)
    agent.deaf = True  # it hears the stop, dies with it, and the next one knows nothing
    catalog.Model.objects.update(scaling_min=0, scaling_max=0)
    world.run(70, step=5)
    assert Command.objects.filter(body__type="stop_shard", acknowledged_at=None).exists()
    agent.deaf = False
    assert isinstance(agent.start_anew(), protocol.Welcome)
    world.run(20, step=2)
    assert not world.engines()
    assert not Replica.objects.exists()
