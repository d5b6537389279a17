"""The cluster in one value: what dashboard, API and `llmgw ctl status` all print. Pure.

`None` is unknown (shown as "-"), never zero.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

from catalog import spec
from nodes import alerts, totals
from nodes.alerts import Alert
from nodes.hardware import count_cards
from nodes.holdings import Used, in_use
from nodes.idle import IdleLine, idle
from nodes.state import Backoff, Cluster, Node, Replica
from nodes.totals import CapacityLine, QuotaLine
from nodes.wholes import WholeLine, wholes


@dataclass(frozen=True, slots=True)
class NodeLine:
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


@dataclass(frozen=True, slots=True)
class ReplicaLine:
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


@dataclass(frozen=True, slots=True)
class WaitLine:
    """A profile that is left alone after failures, on one node or, where `node` is empty, everywhere (ND-42)."""

    profile: str
    node: str
    failures: int
    next_try_at: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class ModelLine:
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


@dataclass(frozen=True, slots=True)
class UsageLine:
    """Finished requests since midnight UTC."""

    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class UserLine:
    """What a project asked of one model in the last minutes. Requests that have not ended are not in it."""

    project_id: int
    project: str
    team: str
    model: str
    requests: int
    tokens_per_minute: float
    """Read and written; of requests that did not tell, none."""


@dataclass(frozen=True, slots=True)
class Summary:
    at: datetime
    alerts: tuple[Alert, ...]
    capacity: tuple[CapacityLine, ...]
    fabrics: tuple[WholeLine, ...]
    """Whole nodes that are free, for replicas that span nodes."""
    quotas: tuple[QuotaLine, ...]
    users: tuple[UserLine, ...]
    """Who has used the cluster in the last five minutes, and what they run."""
    idle: tuple[IdleLine, ...]
    """Replicas holding hardware that nobody asks for."""
    nodes: tuple[NodeLine, ...]
    models: tuple[ModelLine, ...]
    replicas: tuple[ReplicaLine, ...]
    usage_today: UsageLine


def summarise(
    cluster: Cluster,
    usage_today: UsageLine,
    now: datetime,
    *,
    users: tuple[UserLine, ...] = (),
    used: Mapping[str, datetime] = MappingProxyType({}),
    certified: Sequence[alerts.Certified] = (),
) -> Summary:
    """The lines that a person reads, in a settled order: nodes and models by name, replicas by model and age. `used`:
    when requests for models last ended."""
    taken = in_use(cluster)
    replicas = sorted(cluster.replicas, key=lambda replica: (replica.model, replica.made_at, replica.name))
    lost = {node.name for node in cluster.nodes if node.state == "lost"}
    hosted = Counter(node for replica in replicas for node in {shard.node for shard in replica.shards})
    by_model: dict[str, list[Replica]] = defaultdict(list)
    for replica in replicas:
        by_model[replica.model].append(replica)
    held: dict[str, list[Backoff]] = defaultdict(list)
    for backoff in cluster.backoffs:
        held[backoff.model].append(backoff)
    why = {status.model: status.reasons for status in cluster.statuses}
    models = tuple(
        _model(model, by_model[model.name], lost, held[model.name], why.get(model.name, ()), now)
        for model in cluster.models
    )
    nodes = sorted(cluster.nodes, key=lambda node: node.name)
    held_cards: dict[str, set[str]] = defaultdict(set)
    for replica in replicas:
        for shard in replica.shards:
            if not shard.ended:
                held_cards[shard.node].update(shard.gpus)
    return Summary(
        at=now,
        alerts=(
            *alerts.of_nodes(nodes),
            *_model_alerts(models, held),
            *alerts.of_teams(cluster),
            *alerts.of_certificates(certified, now),
        ),
        capacity=totals.capacity(nodes, replicas, taken),
        fabrics=wholes(nodes, held_cards),
        quotas=totals.quotas(cluster),
        users=users,
        idle=idle(cluster, used, now),
        nodes=tuple(
            _node(node, taken.get(node.name, Used()), hosted[node.name], held_cards[node.name]) for node in nodes
        ),
        models=models,
        replicas=tuple(_replica(replica) for replica in replicas),
        usage_today=usage_today,
    )


def _node(node: Node, used: Used, replicas: int, held: Collection[str]) -> NodeLine:
    cards = count_cards(node.gpus, node.gpus_fault, held)
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
    load = replica.load
    progress = "; ".join(
        note for note in (*(shard.note for shard in replica.shards), _ranks_that_wait(replica)) if note
    )
    return ReplicaLine(
        name=replica.name,
        model=replica.model,
        profile=replica.profile,
        engine=replica.engine,
        node=", ".join(shard.node for shard in replica.shards),
        state=_state(replica),
        note=replica.reason or ("" if replica.state == "ready" else progress),
        cards=sum(len(shard.gpus) for shard in replica.shards if not shard.ended),
        slots=replica.weight,
        in_flight=load.in_flight if load else None,
        running=load.running if load else None,
        waiting=load.waiting if load else None,
        kv_used=load.kv_used if load else None,
        made_at=replica.made_at,
        ready_at=replica.ready_at,
        tail=replica.tail,
    )


def _ranks_that_wait(replica: Replica) -> str:
    """Which of its shards are told to start only once their leader listens (ND-43)."""
    waiting = [f"{shard.rank} on {shard.node}" for shard in replica.shards if shard.state == "waiting"]
    return f"rank {', '.join(waiting)} waiting until rank 0 listens" if waiting else ""


def _state(replica: Replica) -> str:
    """What is asked of it where that is not yet what it reports."""
    if replica.state in ("failed", "stopped"):
        return replica.state
    return {"run": replica.state, "drain": "draining", "stop": "stopping"}[replica.wanted]


def _model(
    model: spec.Model,
    mine: list[Replica],
    lost: set[str],
    held: list[Backoff],
    reasons: tuple[str, ...],
    now: datetime,
) -> ModelLine:
    live = [r for r in mine if r.wanted == "run" and not lost.intersection(shard.node for shard in r.shards)]
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
        slots=sum(replica.weight for replica in ready),
        in_flight=_sum(replica.load.in_flight if replica.load else None for replica in ready),
        waiting=_sum(replica.load.waiting if replica.load else None for replica in ready),
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


def _model_alerts(models: Iterable[ModelLine], held: Mapping[str, list[Backoff]]) -> tuple[Alert, ...]:
    found = []
    for line in models:
        if line.state == "failed":
            failures = max((backoff.failures for backoff in held.get(line.name, ())), default=1)
            text = f"{line.name} does not start ({failures} in a row): {line.note}"
            found.append(Alert("failed", line.name, text, line.next_try_at))
        elif line.state == "cannot run":
            found.append(Alert("failed", line.name, f"{line.name} finds no place: {line.why_not[0]}", None))
        elif line.note and line.state == "ready":
            found.append(Alert("warn", line.name, f"{line.name}: {line.note}", None))
    return tuple(found)
