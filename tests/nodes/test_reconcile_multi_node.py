"""Replicas over several nodes: who starts first, what fails them, and what is left of them where a node goes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from nodes.plans import BackOff, Drain, Forget, Join, Start, Stop
from nodes.reconcile import plan
from nodes.state import Cluster, Replica, Shard, profile_digest, replica_state
from tests.nodes.fleets import NOW
from tests.nodes.simulation import Simulation, a_model, machine

NODES = tuple(machine(name, cards=2, fabric="ib") for name in ("one", "two", "three"))
WIDE = a_model("wide", least=1, cards=2, nodes=2)
DIGEST = profile_digest(WIDE, WIDE.profiles[0])
AGO = NOW - timedelta(minutes=1)
LEADER = Shard("one", 0, "starting", gpus=("one-0", "one-1"))
WORKER = Shard("two", 1, "waiting", gpus=("two-0", "two-1"))


def over(*shards: Shard, **fields: object) -> Replica:
    state = replica_state((shard.rank, shard.state) for shard in shards)
    made = Replica("r", "wide", "only", DIGEST, made_at=AGO, state=state, state_at=AGO, shards=shards)  # type: ignore[arg-type]
    return replace(made, **fields)  # type: ignore[arg-type]


def decide(replica: Replica, **fields: object) -> tuple[object, ...]:
    cluster = Cluster(nodes=NODES, models=(WIDE,), replicas=(replica,))
    return plan(replace(cluster, **fields), NOW).actions  # type: ignore[arg-type]


def test_the_leader_starts_first_and_its_workers_once_it_listens() -> None:
    world = Simulation(Cluster(nodes=NODES, models=(WIDE,)))
    world.run(5)
    [replica] = world.replicas()
    assert sorted((shard.rank, shard.state) for shard in replica.shards) == [(0, "starting"), (1, "waiting")]
    world.run(5)
    [replica] = world.replicas()
    assert [shard.state for shard in replica.shards] == ["starting", "starting"]
    [join] = [action for action in world.done if isinstance(action, Join)]
    assert join.ranks == (1,)
    assert "the leader of replica" in join.why


def test_a_replica_is_ready_when_its_leader_answers_and_its_workers_live() -> None:
    assert replica_state([(0, "ready"), (1, "starting")]) == "ready"
    assert replica_state([(0, "loading"), (1, "ready")]) == "loading"
    assert replica_state([(0, "ready"), (1, "failed")]) == "failed"
    assert replica_state([(0, "ready"), (1, "stopped")]) == "stopping"
    assert replica_state([(0, "stopped"), (1, "stopped")]) == "stopped"


def test_workers_wait_while_the_leader_does_not_listen() -> None:
    assert decide(over(LEADER, WORKER)) == ()


def test_workers_of_a_replica_that_is_to_go_are_not_started() -> None:
    listening = replace(LEADER, rendezvous=29500)
    [stop] = decide(over(listening, WORKER, profile_digest="old"))[:1]
    assert isinstance(stop, Stop)
    assert not [each for each in decide(over(listening, WORKER, profile_digest="old")) if isinstance(each, Join)]


def test_a_failed_worker_fails_the_replica_and_is_tried_elsewhere() -> None:
    failed = over(replace(LEADER, state="loading"), replace(WORKER, state="failed"), reason="out of memory")
    stop, held, *rest = decide(failed)
    assert isinstance(stop, Stop)
    assert isinstance(held, BackOff)
    assert (held.backoff.node, held.backoff.failures) == ("two", 1)
    assert rest == []  # the leader's cards are not free before its agent has confirmed


def test_a_worker_that_stopped_takes_the_replica_with_it() -> None:
    gone = over(replace(LEADER, state="ready"), replace(WORKER, state="stopped"))
    stop, start = decide(gone)
    assert isinstance(stop, Stop)
    assert isinstance(start, Start)
    assert stop.why == "replica r is over: rank 1 on node two stopped without being told to"


def test_what_is_left_of_a_replica_stops_when_one_of_its_nodes_is_lost() -> None:
    nodes = (NODES[0], replace(NODES[1], state="lost"), NODES[2])
    [stop] = decide(over(replace(LEADER, state="ready"), replace(WORKER, state="starting")), nodes=nodes)
    assert isinstance(stop, Stop)
    assert stop.why == "replica r is over: a part of it was on node two, which is lost"
    stopping = over(replace(LEADER, state="stopped"), replace(WORKER, state="starting"), wanted="stop", wanted_at=NOW)
    forget = decide(stopping, nodes=nodes)[0]
    assert isinstance(forget, Forget)


def test_a_replica_is_forgotten_when_all_its_nodes_are_lost() -> None:
    nodes = (replace(NODES[0], state="lost"), replace(NODES[1], state="lost"), NODES[2])
    forget = decide(over(LEADER, WORKER), nodes=nodes)[0]
    assert isinstance(forget, Forget)
    assert forget.why == "replica r was on node one, which is lost"
    forget = decide(over(LEADER, WORKER), nodes=NODES[2:])[0]
    assert isinstance(forget, Forget)
    assert forget.why == "replica r was on node one, which was removed"


def test_a_replica_that_lacks_a_rank_stops_once_all_nodes_have_told() -> None:
    alone = over(replace(LEADER, state="ready"))
    untold = tuple(replace(node, registered_at=None) for node in NODES)
    assert decide(alone, since=NOW - timedelta(seconds=1), nodes=untold) == ()
    stop = decide(alone)[0]
    assert isinstance(stop, Stop)
    assert stop.why == "replica r is over: 1 of its 2 shards are known"


@pytest.mark.parametrize("state", ["fetching", "installing"])
def test_the_leaders_time_does_not_run_while_a_worker_fetches(state: str) -> None:
    old = {"state_at": NOW - timedelta(hours=9)}
    fetching = over(LEADER, replace(WORKER, state=state), **old)  # type: ignore[arg-type]
    assert decide(fetching) == ()
    assert isinstance(decide(over(LEADER, replace(WORKER, state="starting"), **old))[0], Stop)


def test_a_worker_that_is_never_told_because_its_leader_never_listens_has_a_deadline() -> None:
    stop, held = decide(over(LEADER, WORKER, state_at=NOW - timedelta(hours=9)))[:2]
    assert isinstance(stop, Stop)
    assert isinstance(held, BackOff)
    assert held.backoff.node == "one"
    assert "still starting after 1200 s" in held.why


def test_all_ranks_start_and_stop_together() -> None:
    world = Simulation(Cluster(nodes=NODES, models=(WIDE,)))
    world.run(60)
    assert len(world.homes("wide")) == 2
    world.change(replace(WIDE, scaling=replace(WIDE.scaling, min=0, max=0)))
    world.run(20)
    assert [type(a) for a in world.done if isinstance(a, Drain | Stop | Forget)] == [Drain, Stop, Forget]
    assert world.replicas() == []


def test_a_rank_that_cannot_run_moves_the_whole_replica() -> None:
    world = Simulation(Cluster(nodes=NODES, models=(WIDE,)), broken={("wide", "one")})
    world.run(120)
    [replica] = world.ready("wide")
    assert [shard.node for shard in replica.shards] == ["three", "two"]
    assert world.count(Start, "wide") == 2
    assert [held.node for held in world.cluster.backoffs] == ["one"]
