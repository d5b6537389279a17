"""Why each node is turned down, in words; and which of those that fit is taken."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from agent.protocol import Build
from catalog import spec
from nodes.placement import NO_NODE, Placed, Unplaced, place
from nodes.state import Cluster, Node, Replica, Shard, TurnedDown
from tests.nodes.fleets import NOW

BUILD = Build(engine="llamacpp", name="xllamacpp", version="1")
BAD_BUILD = Build(engine="llamacpp", name="cuda", version="1", usable=False, reason="no driver")
GOOD = Node("good", cores=8, memory_bytes=16 * 10**9, disk_free_bytes=10**11, builds=(BUILD,))
CPU = spec.Profile("cpu", engine="llamacpp")
MODEL = spec.Model("m", profiles=(CPU,), scaling=spec.Scaling(1, 1))


FREE = "free some, or lower reserved_cores of the profile"


def running(node: str, cores: float = 4, number: int = 1) -> Replica:
    shard = Shard(node, state="ready", cores=cores)
    return Replica(f"r{number}", "m", "cpu", "d", made_at=NOW - timedelta(minutes=1), state="ready", shards=(shard,))


def answer(*nodes: Node, model: spec.Model = MODEL, replicas: tuple[Replica, ...] = ()) -> Placed | Unplaced:
    return place(model, model.profiles, Cluster(nodes=nodes, models=(model,), replicas=replicas))


def home(found: Placed | Unplaced) -> str:
    assert isinstance(found, Placed)
    return found.parts[0].node


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (replace(GOOD, state="joining"), "has not registered yet; start its agent"),
        (replace(GOOD, state="unreachable"), "is unreachable; see whether the machine and its agent run"),
        (replace(GOOD, state="lost"), "is lost; start its agent again, or remove the node"),
        (replace(GOOD, cordoned=True), "is cordoned; to use it: llmgw ctl uncordon NODE"),
        (replace(GOOD, draining=True), "is being drained; to use it: llmgw ctl uncordon NODE"),
        (
            replace(GOOD, disabled_engines=frozenset({"llamacpp"})),
            "has llamacpp disabled; enable it for the node, or add a profile with another engine",
        ),
        (replace(GOOD, builds=()), "has no build of llamacpp; install one there, or add a profile with another engine"),
        (replace(GOOD, builds=(BAD_BUILD,)), "cannot run llamacpp: cuda: no driver"),
        (
            replace(GOOD, memory_bytes=10**9),
            "has 1.0 GB of memory, 2.0 GB are required; add a larger node, or lower required_memory_gb",
        ),
        (replace(GOOD, memory_bytes=None), "does not say how much memory it has, and 2.0 GB are required"),
        (replace(GOOD, disk_free_bytes=10**8), "has only 0.1 GB of disk free; free some"),
    ],
)
def test_a_node_is_turned_down_with_its_reason(node: Node, reason: str) -> None:
    model = replace(MODEL, required_memory_gb=2)
    assert answer(node, model=model) == Unplaced((TurnedDown("good", "cpu", reason),))


def test_without_nodes_the_reason_says_how_to_add_one() -> None:
    assert answer() == Unplaced((TurnedDown("", "cpu", NO_NODE),))


@pytest.mark.parametrize("cores", [None, 1, 2, 3, 8])
def test_the_first_replica_fits_on_any_machine(cores: int | None) -> None:
    found = answer(replace(GOOD, cores=cores))
    assert isinstance(found, Placed)
    assert found.parts[0].cores == max(1, (cores or 0) // 2)


def test_declared_cores_are_counted_as_declared() -> None:
    found = answer(GOOD, model=replace(MODEL, profiles=(replace(CPU, reserved_cores=3),)))
    assert isinstance(found, Placed)
    assert found.parts[0].cores == 3


def test_reserved_cores_are_kept_on_an_empty_machine_too() -> None:
    declared = replace(MODEL, profiles=(replace(CPU, reserved_cores=6),))
    full = answer(replace(GOOD, reserved_cores=3), model=declared)
    reason = f"has 5 of 8 cores left (3 are reserved), 6 are needed; {FREE}"
    assert full == Unplaced((TurnedDown("good", "cpu", reason),))
    assert home(answer(replace(GOOD, reserved_cores=2), model=declared)) == "good"
    unknown = answer(replace(GOOD, cores=None), model=declared)
    assert unknown == Unplaced(
        (TurnedDown("good", "cpu", "does not say how many cores it has, and reserved_cores asks for 6"),)
    )
    none_left = answer(replace(GOOD, reserved_cores=8))
    assert none_left == Unplaced(
        (TurnedDown("good", "cpu", f"has 0 of 8 cores left (8 are reserved), 4 are needed; {FREE}"),)
    )


def test_a_second_replica_needs_cores_of_its_own() -> None:
    full = answer(GOOD, replicas=(running("good"), running("good", number=2)))
    assert full == Unplaced((TurnedDown("good", "cpu", f"has 0 of 8 cores left, 4 are needed; {FREE}"),))
    assert home(answer(GOOD, replicas=(running("good"),))) == "good"
    reserved = answer(replace(GOOD, reserved_cores=2), replicas=(running("good"),))
    assert reserved == Unplaced(
        (TurnedDown("good", "cpu", f"has 2 of 8 cores left (2 are reserved), 4 are needed; {FREE}"),)
    )


def test_a_second_replica_is_not_put_on_unknown_cores() -> None:
    [turned] = answer(replace(GOOD, cores=None), replicas=(running("good"),)).reasons  # type: ignore[union-attr]
    assert turned.reason == "does not say how many cores it has, and already runs a replica"


def test_what_ended_holds_nothing() -> None:
    ended = replace(running("good", cores=8), shards=(Shard("good", state="failed", cores=8),))
    assert home(answer(GOOD, replicas=(ended,))) == "good"


def test_memory_that_replicas_are_promised_is_not_promised_again() -> None:
    model = replace(MODEL, profiles=(replace(CPU, required_memory_gb=9),))
    [turned] = answer(GOOD, model=model, replicas=(running("good"),)).reasons  # type: ignore[union-attr]
    assert turned.reason == "has 7.0 GB of memory left, 9.0 GB are required; free some, or lower required_memory_gb"


def test_cpu_replicas_go_where_most_cores_then_most_memory_are_free() -> None:
    small, large = replace(GOOD, name="a", cores=4), replace(GOOD, name="b", cores=16)
    assert home(answer(small, large)) == "b"
    assert home(answer(small, large, replicas=(running("b", cores=14),))) == "a"
    roomy = replace(GOOD, name="z", memory_bytes=64 * 10**9)
    assert home(answer(GOOD, roomy)) == "z"
    assert home(answer(replace(GOOD, name="y"), replace(GOOD, name="x"))) == "x"


def test_the_profile_of_the_highest_priority_that_fits_wins() -> None:
    cards = replace(CPU, name="gpu", gpu_class="h100-80g", priority=10)
    second = replace(CPU, name="second", priority=5)
    found = answer(GOOD, model=replace(MODEL, profiles=(CPU, cards, second)))
    assert isinstance(found, Placed)
    assert found.profile.name == "second"
