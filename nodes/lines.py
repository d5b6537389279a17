"""Nodes, models and replicas as lines that a person compares, for the summary and for lists of them. Pure.

`None` is unknown (shown as "-"), never zero. Thousands are made for a page, hence structs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from catalog import spec
from nodes.hardware import count_cards
from nodes.holdings import NOTHING, Used, in_use
from nodes.state import Backoff, Cluster, Node, Replica


class NodeLine(msgspec.Struct, frozen=True):
    name: str
    state: str
    cordoned: bool
    draining: bool
    address: str
    cores: int | None
    cores_used: float
    memory_bytes: int | None
    memory_used_bytes: int | None
    cpu_percent: float | None
    load_1m: float | None
    disk_free_bytes: int | None
    gpus: int
    gpus_used: int
    gpus_free: int
    """Healthy and held by no replica; faulty ones are neither used nor free."""
    gpus_faulty: int
    gpus_note: str
    """Which cards are faulty and why, or why none can be read; empty when all is well."""
    replicas: int
    files: int
    engines: tuple[str, ...]
    agent_version: str
    last_seen_at: datetime | None


class ReplicaLine(msgspec.Struct, frozen=True):
    name: str
    model: str
    profile: str
    engine: str
    node: str
    state: str
    note: str
    """Why it is not ready, or how far its start has come."""
    cards: int
    slots: int
    in_flight: int | None
    running: int | None
    waiting: int | None
    kv_used: float | None
    made_at: datetime
    ready_at: datetime | None
    tail: str


class WaitLine(msgspec.Struct, frozen=True):
    """A profile that is left alone after failures, on one node or, where `node` is empty, everywhere (ND-42)."""

    profile: str
    node: str
    failures: int
    next_try_at: datetime
    reason: str


class ModelLine(msgspec.Struct, frozen=True):
    name: str
    aliases: tuple[str, ...]
    team: str
    """Slug of the team that owns it; empty: nobody's in particular."""
    state: str
    """ready, loading, failed, cannot run, on demand, off or external."""
    wanted: int
    ready: int
    replicas: int
    slots: int
    in_flight: int | None
    waiting: int | None
    note: str
    """What a person needs to know beside the state; empty when all is well."""
    why_not: tuple[str, ...]
    """Why nodes were turned down: one line for those that say the same, naming them."""
    next_try_at: datetime | None
    waits: tuple[WaitLine, ...]
    """Where it is left alone for now, the next try first."""


def in_order(cluster: Cluster) -> list[Replica]:
    """Replicas by model and age."""
    return sorted(cluster.replicas, key=lambda replica: (replica.model, replica.made_at, replica.name))


def node_lines(cluster: Cluster, taken: Mapping[str, Used] | None = None) -> tuple[NodeLine, ...]:
    """By name. `taken`: what is in use of each, if that was counted before."""
    taken = in_use(cluster) if taken is None else taken
    places = {(replica.name, shard.node) for replica in cluster.replicas for shard in replica.shards}
    hosted = Counter([node for _, node in places])
    return tuple(
        _node(node, taken.get(node.name, NOTHING), hosted[node.name])
        for node in sorted(cluster.nodes, key=lambda node: node.name)
    )


def replica_lines(cluster: Cluster) -> tuple[ReplicaLine, ...]:
    """By model and age."""
    return tuple(_replica(replica) for replica in in_order(cluster))


def model_lines(cluster: Cluster, now: datetime) -> tuple[ModelLine, ...]:
    """In the catalog's order."""
    gone = {node.name for node in cluster.nodes if node.state == "lost"}
    lost = {each.name for each in cluster.replicas for shard in each.shards if shard.node in gone}
    mine: dict[str, list[Replica]] = defaultdict(list)
    for replica in in_order(cluster):
        mine[replica.model].append(replica)
    held: dict[str, list[Backoff]] = defaultdict(list)
    for backoff in cluster.backoffs:
        held[backoff.model].append(backoff)
    why = {status.model: status.reasons for status in cluster.statuses}
    return tuple(
        _model(model, mine[model.name], lost, held[model.name], why.get(model.name, ()), now)
        for model in cluster.models
    )


def _node(node: Node, used: Used, replicas: int) -> NodeLine:
    cards = count_cards(node.gpus, node.gpus_fault, used.cards)
    return NodeLine(
        name=node.name,
        state=node.state,
        cordoned=node.cordoned,
        draining=node.draining,
        address=node.address,
        cores=node.cores,
        cores_used=used.cores,
        memory_bytes=node.memory_bytes,
        memory_used_bytes=node.memory_used_bytes,
        cpu_percent=node.cpu_percent,
        load_1m=node.load_1m,
        disk_free_bytes=node.disk_free_bytes,
        gpus=len(node.gpus),
        gpus_used=cards.used,
        gpus_free=cards.free,
        gpus_faulty=cards.faulty,
        gpus_note=cards.note,
        replicas=replicas,
        files=node.files,
        engines=tuple(f"{build.engine} ({build.name} {build.version})" for build in node.builds if build.usable),
        agent_version=node.agent_version,
        last_seen_at=node.last_seen_at,
    )


