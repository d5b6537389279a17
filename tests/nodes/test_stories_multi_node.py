"""Stories of a replica over two machines: it starts in order, stands and falls as one, and survives everybody else."""

from __future__ import annotations

from typing import Any

import pytest

from agent import protocol
from catalog import models as catalog
from nodes.models import Backoff, Command, Replica, Shard
from tests.factories import make_model
from tests.worlds import World

pytestmark = pytest.mark.django_db
WIDE: dict[str, Any] = {"engine": "vllm", "gpu_class": "h100-80g", "tp": 4, "nodes": 2, "gpus_per_node": 2}


@pytest.fixture
def world() -> World:
    """Three machines with two cards each; the model takes two of them whole."""
    world = World()
    make_model("wide", profiles=(WIDE,))
    for name in ("one", "two", "three"):
        world.add_cards(name)
    return world


def ranks(world: World) -> dict[int, str]:
    """By rank, the machine that really runs it."""
    return {rank: name for name, agent in world.agents.items() for _, rank in agent.engines}


def test_the_worker_is_told_once_the_leader_listens_and_where(world: World) -> None:
    world.reconcile()
    assert dict(Shard.objects.values_list("rank", "state")) == {0: "starting", 1: "waiting"}
    assert [command.node_id for command in Command.objects.all()] == [Shard.objects.get(rank=0).node_id]
    world.run(4)
    worker = next(engine for engine in world.engines() if engine.spec.rank == 1)
    assert worker.spec.rendezvous == "127.0.0.1:29500"
    assert (worker.spec.fabric, len(worker.spec.gpus)) == ("ib0", 2)
    world.run(4)
    assert len(world.ready("wide")) == 1
    assert any("the leader of replica" in text.lower() and "listens" in text for text in world.told())


def test_a_worker_that_dies_takes_the_leader_along_and_both_come_back_together(world: World) -> None:
    world.run(8)
    before = {engine.pid for engine in world.engines()}
    home = ranks(world)[1]
    agent = world.agents[home]
    agent.kill(next(iter(agent.engines.values())))
    world.run(1)
    assert not world.ready("wide")
    assert Backoff.objects.get().node == ""  # it had served, so nothing says that it is the machine's fault
    world.run(20)
    assert len(world.ready("wide")) == 1
    assert not before & {engine.pid for engine in world.engines()}
    assert len(world.engines()) == 2


def test_a_worker_that_cannot_start_sends_the_replica_to_other_machines(world: World) -> None:
    world.reconcile()
    bad = Shard.objects.get(rank=1).node_id
    world.run(3)
    worker = next(iter(world.agents[bad].engines.values()))
    world.agents[bad].kill(worker, "no such device")
    world.run(15)
    assert Backoff.objects.get().node == bad
    assert len(world.ready("wide")) == 1
    assert bad not in ranks(world).values()


def test_a_blip_of_the_workers_machine_moves_nothing(world: World) -> None:
    world.run(8)
    before = {engine.pid for engine in world.engines()}
    worker = world.agents[ranks(world)[1]]
    worker.silent = True
    world.run(100, step=10)
    worker.silent = False
    world.run(10)
    assert {engine.pid for engine in world.engines()} == before
    assert len(world.ready("wide")) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_machine_moves_the_whole_replica_and_its_return_leaves_no_duplicate(world: World, rank: int) -> None:
    world.run(8)
    lost = world.agents[ranks(world)[rank]]
    lost.silent = True
    world.run(320, step=20)
    world.run(15)
    [moved] = world.ready("wide")
    assert len(world.engines()) == 3  # the rank on the lost machine cannot be told
    lost.silent = False
    world.run(20)
    assert world.ready("wide") == [moved]
    assert {engine.spec.replica for engine in world.engines()} == {moved}
    assert len(world.engines()) == 2


@pytest.mark.parametrize("forgets", [False, True])
def test_a_restarted_control_plane_adopts_all_ranks(world: World, forgets: bool) -> None:
    world.run(8)
    before = {engine.pid for engine in world.engines()}
    made_at = Replica.objects.get().made_at
    if forgets:
        Replica.objects.all().delete()
        Command.objects.all().delete()
    world.restart_control_plane()
    for agent in reversed(world.agents.values()):
        world.run(1)
        agent.connect()
    world.run(20)
    assert {engine.pid for engine in world.engines()} == before
    assert len(world.ready("wide")) == 1
    assert world.starts == 1
    assert Replica.objects.get().made_at == made_at
    assert sorted(Shard.objects.values_list("rank", "fabric")) == [(0, "ib0"), (1, "ib0")]


def test_a_rank_that_does_not_come_back_after_a_restart_ends_the_others(world: World) -> None:
    world.run(8)
    Replica.objects.all().delete()
    gone = world.agents[ranks(world)[1]]
    world.restart_control_plane()
    gone.engines.clear()
    for agent in world.agents.values():
        agent.connect()
    world.run(20)
    assert len(world.engines()) == 2
    assert len({engine.spec.replica for engine in world.engines()}) == 1
    assert any("1 of its 2 shards are known" in text for text in world.told())


def test_a_node_claims_no_rank_of_a_replica_that_is_whole_or_has_no_such_rank(world: World) -> None:
    world.run(8)
    spare = next(agent for name, agent in world.agents.items() if name not in ranks(world).values())
    [leader] = [engine for engine in world.engines() if engine.spec.rank == 0]
    for rank in (1, 2):
        claim = protocol.ShardSpec(
            **{field: getattr(leader.spec, field) for field in leader.spec.__struct_fields__} | {"rank": rank}
        )
        engine = type(leader)(claim, pid=world.next_number())
        spare.engines = {(claim.replica, rank): engine}
        spare.connect()
        world.run(2)
        assert sorted(Shard.objects.values_list("rank", flat=True)) == [0, 1]
        assert spare.node.name not in Shard.objects.values_list("node", flat=True)
        assert not spare.engines  # it was told to stop it


def test_a_replica_whose_worker_was_never_told_is_stopped_without_a_word_to_it(world: World) -> None:
    world.reconcile()
    worker = Shard.objects.get(rank=1)
    catalog.Model.objects.update(scaling_min=0, scaling_max=0)
    world.run(3)
    assert not Replica.objects.exists()
    assert not Command.objects.filter(node=worker.node_id).exists()


def test_a_worker_node_that_registers_anew_before_it_is_told_changes_nothing(world: World) -> None:
    world.reconcile()
    world.agents[Shard.objects.get(rank=1).node_id].connect()
    assert Shard.objects.get(rank=1).state == "waiting"
    world.run(8)
    assert len(world.ready("wide")) == 1
