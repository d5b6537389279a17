"""Whose fault a failure is, where it is tried next and when, and when that is forgotten (ND-42)."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from agent.protocol import State
from nodes.failures import FORGOTTEN
from nodes.plans import BackOff, Recover, Start
from nodes.reconcile import plan
from nodes.state import Backoff, Cluster, Node, Replica, Shard, profile_digest
from tests.nodes.fleets import NOW
from tests.nodes.simulation import Simulation, a_model, machine

MODEL = a_model("m", least=1)
DIGEST = profile_digest(MODEL, MODEL.profiles[0])
ONE, TWO = machine("one", cards=1), machine("two", cards=1)


def failed(node: str = "one", *, served: bool = False, state: State = "failed") -> Replica:
    ready_at = NOW - timedelta(minutes=9) if served else None
    shards = (Shard(node, 0, state, gpus=(f"{node}-0",)),)
    times = {"made_at": NOW, "state_at": NOW, "ready_at": ready_at}
    return Replica(f"r-{node}", "m", "only", DIGEST, state=state, reason="out of memory", shards=shards, **times)  # type: ignore[arg-type]


def held(
    node: str = "", *, digest: str = DIGEST, failures: int = 1, since: timedelta = -timedelta(minutes=1)
) -> Backoff:
    """`since`: how long ago the next try was due."""
    return Backoff("m", "only", digest, failures, NOW - since, "out of memory", node=node)


def backoffs(*replicas: Replica, before: tuple[Backoff, ...] = ()) -> list[tuple[str, int]]:
    """Where and how often in a row it failed, as of now."""
    cluster = Cluster(nodes=(ONE, TWO), models=(MODEL,), replicas=replicas, backoffs=before)
    return [(a.backoff.node, a.backoff.failures) for a in plan(cluster, NOW).actions if isinstance(a, BackOff)]


def home(*known: Backoff, nodes: tuple[Node, ...] = (ONE, TWO), replicas: tuple[Replica, ...] = ()) -> str:
    """Where the next replica starts; empty when nowhere now."""
    cluster = Cluster(nodes=nodes, models=(MODEL,), replicas=replicas, backoffs=known)
    starts = [action for action in plan(cluster, NOW).actions if isinstance(action, Start)]
    return starts[0].parts[0].node if starts else ""


def test_a_start_that_failed_is_held_against_its_node() -> None:
    assert backoffs(failed()) == [("one", 1)]
    assert home(replicas=(failed(),)) == "two"


def test_an_engine_that_broke_once_it_had_served_is_held_against_its_profile() -> None:
    assert backoffs(failed(served=True)) == [("", 1)]
    assert home(replicas=(failed(served=True),)) == ""


def test_starts_that_fail_on_two_nodes_are_held_against_the_profile_too() -> None:
    assert backoffs(failed("two"), before=(held("one"),)) == [("", 1), ("two", 1)]
    assert backoffs(failed("one"), failed("two")) == [("", 1), ("one", 1), ("two", 1)]
    assert backoffs(failed("two"), before=(held("one", digest="old"),)) == [("two", 1)]


def test_starts_that_fail_on_two_nodes_are_the_nodes_fault_while_it_serves_elsewhere() -> None:
    serving = replace(failed("three", state="ready"), ready_at=NOW)
    cluster = Cluster(
        nodes=(ONE, TWO, machine("three", cards=1)),
        models=(MODEL,),
        replicas=(failed("two"), serving),
        backoffs=(held("one"),),
    )
    assert [a.backoff.node for a in plan(cluster, NOW).actions if isinstance(a, BackOff)] == ["two"]


def test_the_failures_of_a_node_are_counted_in_a_row() -> None:
    assert backoffs(failed(), before=(held("one", failures=3),)) == [("one", 4)]


def test_another_node_is_tried_before_the_one_that_failed_even_after_its_wait() -> None:
    assert home(held("one")) == "two"
    assert home(held("one", since=timedelta(minutes=1))) == "two"
    assert home(held("one", since=timedelta(minutes=1)), nodes=(ONE,)) == "one"


def test_a_card_that_the_last_try_is_about_to_leave_is_waited_for() -> None:
    leaving = replace(failed("two", state="loading"), wanted="stop", wanted_at=NOW)
    assert home(held("one", since=timedelta(minutes=1)), replicas=(leaving,)) == ""


def test_a_profile_that_waits_says_why_for_every_node() -> None:
    cluster = Cluster(nodes=(ONE, replace(TWO, cordoned=True)), models=(MODEL,), backoffs=(held("one", failures=2),))
    reasons = {turned.node: turned.reason for turned in dict(plan(cluster, NOW).reasons)["m"]}
    assert reasons == {
        "one": "waits until 12:01:00 UTC after 2 failures in a row here: out of memory",
        "two": "is cordoned; to use it: llmgw ctl uncordon NODE",
    }
    everywhere = replace(cluster, backoffs=(held(),), nodes=())
    assert [turned.node for turned in dict(plan(everywhere, NOW).reasons)["m"]] == [""]


def test_a_waiting_profile_makes_nobody_leave() -> None:
    spot = a_model("spot", least=1, capacity_class="spot")
    taken = Replica(
        "s",
        "spot",
        "only",
        profile_digest(spot, spot.profiles[0]),
        made_at=NOW,
        state="ready",
        ready_at=NOW,
        shards=(Shard("one", 0, "ready", gpus=("one-0",)),),
    )
    cluster = Cluster(nodes=(ONE,), models=(MODEL, spot), replicas=(taken,), backoffs=(held(),))
    assert plan(cluster, NOW).actions == ()


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (held("one", digest="old"), "is tried afresh, as it changed, on node one"),
        (held("gone"), "is tried afresh, as the node was removed, on node gone"),
        (held("two", since=FORGOTTEN), "has not been tried for long, and is tried afresh on node two"),
        (held("one", since=timedelta(0)), "is healthy again on node one"),
        (held("", since=timedelta(0)), "is healthy again"),
    ],
)
def test_failures_are_forgotten(known: Backoff, words: str) -> None:
    healthy = replace(failed(state="ready"), ready_at=NOW - timedelta(minutes=3))
    cluster = Cluster(nodes=(ONE, TWO), models=(MODEL,), replicas=(healthy,), backoffs=(known,))
    [recover] = plan(cluster, NOW).actions
    assert isinstance(recover, Recover)
    assert recover.why == f"model m (only) {words}"


def test_health_on_one_node_says_nothing_of_another() -> None:
    healthy = replace(failed(state="ready"), ready_at=NOW - timedelta(minutes=3))
    cluster = Cluster(nodes=(ONE, TWO), models=(MODEL,), replicas=(healthy,), backoffs=(held("two"),))
    assert plan(cluster, NOW).actions == ()


def test_a_bad_profile_is_tried_on_two_nodes_and_then_ever_more_rarely() -> None:
    nodes = tuple(machine(f"n{number}", cards=1) for number in range(9))
    world = Simulation(Cluster(nodes=nodes, models=(MODEL,)), broken={("m", node.name) for node in nodes})
    world.run(60)
    early = world.count(Start, "m")
    world.run(1200, step=10)
    assert early <= 5
    assert world.count(Start, "m") <= 14
    waits = [a.backoff for a in world.done if isinstance(a, BackOff) and not a.backoff.node]
    assert [each.failures for each in waits] == list(range(1, len(waits) + 1))


def test_one_bad_node_costs_one_try() -> None:
    world = Simulation(Cluster(nodes=(ONE, TWO), models=(MODEL,)), broken={("m", "one")})
    world.run(60)
    assert world.homes("m") == ["two"]
    assert world.count(Start, "m") == 2
