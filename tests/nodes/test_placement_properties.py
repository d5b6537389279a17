"""What holds of every placement, whatever the fleet: checked by rules and a search that know nothing of `place`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from agent.protocol import Build, Fabric, Gpu, State
from catalog import spec
from nodes.fitting import LEAST_DISK_BYTES
from nodes.placement import Placed, Unplaced, place
from nodes.state import Cluster, Node, Replica, Shard
from tests.nodes.fleets import NOW

some = settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])

CLASSES = ("h100-80g", "l4-22g")
TYPES = ("H100 SXM", "H100 PCIe")
NAMES = ("alpha", "bravo", "charlie", "delta")
GB = 10**9
ENDED = ("stopped", "failed")


class Dice(Random):
    """Of one seed a whole fleet: drawing each of its hundred values by itself would take a tenth of a second."""

    def mostly(self, usual: Any, *others: Any) -> Any:
        """Enough goes right that much can be placed."""
        return usual if self.random() < 0.92 else self.choice([usual, *others])


def some_cards(dice: Dice, home: str) -> tuple[Gpu, ...]:
    count = dice.mostly(4, 0, 1, 2, 3)
    uuids = [f"{home}-{i}" for i in range(count)]
    return tuple(
        Gpu(
            uuid=uuid,
            index=index,
            name=dice.mostly(TYPES[0], *TYPES),
            gpu_class=dice.mostly(CLASSES[0], *CLASSES),
            memory_bytes=dice.mostly(80 * GB, None, 24 * GB),
            healthy=dice.mostly(True, False),
            fault=dice.choice(["", "ECC"]),
            numa=dice.choice([None, 0, 1]),
            peers=dice.choice([None, (), tuple(dice.sample(uuids, min(2, count)))]),
            nvlink_cluster=dice.choice(["", "c"]),
            nvlink_clique=dice.choice([None, 1, 2]),
            slice_of=dice.mostly("", "GPU-parent"),
        )
        for index, uuid in enumerate(uuids)
    )


def some_fabrics(dice: Dice) -> tuple[Fabric, ...]:
    return tuple(
        Fabric(
            name=name,
            up=dice.mostly(True, False),
            rate_gbit_s=dice.choice([None, 100.0, 400.0]),
            link_layer=dice.mostly("InfiniBand", "Ethernet"),
        )
        for name in dice.mostly(("ib0",), (), ("ib1",), ("ib0", "ib1"))
    )


def some_node(dice: Dice, name: str) -> Node:
    build = Build(engine="vllm", name="cu13", version="1", usable=dice.mostly(True, False))
    return Node(
        name,
        state=dice.mostly("ready", "joining", "unreachable", "lost"),
        cordoned=dice.mostly(False, True),
        draining=dice.mostly(False, True),
        labels=dice.mostly((("zone", "a"),), (), (("rack", "1"), ("zone", "b"))),
        disabled_engines=dice.mostly(frozenset[str](), frozenset({"vllm"})),
        reserved_cores=dice.mostly(0, 4),
        cores=dice.mostly(64, None, 8),
        memory_bytes=dice.mostly(500 * GB, None, 16 * GB),
        disk_bytes=dice.mostly(2000 * GB, None, 60 * GB),
        disk_free_bytes=dice.mostly(1000 * GB, None, 10**6, 50 * GB),
        gpus=some_cards(dice, name),
        gpus_fault=dice.mostly("", "nvidia-smi does not answer"),
        fabrics=some_fabrics(dice),
        builds=(build,),
    )


def some_profile(dice: Dice, name: str) -> spec.Profile:
    return spec.Profile(
        name,
        gpu_class=dice.mostly(CLASSES[0], CLASSES[1], None),
        gpus_per_node=dice.choice([1, 1, 2, 3, 4]),
        nodes=dice.choice([1, 2, 2, 3]),
        priority=dice.choice([0, 1]),
        reserved_cores=dice.mostly(0, 2, 8),
        required_memory_gb=dice.mostly(None, 30, 100),
        min_disk_gb=dice.mostly(None, 40, 100),
        labels=dice.mostly((), (("zone", "a"),), (("rack", "1"), ("zone", "b"))),
        only_nodes=dice.mostly((), ("alpha", "bravo"), ("charlie",)),
    )


def fleet(dice: Dice) -> tuple[spec.Model, Cluster]:
    """A model to place, and a cluster in which others, and perhaps replicas of its own, hold cards already."""
    drawn = [some_profile(dice, name) for name in dice.choice([("p",), ("p", "q")])]
    profiles = tuple(replace(p, nodes=1) if p.gpu_class is None else p for p in drawn)
    model = spec.Model("m", profiles=profiles, team=dice.choice(["", "red"]))
    other = spec.Model("n", profiles=(spec.Profile("p", gpu_class=CLASSES[0], min_disk_gb=20),), team="red")
    nodes = [some_node(dice, name) for name in NAMES[: dice.mostly(3, 0, 1, 2, 4, 4)]]
    replicas: list[Replica] = []
    crowd = dice.choice([0.2, 0.5])
    for node in nodes:
        for gpu in node.gpus:
            if dice.random() < crowd:
                state: State = dice.choice(["fetching", "ready", "ready", "stopping", "stopped", "failed"])
                shard = Shard(node.name, state=state, cores=dice.choice([0, 4]), gpus=(gpu.uuid,))
                owner = dice.choice([model, other])
                name = f"r{len(replicas)}"
                replicas.append(Replica(name, owner.name, "p", "d", made_at=NOW, state=state, shards=(shard,)))
    quotas = dice.choice([{}, {"red": {CLASSES[0]: 6}}, {"red": {CLASSES[0]: 2}, "blue": {}}])
    return model, Cluster(nodes=tuple(nodes), models=(model, other), replicas=tuple(replicas), quotas=quotas)


fleets = st.integers(0, 2**32).map(lambda seed: fleet(Dice(seed)))


# --- the rules, said again -------------------------------------------------------------------------------------------
def live(cluster: Cluster) -> Iterator[tuple[Replica, Shard]]:
    for replica in cluster.replicas:
        for shard in replica.shards:
            if shard.state not in ENDED:
                yield replica, shard


def taken(cluster: Cluster, node: Node) -> set[str]:
    return {card for _, shard in live(cluster) if shard.node == node.name for card in shard.gpus}


def may_run(node: Node, model: spec.Model, profile: spec.Profile, cluster: Cluster) -> bool:
    """Everything but cards and fabrics."""
    if node.state != "ready" or node.cordoned or node.draining or "vllm" in node.disabled_engines:
        return False
    if not node.builds[0].usable or (profile.only_nodes and node.name not in profile.only_nodes):
        return False
    if not set(profile.labels) <= set(node.labels):
        return False
    here = [(r, s) for r, s in live(cluster) if s.node == node.name]
    if node.disk_free_bytes is not None and node.disk_free_bytes < LEAST_DISK_BYTES:
        return False
    if profile.min_disk_gb:
        known = {(m.name, p.name): p.min_disk_gb or 0 for m in cluster.models for p in m.profiles}
        coming = sum(known.get((r.model, r.profile), 0) for r, s in here if s.state == "fetching") * GB
        if node.disk_free_bytes is None or node.disk_free_bytes - coming < profile.min_disk_gb * GB:
            return False
    cores_held = sum(shard.cores for _, shard in here)
    if profile.gpu_class is None:
        needed = profile.required_memory_gb
        if needed and (node.memory_bytes is None or node.memory_bytes < needed * GB):
            return False
        if node.cores is None:
            return not cores_held and not profile.reserved_cores
        free = node.cores - node.reserved_cores - cores_held
        one_at_least = not profile.reserved_cores and not cores_held and free > 0
        return one_at_least or free >= (profile.reserved_cores or max(1, node.cores // 2))
    if profile.reserved_cores:
        return node.cores is not None and node.cores - node.reserved_cores - cores_held >= profile.reserved_cores
    return True


def usable(node: Node, profile: spec.Profile, cluster: Cluster) -> list[Gpu]:
    asked = profile.gpus_per_node * profile.nodes
    share = (profile.required_memory_gb or 0) * GB / asked
    return [
        gpu
        for gpu in node.gpus
        if gpu.gpu_class == profile.gpu_class
        and gpu.healthy
        and not node.gpus_fault
        and gpu.uuid not in taken(cluster, node)
        and (not share or (gpu.memory_bytes is not None and gpu.memory_bytes >= share))
        and (profile.gpus_per_node == 1 or not gpu.slice_of)
    ]


def within_quota(model: spec.Model, profile: spec.Profile, cluster: Cluster) -> bool:
    limit = cluster.quotas.get(model.team, {}).get(profile.gpu_class or "")
    if limit is None:
        return True
    kinds = {gpu.uuid: gpu for node in cluster.nodes for gpu in node.gpus}
    mine = {each.name for each in cluster.models if each.team == model.team}
    held = [kinds[card] for replica, shard in live(cluster) if replica.model in mine for card in shard.gpus]
    count = sum(gpu.healthy and gpu.gpu_class == profile.gpu_class for gpu in held)
    return count + profile.gpus_per_node * profile.nodes <= limit


def can_share(group: tuple[Node, ...], profile: spec.Profile, cluster: Cluster) -> bool:
    """Whether these nodes can run one replica together: some type that each has enough of, some fabric up on all."""
    for kind in TYPES:
        if all(sum(g.name == kind for g in usable(n, profile, cluster)) >= profile.gpus_per_node for n in group):
            links = [{(f.name, f.link_layer) for f in node.fabrics if f.up} for node in group]
            if len(group) == 1 or set.intersection(*links):
                return True
    return False


def exists(model: spec.Model, profile: spec.Profile, cluster: Cluster) -> bool:
    """By looking at every set of nodes."""
    able = [node for node in cluster.nodes if may_run(node, model, profile, cluster)]
    if profile.gpu_class is None:
        return bool(able)
    if not within_quota(model, profile, cluster):
        return False
    return any(can_share(group, profile, cluster) for group in combinations(able, profile.nodes))


# --- what holds ------------------------------------------------------------------------------------------------------
@some
@given(fleets)
def test_a_placed_replica_keeps_every_rule(drawn: tuple[spec.Model, Cluster]) -> None:
    model, cluster = drawn
    found = place(model, model.profiles, cluster)
    event(type(found).__name__)
    if isinstance(found, Unplaced):
        return
    profile, nodes = found.profile, {node.name: node for node in cluster.nodes}
    homes = [part.node for part in found.parts]
    assert homes == sorted(set(homes))
    assert [part.rank for part in found.parts] == list(range(profile.nodes))
    event(f"{profile.nodes} nodes, {'cards' if profile.gpu_class else 'CPUs'}")
    for part in found.parts:
        assert may_run(nodes[part.node], model, profile, cluster)
    if profile.gpu_class is None:
        assert found.parts[0].gpus == ()
        return
    assert within_quota(model, profile, cluster)
    given_cards = [
        gpu for part in found.parts for gpu in usable(nodes[part.node], profile, cluster) if gpu.uuid in part.gpus
    ]
    assert all(len(part.gpus) == len(set(part.gpus)) == profile.gpus_per_node for part in found.parts)
    assert len(given_cards) == profile.gpus_per_node * profile.nodes
    assert len({gpu.name for gpu in given_cards}) == 1
    fabrics = {part.fabric for part in found.parts}
    assert len(fabrics) == 1
    assert (fabrics == {""}) == (profile.nodes == 1)
    if profile.nodes > 1:
        links = [f for home in homes for f in nodes[home].fabrics if f.name in fabrics]
        assert all(link.up for link in links)
        assert len(links) == profile.nodes
        assert len({link.link_layer for link in links}) == 1


@some
@given(fleets)
def test_what_can_be_placed_is_and_under_the_best_profile(drawn: tuple[spec.Model, Cluster]) -> None:
    model, cluster = drawn
    found = place(model, model.profiles, cluster)
    possible = [profile for profile in model.profiles if exists(model, profile, cluster)]
    if possible:
        assert isinstance(found, Placed)
        assert found.profile == max(possible, key=lambda profile: profile.priority)
    else:
        assert isinstance(found, Unplaced)


@some
@given(fleets)
def test_every_node_and_profile_that_was_turned_down_has_one_reason(drawn: tuple[spec.Model, Cluster]) -> None:
    model, cluster = drawn
    found = place(model, model.profiles, cluster)
    if isinstance(found, Unplaced):
        told = [(turned.node, turned.profile) for turned in found.reasons]
        names = [node.name for node in cluster.nodes] or [""]
        assert sorted(told) == sorted((name, profile.name) for name in names for profile in model.profiles)
        assert all(turned.reason for turned in found.reasons)


@some
@given(fleets, st.randoms(use_true_random=False))
def test_the_order_of_the_fleet_does_not_matter(drawn: tuple[spec.Model, Cluster], random: object) -> None:
    def mixed(items: tuple[object, ...]) -> tuple[object, ...]:
        shuffled = list(items)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        return tuple(shuffled)

    model, cluster = drawn
    nodes = tuple(replace(node, fabrics=mixed(node.fabrics)) for node in cluster.nodes)  # type: ignore[arg-type]
    other = replace(
        cluster,
        nodes=mixed(nodes),  # type: ignore[arg-type]
        models=mixed(cluster.models),  # type: ignore[arg-type]
        replicas=mixed(cluster.replicas),  # type: ignore[arg-type]
    )
    assert place(model, model.profiles, other) == place(model, model.profiles, cluster)


@some
@given(fleets)
def test_no_card_is_given_twice_however_often_is_placed(drawn: tuple[spec.Model, Cluster]) -> None:
    model, cluster = drawn
    for number in range(20):
        found = place(model, model.profiles, cluster)
        if isinstance(found, Unplaced) or found.profile.gpu_class is None:
            return
        held = [(shard.node, card) for _, shard in live(cluster) for card in shard.gpus]
        fresh = [(part.node, card) for part in found.parts for card in part.gpus]
        assert len(set(held + fresh)) == len(held) + len(fresh)
        shards = tuple(Shard(part.node, part.rank, "ready", part.cores, part.gpus) for part in found.parts)
        new = Replica(f"new{number}", "m", found.profile.name, "d", made_at=NOW, state="ready", shards=shards)
        cluster = replace(cluster, replicas=(*cluster.replicas, new))
    raise AssertionError("there are not so many cards")


@some
@given(fleets)
def test_taking_a_replica_away_never_makes_a_placement_impossible(drawn: tuple[spec.Model, Cluster]) -> None:
    model, cluster = drawn
    if isinstance(place(model, model.profiles, cluster), Placed):
        for victim in cluster.replicas:
            without = tuple(each for each in cluster.replicas if each is not victim)
            assert isinstance(place(model, model.profiles, replace(cluster, replicas=without)), Placed)
