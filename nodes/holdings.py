"""What replicas hold of nodes, until their shards have ended, on their way out or not. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from catalog import spec
from nodes.state import Cluster, Shard, required_memory_bytes

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


NOTHING = Used()


@dataclass(frozen=True, slots=True)
class Holdings:
    used: Mapping[str, Used]
    """By node."""
    cards: Mapping[tuple[str, str], str]
    """By node and card, the replica that holds it."""
    teams: Mapping[tuple[str, str], Mapping[str, int]]
    """By team and GPU class, how many cards each of the team's models holds; faulty ones are not counted."""


def holdings(cluster: Cluster) -> Holdings:
    cards = {
        (shard.node, card): replica.name
        for replica in cluster.replicas
        for shard in replica.shards
        if not shard.ended
        for card in shard.gpus
    }
    return Holdings(in_use(cluster), cards, held_by_teams(cluster) if any(cluster.quotas.values()) else {})


def in_use(cluster: Cluster) -> Mapping[str, Used]:
    """By node, what is taken of it."""
    profiles = {(model.name, profile.name): (model, profile) for model in cluster.models for profile in model.profiles}
    used: dict[str, Used] = defaultdict(Used)
    for replica in cluster.replicas:
        for shard in replica.shards:
            if not shard.ended:
                used[shard.node] = _with(used[shard.node], shard, profiles.get((replica.model, replica.profile)))
    return used


def _with(before: Used, shard: Shard, known: tuple[spec.Model, spec.Profile] | None) -> Used:
    on_cpus = not shard.gpus
    memory = required_memory_bytes(*known) or 0 if known and on_cpus else 0
    coming = int((known[1].min_disk_gb or 0) * 10**9) if known and shard.state in COMING else 0
    return Used(
        replicas=before.replicas + on_cpus,
        cores=before.cores + shard.cores,
        memory_bytes=before.memory_bytes + memory,
        coming_bytes=before.coming_bytes + coming,
    )


def held_by_teams(cluster: Cluster) -> Mapping[tuple[str, str], Mapping[str, int]]:
    """By team and GPU class, how many cards each of the team's models holds."""
    teams = {model.name: model.team for model in cluster.models}
    classes = {(m.name, p.name): p.gpu_class or "" for m in cluster.models for p in m.profiles}
    known = {(node.name, gpu.uuid): gpu for node in cluster.nodes for gpu in node.gpus}
    held: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for replica in cluster.replicas:
        team = teams.get(replica.model)
        for shard in replica.shards:
            if not team or shard.ended:
                continue
            for card in shard.gpus:
                gpu = known.get((shard.node, card))
                if gpu is None:  # its node says nothing of it: it is held as long as nobody knows better
                    held[team, classes.get((replica.model, replica.profile), "")][replica.model] += 1
                elif gpu.healthy:
                    held[team, gpu.gpu_class][replica.model] += 1
    return held
