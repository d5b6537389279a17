"""What a pass remembers spares work and changes nothing: the remembered answer equals the fresh one."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.protocol import Build, Gpu, State
from catalog import spec
from nodes import reasons, scene
from nodes.fitting import Ask, Fit, ask_of
from nodes.ground import Ground
from nodes.placement import seat_among
from nodes.plans import Plan
from nodes.reasons import Lines
from nodes.reconcile import plan
from nodes.scene import Memory
from nodes.state import Backoff, Cluster, Load, Node, Replica, Shard, Status, TurnedDown, profile_digest
from tests.nodes.fleets import NOW, carried_out
from tests.nodes.test_placement_properties import GB, Dice, fleet, some_node, some_profile

some = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32).map(Dice)


def world(dice: Dice) -> Cluster:
    """A fleet in which several models of several classes want a place, some of them after failures."""
    _, cluster = fleet(dice)
    wanting = tuple(
        spec.Model(
            f"w{number}",
            profiles=tuple(wanted(dice, name) for name in dice.choice([("p",), ("p", "q")])),
            team=dice.choice(["", "red"]),
            scaling=spec.Scaling(dice.choice([0, 1, 2]), 2, 60),
        )
        for number in range(3)
    )
    there = tuple(
        replace(model, scaling=dice.choice([spec.Scaling(0, 9, 60), spec.Scaling(1, 9)])) for model in cluster.models
    )
    models = (*there, *wanting)
    digests = {(m.name, p.name): profile_digest(m, p) for m in models for p in m.profiles}
    replicas = tuple(some_state(dice, replica, digests) for replica in cluster.replicas)
    due = NOW + timedelta(seconds=dice.choice([-30, 30]))
    backoffs = tuple(
        Backoff(*key, digest, 1, due, "oom", node=dice.choice(["", "alpha"]))
        for key, digest in digests.items()
        if dice.random() < 0.2
    )
    statuses = tuple(Status(m.name, demand_at=dice.choice([None, NOW - timedelta(seconds=9)])) for m in models)
    nodes = tuple(replace(node, registered_at=NOW, last_seen_at=NOW) for node in cluster.nodes)
    return replace(cluster, nodes=nodes, models=models, replicas=replicas, backoffs=backoffs, statuses=statuses)


def wanted(dice: Dice, name: str) -> spec.Profile:
    profile = replace(some_profile(dice, name), capacity_class=dice.choice(spec.CAPACITY_CLASSES))
    return profile if profile.gpu_class else replace(profile, nodes=1)


def some_state(dice: Dice, replica: Replica, digests: dict[tuple[str, str], str]) -> Replica:
    long_ago = NOW - timedelta(seconds=dice.choice([10, 500, 5000]))
    return replace(
        replica,
        profile_digest=digests.get((replica.model, replica.profile), "gone"),
        wanted=dice.mostly("run", "drain", "stop"),
        wanted_at=NOW - timedelta(seconds=1),
        made_at=long_ago,
        ready_at=long_ago if replica.state == "ready" else None,
        load=dice.choice([None, Load(NOW, 0), Load(NOW, 3)]),
    )


def changed(dice: Dice, cluster: Cluster) -> Cluster:
    """The same some time later: a thing or two have happened."""
    for _ in range(dice.choice([0, 1, 1, 2, 4])):
        kind = dice.choice(["node", "new node", "no node", "replica", "replica gone", "model", "backoff", "quota"])
        nodes, replicas, models = list(cluster.nodes), list(cluster.replicas), list(cluster.models)
        if kind == "node" and nodes:
            at = dice.randrange(len(nodes))
            other = some_node(dice, nodes[at].name)
            field = dice.choice([field.name for field in fields(Node) if field.name not in ("name", "last_seen_at")])
            nodes[at] = replace(nodes[at], **{field: getattr(other, field)})
        elif kind == "new node":
            name = dice.choice(["alpha", "echo", "foxtrot"])
            nodes = [node for node in nodes if node.name != name]
            nodes.append(replace(some_node(dice, name), registered_at=NOW, last_seen_at=NOW))
        elif kind == "no node" and nodes:
            nodes.pop(dice.randrange(len(nodes)))
        elif kind == "replica" and replicas:
            at = dice.randrange(len(replicas))
            state: State = dice.choice(["fetching", "ready", "stopped"])
            shards = tuple(replace(shard, state=state) for shard in replicas[at].shards)
            new = replace(replicas[at], state=state, shards=shards, load=dice.choice([None, Load(NOW, 0)]))
            replicas[at] = replace(new, ready_at=NOW - timedelta(hours=1))
        elif kind == "replica gone" and replicas:
            replicas.pop(dice.randrange(len(replicas)))
        elif kind == "model":
            at = dice.randrange(len(models))
            profiles = tuple(
                replace(profile, capacity_class=dice.choice(spec.CAPACITY_CLASSES), reserved_cores=dice.choice([0, 2]))
                for profile in models[at].profiles
            )
            models[at] = replace(models[at], profiles=profiles, team=dice.choice(["", "red"]))
        cluster = replace(cluster, nodes=tuple(nodes), replicas=tuple(replicas), models=tuple(models))
        if kind == "backoff":
            cluster = replace(cluster, backoffs=cluster.backoffs[1:])
        if kind == "quota":
            quotas: Any = dice.choice([{}, {"red": {"h100-80g": dice.choice([1, 5, 9])}}])
            cluster = replace(cluster, quotas=quotas)
    return cluster


@some
@given(seeds)
def test_a_plan_with_memory_equals_one_without(dice: Dice) -> None:
    memory, cluster = Memory(), world(dice)
    for _ in range(8):
        fresh = plan(cluster, NOW)
        assert plan(cluster, NOW, memory) == fresh
        if dice.random() < 0.5:
            cluster = carried_out(cluster, fresh, NOW)
        cluster = changed(dice, cluster)


@some
@given(seeds)
def test_a_ground_without_some_replicas_equals_one_that_never_had_them(dice: Dice) -> None:
    model, cluster = fleet(dice)
    gone = {replica.name for replica in cluster.replicas if dice.random() < 0.5}
    left = Ground(replace(cluster, replicas=tuple(each for each in cluster.replicas if each.name not in gone)))
    without = Ground(cluster).without(gone)
    remembered = Ground(cluster).without(gone, Memory().answers["some"])
    for profile in model.profiles:
        ask = ask_of(model, profile)
        assert without.fits(ask) == remembered.fits(ask) == left.fits(ask)
        assert without.fits_on(left.nodes, ask) == left.fits(ask)
    assert without.teams == left.teams


FACTS = [each.name for each in fields(Node) if each.name != "name"]


@pytest.mark.parametrize("fact", FACTS)
@settings(some, max_examples=60)
@given(dice=seeds)
def test_whatever_changes_of_a_node_its_answers_follow(fact: str, dice: Dice) -> None:
    model, cluster = fleet(dice)
    node = some_node(dice, "alpha")
    others = (getattr(some_node(dice, "alpha"), fact) for _ in range(40))
    other = next((value for value in others if value != getattr(node, fact)), getattr(node, fact))
    before = replace(cluster, nodes=(node,))
    after = replace(cluster, nodes=(replace(node, **{fact: other}),))
    asks = [ask_of(model, wanted(dice, "p")) for _ in range(8)]
    answers = Memory().answers["alpha"]
    for now in (before, after):
        fresh, remembered = Ground(now), Ground(now, answers)
        for ask in asks:
            assert told(remembered, ask) == told(fresh, ask)


def told(ground: Ground, ask: Ask) -> list[object]:
    """The answers, and what a part would be given where one fits."""
    answers = [(each.free, each.used) if isinstance(each, Fit) else each for each in ground.answers(ask).values()]
    return [*answers, seat_among(ask, ground.fits(ask), {})]


# --- how much a pass does --------------------------------------------------------------------------------------------
def crowd(models: int, nodes: int = 20, **profile: Any) -> Cluster:
    """Every card is held; no two models ask for the same."""
    build = Build(engine="vllm", name="vllm", version="1")
    fleet = tuple(
        Node(
            f"n{number:04}",
            cores=64,
            builds=(build,),
            gpus=(Gpu(uuid=f"g{number}", index=0, name="L4", gpu_class="l4-22g"),),
            registered_at=NOW,
            last_seen_at=NOW,
        )
        for number in range(nodes)
    )
    holder = spec.Model(
        "holder", profiles=(spec.Profile("p", gpu_class="l4-22g", gpus_per_node=1),), scaling=spec.Scaling(nodes, nodes)
    )
    digest = profile_digest(holder, holder.profiles[0])
    held = tuple(
        Replica(
            f"r{number:04}",
            "holder",
            "p",
            digest,
            made_at=NOW,
            state="ready",
            ready_at=NOW,
            shards=(Shard(f"n{number:04}", state="ready", gpus=(f"g{number}",)),),
        )
        for number in range(nodes)
    )
    asks = replace(spec.Profile("p", gpu_class="l4-22g", gpus_per_node=1), **profile)
    wanting = tuple(
        spec.Model(
            f"w{number:04}",
            profiles=(replace(asks, reserved_cores=1 + number / 100),),
            scaling=spec.Scaling(1, 1),
        )
        for number in range(models)
    )
    return Cluster(nodes=fleet, models=(holder, *wanting), replicas=held)


def asked(memory: Memory) -> int:
    return sum(answers.asked for answers in memory.answers.values())


def unplaced(decided: Plan) -> set[str]:
    return {model for model, why in decided.reasons if why}


def test_nodes_are_asked_again_only_where_something_changed() -> None:
    memory, cluster = Memory(), crowd(models=10)
    plan(cluster, NOW, memory)
    assert asked(memory) == 10 * 20
    reasons = plan(cluster, NOW, memory).reasons
    assert asked(memory) == 10 * 20
    news = replace(cluster, nodes=(replace(cluster.nodes[0], cordoned=True), *cluster.nodes[1:]))
    told = dict(plan(news, NOW, memory).reasons)
    assert asked(memory) == 10 * 20 + 10
    assert all(told[model][0].reason.startswith("is cordoned") for model, why in reasons if why)


def test_a_heartbeat_that_tells_nothing_of_matter_asks_nobody() -> None:
    memory, cluster = Memory(), crowd(models=3)
    nodes = tuple(replace(node, disk_free_bytes=10**12) for node in cluster.nodes)
    plan(replace(cluster, nodes=nodes), NOW, memory)
    before = asked(memory)
    beaten = tuple(
        replace(node, cpu_percent=50.0, load_1m=3.0, disk_free_bytes=10**12 + 7, last_seen_at=NOW) for node in nodes
    )
    plan(replace(cluster, nodes=beaten), NOW, memory)
    assert asked(memory) == before


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    memory, cluster = Memory(), crowd(models=5)
    plan(cluster, NOW, memory)
    fewer = replace(cluster, models=cluster.models[:3])
    plan(fewer, NOW, memory)
    assert {model for model, _ in memory.refused} == {"w0000", "w0001"}
    before = asked(memory)
    plan(cluster, NOW, memory)
    assert asked(memory) == before + 3 * 20


def test_a_pass_asks_so_much_and_the_next_one_goes_on_until_all_are_told() -> None:
    memory, cluster = Memory(), crowd(models=60, nodes=500)
    told: set[str] = set()
    for _ in range(10):
        before = asked(memory)
        decided = plan(cluster, NOW, memory)
        assert asked(memory) - before < scene.ASKED + 2 * 500
        assert unplaced(decided) >= told
        told = unplaced(decided)
        if not decided.unfinished:
            break
    assert len(told) == 60


def test_room_is_looked_for_a_few_times_a_pass_and_not_again_in_vain() -> None:
    memory = Memory()
    cluster = crowd(models=10, capacity_class="guaranteed")
    spot = replace(cluster.models[0], profiles=(replace(cluster.models[0].profiles[0], capacity_class="spot"),))
    busy = tuple(replace(replica, wanted="drain", wanted_at=NOW) for replica in cluster.replicas[:1])
    cluster = replace(cluster, models=(spot, *cluster.models[1:]), replicas=(*busy, *cluster.replicas[1:]))
    first = plan(cluster, NOW, memory)
    assert plan(cluster, NOW, memory) == first == plan(cluster, NOW)


# --- reasons in lines ------------------------------------------------------------------------------------------------
def why(text: str) -> tuple[TurnedDown, ...]:
    return (TurnedDown("one", "p", text),)


def test_lines_are_made_for_a_few_models_at_a_time_and_for_all_in_the_end() -> None:
    lines, models = Lines(), [f"m{number}" for number in range(2 * reasons.FRESH + 1)]
    given = [(model, why("is full")) for model in models]
    for count in (reasons.FRESH, 2 * reasons.FRESH, len(models)):
        assert len(lines.of(given, set(models))) == count
    changed = [(model, why("is lost")) for model in models]
    found = lines.of([*changed, ("new", why("is full"))], {*models, "new"})
    assert found["new"] == ("one (p): is full",)
    assert found.keys() - {"new"} == set(models[: reasons.FRESH - 1])
    lines.of(changed, set(models))
    found = lines.of(changed, set(models))
    assert set(found.values()) == {("one (p): is lost",)}
    assert found.keys() == set(models)


def test_the_same_reasons_are_not_told_anew_and_none_are_told_at_once() -> None:
    lines, same = Lines(), why("is full")
    first = lines.of([("m", same)], {"m"})["m"]
    assert lines.of([("m", same)], {"m"})["m"] is first
    assert lines.of([("m", ())], {"m"}) == {"m": ()}
    again = lines.of([("m", same)], {"m"})["m"]
    assert again == first
    lines.of([], set())
    assert lines.of([("m", same)], {"m"})["m"] is not again


def test_a_larger_disk_of_which_no_more_is_free_is_told_of() -> None:
    memory, cluster = Memory(), crowd(models=1, nodes=2, min_disk_gb=100)
    small = replace(cluster.nodes[0], disk_free_bytes=50 * GB)
    for disk_bytes, has in ((60 * GB, "has a disk of 60.0 GB"), (200 * GB, "has 50.0 GB of disk free")):
        nodes = (replace(small, disk_bytes=disk_bytes), cluster.nodes[1])
        told = dict(plan(replace(cluster, nodes=nodes), NOW, memory).reasons)
        assert [each.reason.partition(",")[0] for each in told["w0000"] if each.node == small.name] == [has]
