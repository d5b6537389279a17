"""Where a new replica goes, or why it goes nowhere: filter every node, then score what is left. Pure (ND-30, ND-32)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from catalog import spec
from nodes.state import Cluster, Node, TurnedDown, required_memory_bytes

LEAST_DISK_BYTES = 512 * 1024 * 1024
"""A node with less free gets nothing new: an engine could not even write its log."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a shard gets: a node, the cores it is counted with, and cards."""

    node: str
    rank: int = 0
    cores: float = 0
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    profile: spec.Profile
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Unplaced:
    """One reason for every profile on every node."""

    reasons: tuple[TurnedDown, ...]


@dataclass(frozen=True, slots=True)
class Used:
    """What CPU replicas already hold of a node."""

    replicas: int = 0
    cores: float = 0
    memory_bytes: int = 0


def place(model: spec.Model, candidates: Sequence[spec.Profile], cluster: Cluster) -> Placed | Unplaced:
    """The first of `candidates`, by priority, that fits somewhere. The answer does not depend on the nodes' order."""
    used = in_use(cluster)
    nodes = sorted(cluster.nodes, key=lambda node: node.name)
    reasons: list[TurnedDown] = []
    for profile in by_priority(candidates):
        fitting: list[tuple[Node, Part]] = []
        for node in nodes:
            answer = _consider(node, model, profile, used.get(node.name, Used()))
            if isinstance(answer, Part):
                fitting.append((node, answer))
            else:
                reasons.append(TurnedDown(node.name, profile.name, answer))
        if fitting:
            _, part = min(fitting, key=lambda pair: _spread(pair[0], used.get(pair[0].name, Used())))
            return Placed(profile, (part,))
        if not nodes:
            reasons.append(TurnedDown("", profile.name, NO_NODE))
    return Unplaced(tuple(reasons))


NO_NODE = "no node has joined yet; add one with `llmgw ctl node-token NAME`"


def by_priority(profiles: Sequence[spec.Profile]) -> list[spec.Profile]:
    """The highest first; those of equal priority in the order in which they were declared."""
    return sorted(profiles, key=lambda profile: -profile.priority)


def in_use(cluster: Cluster) -> Mapping[str, Used]:
    """By node, what replicas on CPUs hold until their shards have ended, on their way out or not."""
    needs = {
        (model.name, profile.name): required_memory_bytes(model, profile) or 0
        for model in cluster.models
        for profile in model.profiles
    }
    used: dict[str, Used] = defaultdict(Used)
    for replica in cluster.replicas:
        for shard in replica.shards:
            if shard.ended or shard.gpus:
                continue
            before = used[shard.node]
            used[shard.node] = Used(
                replicas=before.replicas + 1,
                cores=before.cores + shard.cores,
                memory_bytes=before.memory_bytes + needs.get((replica.model, replica.profile), 0),
            )
    return used


def cores_counted(node: Node, profile: spec.Profile) -> float:
    """What one CPU replica is counted with: as declared, else half the machine, as its threads are."""
    return profile.reserved_cores or max(1, (node.cores or 0) // 2)


def _consider(node: Node, model: spec.Model, profile: spec.Profile, used: Used) -> Part | str:
    """The part that this node would run, or why it cannot."""
    if node.state != "ready":
        return _NOT_READY[node.state]
    if node.draining:
        return "is being drained"
    if node.cordoned:
        return "is cordoned"
    if profile.gpu_class is not None or profile.nodes > 1:
        return f"profile {profile.name} asks for cards; this version places replicas on CPUs only"
    return (
        _engine_fault(node, profile.engine)
        or _memory_fault(node, required_memory_bytes(model, profile), used)
        or _disk_fault(node)
        or _cores_fault(node, cores_counted(node, profile), used)
        or Part(node.name, cores=cores_counted(node, profile))
    )


_NOT_READY = {
    "joining": "has not registered yet",
    "unreachable": "is unreachable",
    "lost": "is lost",
}


def _engine_fault(node: Node, engine: str) -> str:
    if engine in node.disabled_engines:
        return f"has {engine} disabled"
    builds = [build for build in node.builds if build.engine == engine]
    if any(build.usable for build in builds):
        return ""
    if builds:
        return f"cannot run {engine}: " + "; ".join(f"{build.name}: {build.reason or 'not usable'}" for build in builds)
    return f"has no build of {engine}"


def _memory_fault(node: Node, needed: int | None, used: Used) -> str:
    if needed is None:
        return ""
    if node.memory_bytes is None:
        return f"does not say how much memory it has, and {_gb(needed)} are required"
    free = node.memory_bytes - used.memory_bytes
    return f"has {_gb(max(free, 0))} of memory left, {_gb(needed)} are required" if free < needed else ""


def _disk_fault(node: Node) -> str:
    if node.disk_free_bytes is None or node.disk_free_bytes >= LEAST_DISK_BYTES:
        return ""
    return f"has only {node.disk_free_bytes // 10**6} MB of disk free; free some"


def _cores_fault(node: Node, needed: float, used: Used) -> str:
    if used.replicas == 0:
        return ""  # a small machine runs one replica, whatever it is counted with
    if node.cores is None:
        return "does not say how many cores it has, and already runs a replica"
    free = node.cores - node.reserved_cores - used.cores
    return f"has {max(free, 0):g} of {node.cores} cores left, {needed:g} are needed" if free < needed else ""


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 10**9:.1f} GB"


def _spread(node: Node, used: Used) -> tuple[float, float, str]:
    """Most free cores first, then most free memory: nothing else keeps two CPU replicas off the same cores."""
    free_cores = (node.cores or 0) - node.reserved_cores - used.cores
    return -free_cores, used.memory_bytes - (node.memory_bytes or 0), node.name
