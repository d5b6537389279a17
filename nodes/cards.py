"""Which of a node's free cards a tensor group gets: one NVLink domain, one NUMA node, the lowest indices. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from agent.protocol import Gpu

Clique = tuple[str, int]


def clique_of(gpu: Gpu) -> Clique | None:
    """The NVLink domain that reaches beyond its node, if it is known to be in one."""
    return (gpu.nvlink_cluster, gpu.nvlink_clique) if gpu.nvlink_cluster and gpu.nvlink_clique is not None else None


def choose(free: Sequence[Gpu], count: int, everything: Iterable[Gpu]) -> tuple[str, ...]:
    """UUIDs of `count` cards out of `free`, which holds at least as many. `everything`: all cards of the node.

    1. The NVLink domain that has enough and is left with the fewest; cards of unknown topology are in none.
    2. In it, or without one, the NUMA node that has enough and is left with the fewest.
    3. The lowest indices.
    """
    domains = _domains(everything)
    inside = _tightest(free, count, lambda gpu: domains.get(gpu.uuid))
    near = _tightest(inside, count, lambda gpu: gpu.numa)
    return tuple(gpu.uuid for gpu in sorted(near, key=_order)[:count])


def _order(gpu: Gpu) -> tuple[int, str]:
    return gpu.index, gpu.uuid


def _tightest(free: Sequence[Gpu], count: int, group_of: Callable[[Gpu], Hashable | None]) -> Sequence[Gpu]:
    """The smallest group that has enough, or all of `free` when none has. `None` is no group."""
    groups: dict[Hashable, list[Gpu]] = defaultdict(list)
    for gpu in free:
        group = group_of(gpu)
        if group is not None:
            groups[group].append(gpu)
    enough = [group for group in groups.values() if len(group) >= count]
    return min(enough, key=lambda group: (len(group), min(map(_order, group))), default=free)


def _domains(everything: Iterable[Gpu]) -> dict[str, str]:
    """By card, the name of its NVLink domain: cards that reach each other directly or through others."""
    peers: dict[str, set[str]] = {gpu.uuid: set(gpu.peers) for gpu in everything if gpu.peers is not None}
    for uuid, reached in list(peers.items()):
        for other in reached & peers.keys():
            peers[other].add(uuid)
    found: dict[str, str] = {}
    for start in sorted(peers):
        waiting = [start]
        while waiting:
            uuid = waiting.pop()
            if uuid in peers and uuid not in found:
                found[uuid] = start
                waiting += peers[uuid]
    return found
