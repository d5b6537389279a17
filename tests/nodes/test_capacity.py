"""Who makes way for whom: on-demand models that nobody asks for, and replicas of lower capacity classes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog import spec
from nodes.outlook import rank_of
from nodes.plans import Drain, Start, Stop
from nodes.reconcile import plan
from nodes.scaling import ASKED_FOR
from nodes.scene import RESIDENT
from nodes.state import Cluster, Load, Replica, Shard, Status, profile_digest
from tests.nodes.fleets import NOW
from tests.nodes.simulation import Simulation, a_model, machine

some = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
ONE_SLOT = (machine("one", cards=1),)
LONG_AGO = NOW - timedelta(minutes=10)


def serving(model: spec.Model, *cards: str, node: str = "one", name: str = "", **fields: object) -> Replica:
    """A replica that has been ready and idle for long."""
    idle = {"load": Load(at=NOW, in_flight=0), "ready_at": LONG_AGO}
    return Replica(
        name or f"{model.name}-1",
        model.name,
        "only",
        profile_digest(model, model.profiles[0]),
        made_at=LONG_AGO,
        state="ready",
        state_at=LONG_AGO,
        shards=(Shard(node, 0, "ready", gpus=cards),),
        **{**idle, **fields},  # type: ignore[arg-type]
    )


# --- on demand -------------------------------------------------------------------------------------------------------
OLD, WANTED = a_model("old"), a_model("wanted")
ASKED = (Status("wanted", demand_at=NOW), Status("old", demand_at=NOW - timedelta(minutes=5)))


def evicted(*replicas: Replica, models: tuple[spec.Model, ...] = (OLD, WANTED), **fields: object) -> list[str]:
    """Names of replicas that make way now."""
    cluster = Cluster(nodes=ONE_SLOT, models=models, replicas=replicas, statuses=ASKED)
    actions = plan(replace(cluster, **fields), NOW).actions  # type: ignore[arg-type]
    return [action.replica for action in actions if isinstance(action, Drain | Stop)]


def test_an_idle_model_makes_way_for_one_that_is_asked_for() -> None:
    cluster = Cluster(nodes=ONE_SLOT, models=(OLD, WANTED), replicas=(serving(OLD, "one-0"),), statuses=ASKED)
    [drain] = plan(cluster, NOW).actions
    assert isinstance(drain, Drain)
    assert drain.why == (
        "replica old-1 is drained: nobody asks for old now, and wanted is asked for and needs its place"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"load": None},
        {"load": Load(at=NOW, in_flight=None)},
        {"load": Load(at=NOW, in_flight=1)},
        {"ready_at": NOW - RESIDENT + timedelta(seconds=1)},
    ],
    ids=["of unknown load", "seen by a silent gateway", "busy", "lately ready"],
)
def test_no_replica_makes_way_that_is(fields: dict[str, object]) -> None:
    assert evicted(replace(serving(OLD, "one-0"), **fields)) == []  # type: ignore[arg-type]


def test_no_replica_of_a_model_that_is_kept_up_makes_way() -> None:
    kept_up = replace(OLD, scaling=spec.Scaling(1, 1))
    assert evicted(serving(kept_up, "one-0"), models=(kept_up, WANTED)) == []


def test_no_replica_of_a_model_that_is_asked_for_makes_way() -> None:
    asked = tuple(replace(status, demand_at=NOW - ASKED_FOR + timedelta(seconds=1)) for status in ASKED)
    assert evicted(serving(OLD, "one-0"), statuses=asked) == []


def test_no_replica_over_several_nodes_makes_way() -> None:
    both = (machine("one", cards=1, fabric="ib"), machine("two", cards=1, fabric="ib"))
    wide = a_model("old", nodes=2)
    shards = (Shard("one", 0, "ready", gpus=("one-0",)), Shard("two", 1, "starting", gpus=("two-0",)))
    assert evicted(replace(serving(wide), shards=shards), models=(wide, WANTED), nodes=both) == []


def test_no_replica_of_a_higher_class_makes_way_for_a_lower_one() -> None:
    spot = a_model("wanted", capacity_class="spot")
    assert evicted(serving(OLD, "one-0"), models=(OLD, spot)) == []


def test_nothing_makes_way_where_it_would_not_help() -> None:
    big = a_model("wanted", cards=2)
    assert evicted(serving(OLD, "one-0"), models=(OLD, big)) == []


def test_of_several_the_one_asked_for_the_longest_ago_makes_way() -> None:
    nodes = (machine("one", cards=2),)
    other = a_model("other")
    statuses = (*ASKED, Status("other", demand_at=NOW - timedelta(minutes=6)))
    replicas = (serving(OLD, "one-0"), serving(other, "one-1"))
    assert evicted(*replicas, models=(OLD, other, WANTED), nodes=nodes, statuses=statuses) == ["other-1"]


def test_a_model_that_is_kept_up_takes_an_idle_ones_place() -> None:
    kept_up = a_model("wanted", least=1)
    assert evicted(serving(OLD, "one-0"), models=(OLD, kept_up), statuses=ASKED[1:]) == ["old-1"]


def test_nothing_else_makes_way_while_one_is_on_its_way() -> None:
    nodes = (machine("one", cards=2),)
    leaving = serving(OLD, "one-0", name="a", wanted="drain", wanted_at=NOW)
    other = a_model("other")
    models = (OLD, other, WANTED)
    assert evicted(leaving, serving(other, "one-1"), models=models, nodes=nodes) == []


def test_a_place_that_is_being_cleared_is_kept_for_whom_it_is_cleared() -> None:
    nodes = (machine("one", cards=4),)
    big = a_model("big", least=1, cards=4, capacity_class="guaranteed")
    small = a_model("small", least=2, most=2, capacity_class="spot")
    replicas = (serving(small, "one-0"), serving(small, "one-1", name="b", wanted="drain", wanted_at=NOW))
    decided = plan(Cluster(nodes=nodes, models=(big, small), replicas=replicas), NOW)
    assert not [action for action in decided.actions if isinstance(action, Start)]
    assert [turned.reason for turned in dict(decided.reasons)["small"]] == ["is being cleared for big"]


def test_an_unasked_model_stops_after_its_idle_time_and_not_while_it_loads() -> None:
    world = Simulation(Cluster(nodes=ONE_SLOT, models=(replace(OLD, scaling=spec.Scaling(0, 1, idle_timeout_s=10)),)))
    world.ask("old")
    world.run(5)
    assert world.replicas("old")
    world.run(10)
    [replica] = world.ready("old")
    assert replica.ready_at is not None
    world.run(30)
    assert world.replicas("old") == []
    assert world.count(Start, "old") == 1


def test_an_unasked_model_of_unknown_use_goes_on() -> None:
    world = Simulation(Cluster(nodes=ONE_SLOT, models=(OLD,)), busy={"old": None})
    world.ask("old")
    world.run(20)
    world.run(3600, step=60)
    assert len(world.ready("old")) == 1


def test_two_models_asked_for_in_turns_share_one_slot_slowly() -> None:
    world = Simulation(Cluster(nodes=ONE_SLOT, models=(OLD, WANTED)))
    for turn in range(180):
        world.ask("old" if turn % 2 else "wanted")
        world.run(20)
    assert world.count(Start, "old") + world.count(Start, "wanted") == 1  # whoever came first is asked for all the time
    for turn in range(12):
        for _ in range(20):
            world.ask("old" if turn % 2 else "wanted")
            world.run(30)
    assert 11 <= world.count(Start, "old") + world.count(Start, "wanted") <= 13


@some
@given(
    st.lists(
        st.tuples(st.sampled_from([(), ("old",), ("wanted",), ("old", "wanted")]), st.integers(1, 40)), max_size=25
    )
)
def test_two_on_demand_models_on_one_slot_never_thrash(asked: list[tuple[tuple[str, ...], int]]) -> None:
    """Whoever asks whenever: the slot changes hands at most once in the time that a model stays at least."""
    world = Simulation(Cluster(nodes=ONE_SLOT, models=(OLD, WANTED)))
    for models, tens in asked:
        for _ in range(tens):
            world.ask(*models)
            world.run(10, step=10)
    starts = world.count(Start, "old") + world.count(Start, "wanted")
    lasted = world.now - NOW
    assert starts <= 1 + lasted / RESIDENT


# --- capacity classes ------------------------------------------------------------------------------------------------
def preempted(replicas: tuple[Replica, ...], *models: spec.Model, cards: int = 4, **fields: object) -> list[str]:
    cluster = Cluster(nodes=(machine("one", cards=cards),), models=models, replicas=replicas)
    actions = plan(replace(cluster, **fields), NOW).actions  # type: ignore[arg-type]
    return [action.replica for action in actions if isinstance(action, Drain | Stop)]


SPOT = a_model("spot", least=1, most=9, capacity_class="spot")


@pytest.mark.parametrize(("mine", "makes_way"), [("guaranteed", True), ("standard", True), ("spot", False)])
def test_only_a_lower_class_makes_way(mine: str, makes_way: bool) -> None:
    high = a_model("high", least=1, cards=4, capacity_class=mine)
    replicas = (serving(SPOT, "one-0", "one-1", "one-2", "one-3"),)
    assert preempted(replicas, SPOT, high) == (["spot-1"] if makes_way else [])


def test_equal_class_never_makes_way_even_beside_a_lower_one() -> None:
    equal = a_model("equal", least=1, cards=2)
    high = a_model("high", least=1, cards=4)
    replicas = (serving(SPOT, "one-0", "one-1"), serving(equal, "one-2", "one-3"))
    assert preempted(replicas, SPOT, equal, high) == []


def test_as_few_as_possible_make_way_one_after_the_other() -> None:
    small = replace(a_model("small", least=4, most=4, capacity_class="spot"))
    high = a_model("high", least=1, cards=2, capacity_class="guaranteed")
    world = Simulation(Cluster(nodes=(machine("one", cards=4),), models=(small,)))
    world.run(60)
    assert len(world.ready("small")) == 4
    world.busy["small"] = 1
    world.change(high)
    world.run(5)
    [leaving] = [replica for replica in world.replicas("small") if replica.wanted != "run"]
    assert leaving.wanted == "drain"
    world.run(30)
    assert len([replica for replica in world.replicas("small") if replica.wanted == "run"]) == 3
    world.run(200)
    assert len(world.ready("high")) == 1
    assert len(world.ready("small")) == 2


def test_the_cheapest_replicas_make_way() -> None:
    nodes = (machine("one", cards=2), machine("two", cards=2))
    middle = a_model("middle", least=1, cards=2)
    high = a_model("high", least=1, cards=2, capacity_class="guaranteed")
    spots = (serving(SPOT, "two-0", node="two", name="s1"), serving(SPOT, "two-1", node="two", name="s2"))
    replicas = (serving(middle, "one-0", "one-1"), *spots)
    [first] = preempted(replicas, SPOT, middle, high, nodes=nodes)
    assert first in ("s1", "s2")


def test_a_place_over_several_nodes_is_cleared_of_the_cheapest() -> None:
    nodes = tuple(machine(name, cards=1, fabric="ib") for name in ("a", "b", "c", "d"))
    middle = a_model("middle", least=1)
    high = a_model("high", least=1, nodes=2, capacity_class="guaranteed")
    replicas = (
        serving(middle, "a-0", node="a", name="m1"),
        serving(SPOT, "b-0", node="b", name="s1", load=Load(at=NOW, in_flight=9)),
        serving(middle, "c-0", node="c", name="m2"),
        serving(SPOT, "d-0", node="d", name="s2"),
    )
    many = replace(middle, scaling=spec.Scaling(2, 2))
    assert preempted(replicas, SPOT, many, high, nodes=nodes) == ["s2"]


def test_nothing_makes_way_for_what_would_not_fit_even_then() -> None:
    high = a_model("high", least=1, cards=8, capacity_class="guaranteed")
    assert preempted((serving(SPOT, "one-0", "one-1"),), SPOT, high) == []


def test_nothing_makes_way_for_a_team_that_may_hold_no_more() -> None:
    high = replace(a_model("high", least=1, cards=4, capacity_class="guaranteed"), team="t")
    quotas = {"t": {"h100-80g": 2}}
    assert preempted((serving(SPOT, "one-0", "one-1"),), SPOT, high, quotas=quotas) == []


def test_what_would_only_widen_a_quota_is_not_preempted() -> None:
    """The team's own replica holds its quota: clearing another's place does not help."""
    mine = replace(SPOT, team="t")
    high = replace(a_model("high", least=1, cards=2, capacity_class="guaranteed"), team="t")
    nodes = (machine("one", cards=2), machine("two", cards=2))
    theirs = a_model("theirs", least=1, cards=2, capacity_class="spot")
    busy = Load(at=NOW, in_flight=5)
    replicas = (serving(mine, "one-0", "one-1", load=busy), serving(theirs, "two-0", "two-1", node="two"))
    quotas = {"t": {"h100-80g": 2}}
    taken = preempted(replicas, mine, theirs, high, nodes=nodes, quotas=quotas)
    assert taken == ["spot-1"]


def test_nothing_makes_way_where_a_quota_would_need_more_than_one_place_cleared() -> None:
    mine = replace(SPOT, team="t")
    high = replace(a_model("high", least=1, cards=2, capacity_class="guaranteed"), team="t")
    nodes = (machine("one", cards=2), machine("two", cards=2))
    replicas = (serving(mine, "one-0", name="a"), serving(mine, "two-0", node="two", name="b"))
    assert preempted(replicas, mine, high, nodes=nodes, quotas={"t": {"h100-80g": 2}}) == []


def test_no_model_takes_the_place_of_its_own_replicas() -> None:
    """One replica less and one more would leave it as short as before, and cost what it serves."""
    profiles = tuple(
        replace(SPOT.profiles[0], name=name, capacity_class=name, priority=priority)
        for name, priority in (("guaranteed", 1), ("spot", 0))
    )
    model = replace(SPOT, name="both", profiles=profiles, scaling=spec.Scaling(2, 2))
    digest = profile_digest(model, profiles[1])
    on_spot = replace(serving(SPOT, "one-0"), model="both", profile="spot", profile_digest=digest)
    assert preempted((on_spot,), model, cards=1) == []


def test_a_changed_profile_is_swapped_where_the_quota_has_no_room_for_both() -> None:
    old = replace(a_model("chat", least=1, cards=2), team="t")
    world = Simulation(Cluster(nodes=(machine("one", cards=8),), models=(old,), quotas={"t": {"h100-80g": 2}}))
    world.run(60)
    [before] = world.ready("chat")
    world.change(replace(old, profiles=(replace(old.profiles[0], args=("--new",)),)))
    world.run(300)
    [after] = world.ready("chat")
    assert after.profile_digest != before.profile_digest
    assert world.count(Start, "chat") == 2


def test_a_lowered_quota_stops_nothing_that_runs() -> None:
    chat = replace(a_model("chat", least=1, cards=2), team="t")
    world = Simulation(Cluster(nodes=(machine("one", cards=8),), models=(chat,), quotas={"t": {"h100-80g": 2}}))
    world.run(60)
    world.cluster = replace(world.cluster, quotas={"t": {"h100-80g": 0}})
    world.run(600, step=30)
    assert len(world.ready("chat")) == 1
    assert world.count(Start, "chat") == 1


def test_nothing_is_evicted_for_a_team_that_may_hold_no_more() -> None:
    wanted = replace(WANTED, team="t")
    assert evicted(serving(OLD, "one-0"), models=(OLD, wanted), quotas={"t": {"h100-80g": 0}}) == []


def test_what_would_only_widen_a_quota_is_not_evicted() -> None:
    """The team's own idle replica holds its quota: the place of one that has been idle for longer does not help."""
    mine, wanted = replace(a_model("mine"), team="t"), replace(WANTED, team="t")
    nodes = (*ONE_SLOT, machine("two", cards=1))
    statuses = (*ASKED, Status("mine", demand_at=NOW - timedelta(minutes=4)))
    replicas = (serving(OLD, "one-0"), serving(mine, "two-0", node="two"))
    models, quotas = (OLD, mine, wanted), {"t": {"h100-80g": 1}}
    assert evicted(*replicas, models=models, nodes=nodes, statuses=statuses, quotas=quotas) == ["mine-1"]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Simulation, tuple[spec.Model, ...]]:
    nodes = tuple(machine(name, cards=draw(st.integers(1, 4)), fabric="ib") for name in ("a", "b", "c"))
    models = []
    for name in ("m", "n", "o", "p"):
        least = draw(st.integers(0, 2))
        models.append(
            a_model(
                name,
                least=least,
                most=max(1, least),
                cards=draw(st.integers(1, 3)),
                nodes=draw(st.sampled_from([1, 1, 1, 2])),
                capacity_class=draw(st.sampled_from(spec.CAPACITY_CLASSES)),
            )
        )
    return Simulation(Cluster(nodes=nodes), busy={"m": draw(st.sampled_from([0, 1, None]))}), tuple(models)


