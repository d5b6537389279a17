"""What replicas hold of nodes, until their shards have ended, on their way out or not. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from catalog import spec
from nodes.state import Cluster, Replica, Shard, required_memory_bytes

COMING = ("waiting", "fetching", "installing", "starting")
"""States in which the weights of a shard may still be on their way to the disk."""


@dataclass(frozen=True, slots=True)
class Used:
    """What is taken of a node. `replicas` and `memory_bytes`: by those on CPUs, which share it."""

    replicas: int = 0
    cores: float = 0
    memory_bytes: int = 0
    coming_bytes: int = 0
    """Disk that is promised to weights on their way."""
    cards: Mapping[str, str] = field(default_factory=dict)
    """By card, the replica that holds it."""


NOTHING = Used()

Resident = tuple[Replica, Shard]
Profiles = Mapping[tuple[str, str], tuple[spec.Model, spec.Profile]]
"""By the names of both."""


def in_use(cluster: Cluster) -> Mapping[str, Used]:
    """By node, what is taken of it."""
    known = profiles(cluster)
    return {node: used_by(here, known) for node, here in residents(cluster.replicas).items()}


def profiles(cluster: Cluster) -> Profiles:
    return {(model.name, profile.name): (model, profile) for model in cluster.models for profile in model.profiles}


def residents(replicas: Iterable[Replica]) -> Mapping[str, Sequence[Resident]]:
    """By node, the shards that hold something of it."""
    found: dict[str, list[Resident]] = defaultdict(list)
    for replica in replicas:
        for shard in replica.shards:
            if not shard.ended:
                found[shard.node].append((replica, shard))
    return found


def used_by(here: Iterable[Resident], known: Profiles) -> Used:
    """What these take together of the node that they are on."""
    count, cores, memory, coming = 0, 0.0, 0, 0
    cards: dict[str, str] = {}
    for replica, shard in here:
        cores += shard.cores
        told = known.get((replica.model, replica.profile))
        if told and shard.state in COMING:
            coming += int((told[1].min_disk_gb or 0) * 10**9)
        if shard.gpus:
            cards |= dict.fromkeys(shard.gpus, replica.name)
        else:
            count += 1
            memory += (required_memory_bytes(*told) or 0) if told else 0
    return Used(count, cores, memory, coming, cards)


def held_by_teams(cluster: Cluster) -> Mapping[tuple[str, str], Mapping[str, int]]:
    """By team and GPU class, how many cards each of the team's models holds; faulty ones are not counted."""
    teams = {model.name: model.team for model in cluster.models}
    classes = {(m.name, p.name): p.gpu_class or "" for m in cluster.models for p in m.profiles}
    nodes = {node.name: node for node in cluster.nodes}
    held: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for replica in cluster.replicas:
        team = teams.get(replica.model)
        for shard in replica.shards:
            if not team or shard.ended or not shard.gpus:
                continue
            known = {gpu.uuid: gpu for gpu in nodes[shard.node].gpus} if shard.node in nodes else {}
            for card in shard.gpus:
                gpu = known.get(card)
                if gpu is None:  # its node says nothing of it: it is held as long as nobody knows better
                    held[team, classes.get((replica.model, replica.profile), "")][replica.model] += 1
                elif gpu.healthy:
                    held[team, gpu.gpu_class][replica.model] += 1
    return held
