"""Whether one node can take one shard of a profile, or why not, in words that an operator acts on. Pure (ND-32).

Checked in this order: the node's state, pins and labels, engine, disk, cards, memory, cores.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.protocol import Gpu
from catalog import spec
from nodes.holdings import Used
from nodes.names import some
from nodes.state import Node, required_memory_bytes

LEAST_DISK_BYTES = 512 * 1024 * 1024
"""A node with less free gets nothing new: an engine could not even write its log."""
NAMED = 4
"""How many of a kind a reason names before it only counts them."""


Types = Mapping[str, Sequence[Gpu]]
"""Cards by their type, which is their product name: PCIe and SXM cards of one class are two."""


@dataclass(frozen=True, slots=True)
class Ask:
    """All that the place of a shard depends on of its model and profile: those that ask alike are answered alike."""

    profile: str
    engine: str
    gpu_class: str | None
    cards: int
    """Of one node."""
    nodes: int
    cores: float
    """As the profile reserves them."""
    memory_bytes: int | None
    """Of the whole replica; None: not said."""
    disk_bytes: int
    labels: tuple[tuple[str, str], ...]
    only_nodes: tuple[str, ...]


def ask_of(model: spec.Model, profile: spec.Profile) -> Ask:
    return Ask(
        profile=profile.name,
        engine=profile.engine,
        gpu_class=profile.gpu_class,
        cards=0 if profile.gpu_class is None else max(profile.gpus_per_node, 1),
        nodes=profile.nodes,
        cores=profile.reserved_cores,
        memory_bytes=required_memory_bytes(model, profile),
        disk_bytes=int((profile.min_disk_gb or 0) * 10**9),
        labels=profile.labels,
        only_nodes=profile.only_nodes,
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """A node that could take a shard. `free`: by type, the cards that it may be given; types are never mixed."""

    node: Node
    used: Used
    free: Types

    @property
    def free_cards(self) -> int:
        return sum(map(len, self.free.values()))


def situation(node: Node, used: Used) -> tuple[object, ...]:
    """All that the node's answers to asks depend on: while it stays the same, so do they."""
    return (
        node.gpus,
        used,
        node.state,
        node.cordoned,
        node.draining,
        node.disk_bytes,
        disk_free(node),
        node.builds,
        node.fabrics,
        node.labels,
        node.disabled_engines,
        node.gpus_fault,
        node.cores,
        node.reserved_cores,
        node.memory_bytes,
    )


def disk_free(node: Node) -> int | None:
    """As finely as reasons tell it: a disk that fills byte by byte is no news."""
    free = node.disk_free_bytes
    if free is None:
        return None
    return free - free % (10**8 if free >= 10**9 else 10**6)


def consider(node: Node, ask: Ask, used: Used) -> Fit | str:
    """What a shard could be given of this node, or why it cannot run there."""
    fault = _state_fault(node) or _home_fault(node, ask) or _engine_fault(node, ask.engine)
    fault = fault or _disk_fault(node, ask, used)
    if fault:
        return fault
    if ask.gpu_class is None:
        fault = _memory_fault(node, ask.memory_bytes, used) or _cores_fault(node, ask, used)
        return fault or Fit(node, used, {})
    free = _free(node, ask, used)
    fault = _cards_fault(node, ask, free, used)
    if fault:
        return fault
    roomy = _roomy(ask, free)
    if not roomy:
        return _card_memory_fault(ask, free)
    return _reserved_fault(node, ask, used) or Fit(node, used, roomy)