def _replica(replica: Replica) -> ReplicaLine:
    load, shards = replica.load, replica.shards
    return ReplicaLine(
        name=replica.name,
        model=replica.model,
        profile=replica.profile,
        engine=replica.engine,
        node=", ".join([shard.node for shard in shards]),
        state=_state(replica),
        note=replica.reason or ("" if replica.state == "ready" else _progress(replica)),
        cards=sum([len(shard.gpus) for shard in shards if not shard.ended]),
        slots=replica.weight,
        in_flight=load.in_flight if load else None,
        running=load.running if load else None,
        waiting=load.waiting if load else None,
        kv_used=load.kv_used if load else None,
        made_at=replica.made_at,
        ready_at=replica.ready_at,
        tail=replica.tail,
    )


def _progress(replica: Replica) -> str:
    return "; ".join(note for note in (*(shard.note for shard in replica.shards), _ranks_that_wait(replica)) if note)


def _ranks_that_wait(replica: Replica) -> str:
    """Which of its shards are told to start only once their leader listens (ND-43)."""
    waiting = [f"{shard.rank} on {shard.node}" for shard in replica.shards if shard.state == "waiting"]
    return f"rank {', '.join(waiting)} waiting until rank 0 listens" if waiting else ""


def _state(replica: Replica) -> str:
    """What is asked of it where that is not yet what it reports."""
    if replica.wanted == "run" or replica.state in ("failed", "stopped"):
        return replica.state
    return "draining" if replica.wanted == "drain" else "stopping"


def _model(
    model: spec.Model,
    mine: list[Replica],
    lost: set[str],
    held: list[Backoff],
    reasons: tuple[str, ...],
    now: datetime,
) -> ModelLine:
    live = [each for each in mine if each.wanted == "run" and each.name not in lost]
    ready = [replica for replica in live if replica.state == "ready"]
    waiting = [each for each in held if each.next_try_at > now and (not each.node or not live)]
    state, note = _model_state(model, live, ready, waiting or ([] if live else held), reasons)
    return ModelLine(
        name=model.name,
        aliases=model.aliases,
        team=model.team,
        state=state,
        wanted=0 if state in ("off", "external") else model.scaling.min,
        ready=len(ready),
        replicas=len(mine),
        slots=sum([replica.weight for replica in ready]),
        in_flight=_sum([replica.load.in_flight if replica.load else None for replica in ready]),
        waiting=_sum([replica.load.waiting if replica.load else None for replica in ready]),
        note=note,
        why_not=reasons,
        next_try_at=min((backoff.next_try_at for backoff in waiting), default=None),
        waits=_waits(held, now),
    )


def _waits(held: Sequence[Backoff], now: datetime) -> tuple[WaitLine, ...]:
    waiting = sorted((each.next_try_at, each.profile, each.node, each) for each in held if each.next_try_at > now)
    return tuple(WaitLine(each.profile, each.node, each.failures, at, each.reason) for at, _, _, each in waiting)


def _model_state(
    model: spec.Model,
    live: list[Replica],
    ready: list[Replica],
    backoffs: list[Backoff],
    reasons: tuple[str, ...],
) -> tuple[str, str]:
    """One of ready, loading, failed, cannot run, on demand, off and external, and what to know beside it."""
    least = model.scaling.min
    if model.external is not None:
        return "external", f"served by {model.external.url}"
    if not model.profiles or (least == 0 and model.scaling.max == 0):
        return "off", ""
    short = f"{len(ready)} of {least} replicas are ready" if len(ready) < least else ""
    failure = next((backoff.reason for backoff in backoffs), "")
    if ready:
        return "ready", f"{short}: {failure}" if short and failure else short
    if failure:
        return "failed", failure
    if live:
        replica = live[-1]
        if _state(replica) in ("failed", "stopped"):
            return "failed", replica.reason or f"{replica.name} has stopped"
        return "loading", f"{replica.name} is {_state(replica)}"
    if reasons:
        return "cannot run", "no node can run it"
    return ("loading", "waits for a node") if least else ("on demand", "")


def _sum(counts: Iterable[int | None]) -> int | None:
    """Unknown as soon as one part is."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total
