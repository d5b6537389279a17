"""What the cluster has and who holds it: cards by class, cores, and teams' shares of the cards. Pure.

A faulty card is neither used nor free. What is free where nothing new is placed is told apart from what can be had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from agent.protocol import Gpu
from nodes.holdings import NOTHING, Used, held_by_teams, in_use
from nodes.state import Cluster, Node, Replica


@dataclass(frozen=True, slots=True)
class CapacityLine:
    """Of one GPU class in cards, or of "cpu" in cores. Of cards every one is counted once."""

    gpu_class: str
    unit: str
    total: float
    used: float
    starting: float
    free: float
    closed: float
    """Free, on nodes that take nothing new: cordoned, drained, unreachable, or their cards cannot be read."""
    faulty: float
    reserved: float
    nodes: int


@dataclass(frozen=True, slots=True)
class QuotaLine:
    """The cards of one class that a team's models hold, and may hold; `allowed` None: as many as there are."""

    team: str
    gpu_class: str
    allowed: int | None
    held: int
    models: tuple[str, ...]
    """Which models hold how many: "chat 4"."""
    note: str
    """What is odd about it; empty when nothing is."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What there is and who holds it, for pages that show no more of a summary."""

    nodes: tuple[Node, ...]
    capacity: tuple[CapacityLine, ...]
    quotas: tuple[QuotaLine, ...]


def holdings(cluster: Cluster) -> Holdings:
    return Holdings(cluster.nodes, capacity(cluster.nodes, cluster.replicas, in_use(cluster)), quotas(cluster))


def capacity(nodes: Iterable[Node], replicas: Iterable[Replica], used: Mapping[str, Used]) -> tuple[CapacityLine, ...]:
    """By GPU class, then cores. Lost nodes, and those that never joined, count nowhere."""
    here = {node.name: node for node in nodes if node.state in ("ready", "unreachable")}
    serves: dict[str, dict[str, bool]] = defaultdict(dict)
    loading: dict[str, float] = defaultdict(float)
    for replica in replicas:
        ready = replica.ready_at is not None
        for shard in replica.shards:
            if shard.node in here and not shard.ended:
                serves[shard.node] |= dict.fromkeys(shard.gpus, ready)
                loading[shard.node] += 0 if ready else shard.cores
    classes: dict[str, _Tally] = defaultdict(_Tally)
    for name, node in here.items():
        held = serves.get(name, {})
        closed = is_closed(node)
        for gpu in node.gpus:
            classes[gpu.gpu_class].add(name, gpu, held.get(gpu.uuid), closed)
    lines = [tally.line(name) for name, tally in sorted(classes.items())]
    return *lines, _cores(list(here.values()), used, loading)


class _Tally:
    """Counts the cards of one class."""

    __slots__ = ("closed", "faulty", "nodes", "starting", "total", "used")

    def __init__(self) -> None:
        self.total = self.used = self.starting = self.closed = self.faulty = 0
        self.nodes: set[str] = set()

    def add(self, node: str, gpu: Gpu, serves: bool | None, closed: bool) -> None:
        """`serves`: whether the replica that holds it does yet; None: nobody holds it."""
        self.total += 1
        self.nodes.add(node)
        if not gpu.healthy:
            self.faulty += 1
        elif serves is not None:
            self.used += serves
            self.starting += not serves
        else:
            self.closed += closed

    def line(self, gpu_class: str) -> CapacityLine:
        return CapacityLine(
            gpu_class=gpu_class,
            unit="cards",
            total=self.total,
            used=self.used,
            starting=self.starting,
            free=self.total - self.used - self.starting - self.closed - self.faulty,
            closed=self.closed,
            faulty=self.faulty,
            reserved=0,
            nodes=len(self.nodes),
        )


def _cores(here: Iterable[Node], used: Mapping[str, Used], loading: Mapping[str, float]) -> CapacityLine:
    """A node that says nothing of its cores is left out: unknown is not zero."""
    total = reserved = taken = starting = free = closed = 0.0
    counted = 0
    for node in here:
        if node.cores is None:
            continue
        held = used.get(node.name, NOTHING).cores
        left = max(0.0, node.cores - node.reserved_cores - held)  # one node's surplus is not another's to use
        total, reserved, taken = total + node.cores, reserved + node.reserved_cores, taken + held
        starting += loading.get(node.name, 0)
        counted += 1
        if _takes_nothing(node):
            closed += left
        else:
            free += left
    return CapacityLine("cpu", "cores", total, taken - starting, starting, free, closed, 0, reserved, counted)


def _takes_nothing(node: Node) -> bool:
    return node.state != "ready" or node.cordoned or node.draining


def is_closed(node: Node) -> bool:
    """Whether nothing new is placed on its cards."""
    return _takes_nothing(node) or bool(node.gpus_fault)


def quotas(cluster: Cluster) -> tuple[QuotaLine, ...]:
    """Of every team that has a quota or holds cards, a line for each class (TN-6)."""
    held = held_by_teams(cluster)
    allowed = {(team, name): cards for team, of in cluster.quotas.items() for name, cards in of.items()}
    known = {gpu.gpu_class for node in cluster.nodes for gpu in node.gpus}
    return tuple(
        _quota(team, name, allowed.get((team, name)), held.get((team, name), {}), known)
        for team, name in sorted({*allowed, *held})
    )


def _quota(
    team: str, gpu_class: str, allowed: int | None, models: Mapping[str, int], known: Iterable[str]
) -> QuotaLine:
    held = sum(models.values())
    return QuotaLine(
        team=team,
        gpu_class=gpu_class,
        allowed=allowed,
        held=held,
        models=tuple(f"{name} {count}" for name, count in sorted(models.items())),
        note="; ".join(_oddities(gpu_class, allowed, held, known)),
    )


def _oddities(gpu_class: str, allowed: int | None, held: int, known: Iterable[str]) -> Iterator[str]:
    if gpu_class not in known:
        yield f"no node reports cards of class {gpu_class}"
    if allowed is not None and held > allowed:
        yield f"{held - allowed} more than it may: what runs stays, nothing new starts"
