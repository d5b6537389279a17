"""What holds of any fleet over time: nodes fall silent and return, engines fail, models come, change and go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog import spec
from nodes.outlook import rank_of
from nodes.placement import Unplaced, place
from nodes.plans import Action, BackOff, Start
from nodes.reconcile import plan
from nodes.state import Cluster, Replica, profile_digest
from tests.nodes.simulation import Simulation, a_model, machine

T = TypeVar("T")
some = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
NODES = ("a", "b", "c", "d")
MODELS = ("m", "n", "o")
events = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["silence", "return", "break", "mend", "stick"]), st.sampled_from(NODES)),
        st.tuples(st.sampled_from(["ask", "change", "less", "more", "busy", "idle"]), st.sampled_from(MODELS)),
    ),
    max_size=12,
)


@st.composite
def fleets(draw: st.DrawFn) -> Simulation:
    nodes = tuple(
        machine(name, cards=draw(st.integers(0, 4)), fabric=draw(st.sampled_from(["ib", ""]))) for name in NODES
    )
    models = tuple(
        a_model(
            name,
            least=(least := draw(st.integers(0, 3))),
            most=least + draw(st.integers(0, 1)),
            cards=draw(st.integers(1, 2)),
            nodes=draw(st.sampled_from([1, 1, 2])),
            capacity_class=draw(st.sampled_from(spec.CAPACITY_CLASSES)),
        )
        for name in MODELS
    )
    return Simulation(Cluster(nodes=nodes, models=models))


def happen(world: Simulation, what: str, to: str) -> None:
    match what:
        case "silence":
            world.silent.add(to)
        case "return":
            world.comes_back(to)
        case "break":
            world.broken |= {(model, to) for model in MODELS}
        case "mend":
            world.broken -= {(model, to) for model in MODELS}
        case "stick":
            world.stuck.add(to)
        case "ask":
            world.ask(to)
        case "busy" | "idle":
            world.busy[to] = 3 if what == "busy" else 0
        case "change" | "less" | "more":
            [model] = [model for model in world.cluster.models if model.name == to]
            profile = replace(model.profiles[0], args=(*model.profiles[0].args, "--x"))
            scaling = replace(model.scaling, min=model.scaling.min + (what == "more"), max=model.scaling.max + 1)
            fewer = replace(model.scaling, min=0, max=max(0, model.scaling.max - 1))
            changed = {"change": {"profiles": (profile,)}, "less": {"scaling": fewer}, "more": {"scaling": scaling}}
            world.change(replace(model, **changed[what]))  # type: ignore[arg-type]


def played(world: Simulation, happened: list[tuple[str, str]]) -> Simulation:
    """After all that happened, and as long again as it takes to come to rest: whatever is broken stays so."""
    for what, to in happened:
        happen(world, what, to)
        world.run(90, step=10)
    for name in sorted(world.silent):
        world.comes_back(name)
    world.broken.clear()
    world.stuck.clear()
    world.run(2400, step=20)
    return world


@some
@given(fleets(), events)
def test_whatever_happened_the_least_number_runs_in_the_end_wherever_it_can(
    world: Simulation, happened: list[tuple[str, str]]
) -> None:
    played(world, happened)
    for model in world.cluster.models:
        short = len(world.ready(model.name)) < model.scaling.min
        assert not short or isinstance(place(model, model.profiles, world.cluster), Unplaced)
        assert len(world.ready(model.name)) <= model.scaling.max


@some
@given(fleets(), st.sets(st.sampled_from(NODES)), st.lists(st.sampled_from(MODELS), max_size=4))
def test_cards_are_held_until_their_node_says_that_they_are_free(
    world: Simulation, stuck: set[str], changed: list[str]
) -> None:
    """However long a stop takes: `Simulation` looks at whatever is forgotten."""
    world.stuck = stuck
    for model in changed:
        world.run(60, step=10)
        happen(world, "change", model)
        world.run(600, step=20)
    told = {replica.name for replica in world.replicas() if replica.wanted == "stop"}
    world.stuck = set()
    world.run(20, step=10)
    assert not told & {replica.name for replica in world.replicas()}


@some
@given(fleets(), events)
def test_whatever_happened_the_highest_class_is_served_first(
    world: Simulation, happened: list[tuple[str, str]]
) -> None:
    """No model is short while replicas of lower classes hold what it could have."""
    played(world, happened)
    ranks = {model.name: rank_of(model.profiles[0].capacity_class) for model in world.cluster.models}
    for model in world.cluster.models:
        if len(world.ready(model.name)) < model.scaling.min:
            higher = [replica for replica in world.replicas() if ranks[replica.model] >= ranks[model.name]]
            without = replace(world.cluster, replicas=tuple(higher))
            assert isinstance(place(model, model.profiles, without), Unplaced)


@some
@given(fleets(), events)
def test_whatever_happened_nothing_is_done_once_nothing_happens(
    world: Simulation, happened: list[tuple[str, str]]
) -> None:
    played(world, happened)
    before = [action for action in world.done if not isinstance(action, BackOff)]
    world.run(1200, step=20)
    assert _starts(world.done) == _starts(before)
    assert plan(world.cluster, world.now).actions == ()


def _starts(actions: Sequence[Action]) -> int:
    return sum(isinstance(action, Start) for action in actions)


@some
@given(fleets(), events, st.randoms(use_true_random=False))
def test_the_order_of_rows_never_matters(
    world: Simulation, happened: list[tuple[str, str]], chance: random.Random
) -> None:
    def shuffled(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(chance.sample(items, len(items)))

    for what, to in happened:
        happen(world, what, to)
        world.run(20, step=10)
        happen(world, "ask", "m")
        seen = world.cluster
        mixed = replace(
            seen,
            nodes=shuffled(seen.nodes),
            models=shuffled(seen.models),
            replicas=shuffled(seen.replicas),
            backoffs=shuffled(seen.backoffs),
            statuses=shuffled(seen.statuses),
        )
        assert plan(mixed, world.now) == plan(seen, world.now)


@some
@given(fleets(), events)
def test_a_replica_over_several_nodes_is_whole_or_on_its_way_out(
    world: Simulation, happened: list[tuple[str, str]]
) -> None:
    for what, to in happened:
        happen(world, what, to)
        world.run(40, step=10)
        for replica in world.replicas():
            if replica.wanted == "run" and not _outdated(replica, world):
                wide = next(model for model in world.cluster.models if model.name == replica.model).profiles[0].nodes
                assert len({shard.node for shard in replica.shards}) == len(replica.shards) == wide


def _outdated(replica: Replica, world: Simulation) -> bool:
    digests = {model.name: profile_digest(model, model.profiles[0]) for model in world.cluster.models}
    return digests[replica.model] != replica.profile_digest