def cores_counted(node: Node, ask: Ask) -> float:
    """What a shard is counted with: as declared; else on CPUs half the machine, as its threads are, on cards none."""
    if ask.gpu_class is not None:
        return ask.cores
    return ask.cores or max(1, (node.cores or 0) // 2)


# --- the node --------------------------------------------------------------------------------------------------------
def _state_fault(node: Node) -> str:
    if node.state != "ready":
        return _NOT_READY[node.state]
    if node.draining:
        return f"is being drained; to use it: {UNCORDON}"
    return f"is cordoned; to use it: {UNCORDON}" if node.cordoned else ""


UNCORDON = "llmgw ctl uncordon NODE"
"""As all nodes say it; where it is told of one alone, that one is named (`reasons.told`)."""
_NOT_READY = {
    "joining": "has not registered yet; start its agent",
    "unreachable": "is unreachable; see whether the machine and its agent run",
    "lost": "is lost; start its agent again, or remove the node",
}


def _home_fault(node: Node, ask: Ask) -> str:
    pinned = ask.only_nodes
    if pinned and node.name not in pinned:
        return f"is not among only_nodes of profile {ask.profile}: {some(pinned, NAMED)}"
    if not ask.labels:
        return ""
    labels = dict(node.labels)
    for name, value in ask.labels:
        if labels.get(name) != value:
            has = f"has label {name}={labels[name]}" if name in labels else f"has no label {name}"
            return f"{has}; profile {ask.profile} asks for {name}={value}; label it so, or change the profile"
    return ""


def _engine_fault(node: Node, engine: str) -> str:
    if engine in node.disabled_engines:
        return f"has {engine} disabled; enable it for the node, or add a profile with another engine"
    builds = [build for build in node.builds if build.engine == engine]
    if any(build.usable for build in builds):
        return ""
    if builds:
        return f"cannot run {engine}: " + "; ".join(f"{build.name}: {build.reason or 'not usable'}" for build in builds)
    return f"has no build of {engine}; install one there, or add a profile with another engine"


def _disk_fault(node: Node, ask: Ask, used: Used) -> str:
    free, needed = disk_free(node), ask.disk_bytes
    if free is None:
        return f"does not say how much disk it has free, and min_disk_gb asks for {gb(needed)}" if needed else ""
    if free < LEAST_DISK_BYTES:
        return f"has only {gb(free)} of disk free; free some"
    if not needed or free - used.coming_bytes >= needed:
        return ""
    if node.disk_bytes is not None and node.disk_bytes < needed:
        has = f"has a disk of {gb(node.disk_bytes)}, and min_disk_gb asks for {gb(needed)}"
        return f"{has}; add a node with a larger one, or lower min_disk_gb"
    coming = f", of which {gb(used.coming_bytes)} are for weights on their way" if used.coming_bytes else ""
    has = f"has {gb(free)} of disk free{coming}, and min_disk_gb asks for {gb(needed)}"
    return f"{has}; free some, or lower min_disk_gb"


# --- on CPUs ---------------------------------------------------------------------------------------------------------
def _memory_fault(node: Node, needed: int | None, used: Used) -> str:
    if needed is None:
        return ""
    if node.memory_bytes is None:
        return f"does not say how much memory it has, and {gb(needed)} are required"
    free = node.memory_bytes - used.memory_bytes
    if free >= needed:
        return ""
    if node.memory_bytes < needed:
        has, step = f"has {gb(node.memory_bytes)} of memory", "add a larger node"
    else:
        has, step = f"has {gb(max(free, 0))} of memory left", "free some"
    return f"{has}, {gb(needed)} are required; {step}, or lower required_memory_gb"


def _cores_fault(node: Node, ask: Ask, used: Used) -> str:
    if ask.cores:
        return _reserved_fault(node, ask, used)
    empty = used.replicas == 0 and used.cores == 0
    if node.cores is None:
        return "" if empty else "does not say how many cores it has, and already runs a replica"
    if empty and node.cores > node.reserved_cores:
        return ""  # a small machine runs one replica, whatever it is counted with
    return _too_few_cores(node, node.cores, cores_counted(node, ask), used)


def _too_few_cores(node: Node, cores: int, needed: float, used: Used) -> str:
    free = cores - node.reserved_cores - used.cores
    if free >= needed:
        return ""
    kept = f" ({node.reserved_cores:g} are reserved)" if node.reserved_cores else ""
    left = f"has {max(free, 0):g} of {cores} cores left{kept}, {needed:g} are needed"
    step = "free some" if needed <= cores else "add a larger node"
    return f"{left}; {step}, or lower reserved_cores of the profile"


# --- on cards --------------------------------------------------------------------------------------------------------
def _free(node: Node, ask: Ask, used: Used) -> Types:
    """By type, the cards that a shard can be made of: types with enough that are free, and no slices to be joined."""
    types: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in node.gpus:
        whole = ask.cards == 1 or not gpu.slice_of
        if gpu.gpu_class == ask.gpu_class and gpu.healthy and whole and gpu.uuid not in used.cards:
            types[gpu.name].append(gpu)
    return {name: gpus for name, gpus in types.items() if len(gpus) >= ask.cards}


def _cards_fault(node: Node, ask: Ask, free: Types, used: Used) -> str:
    if node.gpus_fault:
        return f"has cards that cannot be read: {node.gpus_fault}"
    if free:
        return ""
    there = [gpu for gpu in node.gpus if gpu.gpu_class == ask.gpu_class]
    asked = ask.cards
    if not there:
        others = counted(gpu.gpu_class for gpu in node.gpus)
        return f"has no {ask.gpu_class}; it has {others or 'no cards'}"
    if asked > 1 and all(gpu.slice_of for gpu in there):
        return f"has {ask.gpu_class} only as MIG slices, which cannot be joined; {asked} are needed"
    if len(there) < asked:
        return f"needs {asked} {ask.gpu_class} and has {len(there)}; ask for fewer a node"
    faulty = [gpu for gpu in there if not gpu.healthy]
    healthy = [gpu for gpu in there if gpu.healthy]
    holders = [used.cards[gpu.uuid] for gpu in healthy if gpu.uuid in used.cards]
    loose = len(healthy) - len(holders)
    parts = [f"{count} held by {name}" for name, count in sorted(Counter(holders).items())]
    parts = [*parts[:NAMED], f"{len(parts) - NAMED} more replicas"] if len(parts) > NAMED else parts
    if faulty:
        faults = sorted({gpu.fault or "it does not say why" for gpu in faulty})
        parts.append(f"{len(faulty)} faulty ({some(faults, NAMED)})")
    if loose >= asked:  # there would be enough, were they alike
        unlike = [gpu.name for gpu in healthy if gpu.uuid not in used.cards]
        parts.append(f"the free ones are {counted(unlike)}, and one replica mixes no types")
    step = "free some" if holders else "repair them" if faulty else "ask for fewer a node"
    return f"needs {asked} {ask.gpu_class}; {loose} free of {len(there)}: {', '.join(parts)}; {step}"


def _roomy(ask: Ask, free: Types) -> Types:
    """What is left of `free` when each card must hold its even share of what the replica needs."""
    needed, count = ask.memory_bytes, ask.cards * ask.nodes
    if needed is None:
        return free
    roomy = {name: [gpu for gpu in gpus if (gpu.memory_bytes or 0) * count >= needed] for name, gpus in free.items()}
    return {name: gpus for name, gpus in roomy.items() if len(gpus) >= ask.cards}


def _card_memory_fault(ask: Ask, free: Types) -> str:
    count = ask.cards * ask.nodes
    needed = gb(ask.memory_bytes or 0)
    sizes = [gpu.memory_bytes for gpus in free.values() for gpu in gpus]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return f"does not say how much memory its {ask.gpu_class} have, and {needed} are required"
    have = f"{count} {ask.gpu_class} have {gb(count * min(known))}"
    return f"{have} of memory, {needed} are required; use more cards or a larger class"


def _reserved_fault(node: Node, ask: Ask, used: Used) -> str:
    needed = ask.cores
    if not needed:
        return ""
    if node.cores is None:
        return f"does not say how many cores it has, and reserved_cores asks for {needed:g}"
    return _too_few_cores(node, node.cores, needed, used)


def gb(size_bytes: int) -> str:
    """As the catalog asks for memory and disk."""
    return f"{size_bytes / 10**9:.1f} GB"


def counted(names: Iterable[str] | Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items()))