@some
@given(worlds(), st.data())
def test_whoever_comes_when_nobody_makes_way_who_must_not_and_all_comes_to_rest(
    made: tuple[Simulation, tuple[spec.Model, ...]], data: st.DataObject
) -> None:
    world, models = made
    ranks = {model.name: rank_of(model.profiles[0].capacity_class) for model in models}
    leaving: dict[str, str] = {}  # who makes way for whom: one at a time for each
    for model in data.draw(st.permutations(models)):
        world.change(model)
        asked = data.draw(st.sampled_from([(), ("m",), ("n", "o")]))
        for _ in range(30):
            world.ask(*asked)
            before = {replica.name: replica for replica in world.replicas()}
            done = len(world.done)
            world.run(10, step=10)
            for action in world.done[done:]:
                if isinstance(action, Drain | Stop) and "is of a higher class" in action.why:
                    victim = before.get(action.replica)
                    assert isinstance(action, Drain) or victim is None or victim.state != "ready"
                    high = action.why.split(": ")[1].split(" ")[0]
                    assert ranks[action.model] < ranks[high]
                    there = {each.name for each in world.replicas()}
                    assert not {name for name, why in leaving.items() if why == high} & there - {action.replica}
                    leaving[action.replica] = high
                if isinstance(action, Drain) and "is asked for and needs its place" in action.why:
                    victim = before[action.replica]
                    assert len(victim.shards) == 1
                    assert victim.model not in asked
                    assert next(m for m in models if m.name == victim.model).scaling.min == 0
    starts = len([action for action in world.done if isinstance(action, Start)])
    world.run(1200, step=20)
    quiet = len([action for action in world.done if isinstance(action, Start)])
    world.run(600, step=20)
    assert len([action for action in world.done if isinstance(action, Start)]) == quiet <= starts + 12
