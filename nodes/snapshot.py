"""The only bridge from rows to the values that passes and pages decide and print from. Its query counts are pinned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

import catalog.models
from agent import protocol
from llmgw.core import raw
from nodes import asides, lines, models, spend, state, totals
from nodes.alerts import Alert, of_claims, of_listener, of_stops
from nodes.exposure import exposed
from nodes.idle import names_to_look_up
from nodes.lines import ModelLine, NodeLine, ReplicaLine
from nodes.summary import Summary, summarise
from nodes.totals import Holdings, QuotaLine
from tenants.models import Team

FRESH = timedelta(seconds=20)
"""A gateway writes an unchanged figure again after 10 to 13 s; one that is older than this says nothing about now."""
FORGOTTEN = timedelta(seconds=60)
"""A gateway silent for so long is taken to be gone, and what it held with it."""


class _Facts(msgspec.Struct):
    """Of an inventory, what is decided on; its long lists are only counted."""

    cpu: protocol.Cpu = protocol.Cpu()
    memory_bytes: int | None = None
    disks: tuple[protocol.Disk, ...] = ()
    gpus: tuple[protocol.Gpu, ...] = ()
    gpus_fault: str = ""
    fabrics: tuple[protocol.Fabric, ...] = ()
    builds: tuple[protocol.Build, ...] = ()
    files: tuple[msgspec.Raw, ...] = ()


class _NodeLoad(msgspec.Struct):
    """Of what a node measures, what lists show; the readings of its cards and sensors are for its own page."""

    load_1m: float | None = None
    cpu_percent: float | None = None
    memory_used_bytes: int | None = None
    disk_free_bytes: int | None = None


_NO_DISK = protocol.Disk(path="")
# Whole clusters are read on every pass and page: columns without models, and JSON read once, straight into shape.
_facts = msgspec.json.Decoder(_Facts).decode
_node_load = msgspec.json.Decoder(_NodeLoad).decode
_labels = msgspec.json.Decoder(dict[str, str]).decode
_cards = msgspec.json.Decoder(tuple[str, ...]).decode
_progress = msgspec.json.Decoder(protocol.Progress).decode
_strings = msgspec.json.Decoder(frozenset[str]).decode


class _Inventories:
    """Inventories of nodes as they were read last. Most say the same for days, and are then the same values, which
    makes comparing whole fleets cheap."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, _Facts]] = {}

    def read(self, texts: Mapping[str, str], *, all_of_them: bool) -> Mapping[str, _Facts]:
        """By node. Where these are all, others are forgotten."""
        before = self._known
        found = {}
        for node, text in texts.items():
            known = before.get(node)
            found[node] = known if known and known[0] == text else (text, _facts(text))
        self._known = found if all_of_them else before
        return {node: facts for node, (_, facts) in found.items()}


_inventories = _Inventories()


def take(now: datetime, *, since: datetime | None = None) -> state.Cluster:
    """All that there is, in nine queries. `since`: when this control plane took the lead, if it has it."""
    nodes = settings.LLMGW.nodes
    return state.Cluster(
        nodes=tuple(_nodes(models.Node.objects.all())),
        models=catalog.models.Model.objects.snapshot(),
        replicas=_replicas(models.Replica.objects.all(), now),
        backoffs=_backoffs(models.Backoff.objects.all()),
        statuses=_statuses(models.ModelStatus.objects.all()),
        quotas=Team.objects.all().quotas(),
        rules=state.Rules(
            unreachable_after=timedelta(seconds=nodes.unreachable_after_s),
            lost_after=timedelta(seconds=nodes.lost_after_s),
            settle=timedelta(seconds=nodes.settle_s),
            drain=timedelta(seconds=nodes.drain_s),
        ),
        since=since,
    )


def current_summary(now: datetime | None = None) -> Summary:
    """What dashboard, API and `llmgw ctl status` print, in fourteen queries, and one more where replicas are idle."""
    now = now or timezone.now()
    cluster = take(now)
    usage_today, projects_today = spend.today(now)
    summary = summarise(
        cluster,
        usage_today,
        now,
        users=asides.users(now),
        projects_today=projects_today,
        currency=settings.LLMGW.usage.currency,
        used=asides.last_used(names_to_look_up(cluster)),
        certified=asides.ending(now),
    )
    listen, agents = settings.LLMGW.listen, settings.LLMGW.agents
    warning = exposed(listen.host, listen.port, join_tokens=agents.join_tokens)
    until = asides.listener_ends_at()
    return replace(
        summary,
        alerts=(
            *summary.alerts,
            *of_stops(cluster, now),
            *of_claims(asides.claims(now)),
            *(of_listener(until, now) if until else ()),
            *((Alert("warn", "agents", warning, None),) if warning else ()),
        ),
    )


# --- parts of the summary, for pages that show no more ---------------------------------------------------------------
def node_lines(name: str = "") -> tuple[NodeLine, ...]:
    """As in the summary: of every node, or the one of that name, if there is. Three queries."""
    nodes = models.Node.objects.filter(name=name) if name else models.Node.objects.all()
    replicas = _on(name) if name else models.Replica.objects.all()
    return lines.node_lines(state.Cluster(nodes=tuple(_nodes(nodes)), replicas=_replicas(replicas)))


def replica_lines(now: datetime, *, model: str = "", node: str = "", name: str = "") -> tuple[ReplicaLine, ...]:
    """As in the summary: of every replica, of a model's, of those on a node, or of one. Three queries."""
    rows = _on(node) if node else models.Replica.objects.all()
    rows = rows.filter(model=model) if model else rows
    rows = rows.filter(name=name) if name else rows
    return lines.replica_lines(state.Cluster(replicas=_replicas(rows, now)))


def model_lines(now: datetime, name: str = "") -> tuple[ModelLine, ...]:
    """As in the summary: of every model, or the one of that name, if there is. Eight queries."""
    rows, replicas = catalog.models.Model.objects.all(), models.Replica.objects.all()
    backoffs, statuses = models.Backoff.objects.all(), models.ModelStatus.objects.all()
    if name:
        rows, replicas = rows.filter(name=name), replicas.filter(model=name)
        backoffs, statuses = backoffs.filter(model=name), statuses.filter(model=name)
    lost = models.Node.objects.filter(state=models.NodeState.LOST).values_list("name", flat=True)
    cluster = state.Cluster(
        nodes=tuple(state.Node(each, state="lost") for each in lost),
        models=rows.snapshot(),
        replicas=_replicas(replicas, now),
        backoffs=_backoffs(backoffs),
        statuses=_statuses(statuses),
    )
    return lines.model_lines(cluster, now)


def holdings() -> Holdings:
    """As in the summary. Six queries."""
    return totals.holdings(
        state.Cluster(
            nodes=tuple(_nodes(models.Node.objects.all())),
            models=catalog.models.Model.objects.snapshot(),
            replicas=_replicas(models.Replica.objects.all()),
            quotas=Team.objects.all().quotas(),
        )
    )


def quota_lines(team: str) -> tuple[QuotaLine, ...]:
    """As in the summary: of one team, by its slug. Six queries."""
    of = catalog.models.Model.objects.filter(team=team)
    return totals.quotas(
        state.Cluster(
            nodes=tuple(_nodes(models.Node.objects.all())),
            models=of.snapshot(),
            replicas=_replicas(models.Replica.objects.filter(model__in=of.order_by().values("name"))),
            quotas=Team.objects.filter(slug=team).quotas(),
        )
    )


def _on(node: str) -> models.ReplicaQuerySet:
    return models.Replica.objects.filter(name__in=models.Shard.objects.filter(node=node).values("replica"))


# --- rows ------------------------------------------------------------------------------------------------------------
def _nodes(nodes: QuerySet[models.Node]) -> Iterator[state.Node]:
    columns = (
        "name",
        "state",
        "cordoned_at",
        "draining_at",
        "address",
        raw.text("disabled_engines"),
        "reserved_cores",
        raw.text("labels"),
        raw.text("inventory"),
        raw.text("load"),
        "agent_version",
        raw.text("registered_at"),
        raw.text("last_seen_at"),
    )
    rows = raw.rows(nodes.values_list(*columns))
    inventories = _inventories.read({row[0]: row[8] for row in rows}, all_of_them=not nodes.query.where)
    for name, life, cordoned, draining, address, disabled, reserved, labels, _, loaded, *rest in rows:
        version, since, seen = rest
        facts, load = inventories[name], _node_load(loaded)
        disk = facts.disks[0] if facts.disks else _NO_DISK  # the first is the one of the work directory
        free = load.disk_free_bytes
        if free is None:
            free = disk.free_bytes
        yield state.Node(
            name=name,
            state=life,
            cordoned=cordoned is not None,
            draining=draining is not None,
            labels=tuple(sorted(_labels(labels).items())),
            address=address,
            disabled_engines=_strings(disabled),
            reserved_cores=reserved,
            cores=facts.cpu.cores,
            memory_bytes=facts.memory_bytes,
            memory_used_bytes=load.memory_used_bytes,
            disk_bytes=disk.total_bytes,
            disk_free_bytes=free,
            cpu_percent=load.cpu_percent,
            load_1m=load.load_1m,
            gpus=facts.gpus,
            gpus_fault=facts.gpus_fault,
            fabrics=facts.fabrics,
            builds=facts.builds,
            files=len(facts.files),
            agent_version=version,
            registered_at=raw.moment(since) if since else None,
            last_seen_at=raw.moment(seen) if seen else None,
        )


def _replicas(rows: models.ReplicaQuerySet, now: datetime | None = None) -> tuple[state.Replica, ...]:
    """`now`: when their load is wanted."""
    loads = _loads(rows, now) if now else {}
    shards = _shards(rows)
    names = [field.name for field in fields(state.Replica) if field.name not in ("shards", "load")]
    times = [place for place, name in enumerate(names) if name.endswith("_at")]
    columns = [raw.text(name) if name.endswith("_at") else name for name in names]
    found = []
    for row in raw.rows(rows.values_list(*columns)):
        values = list(row)
        for place in times:
            values[place] = raw.moment(row[place]) if row[place] else None
        values += [tuple(shards.get(row[0], ())), loads.get(row[0])]
        found.append(state.Replica(*values))
    return tuple(found)


def _shards(replicas: models.ReplicaQuerySet) -> dict[str, list[state.Shard]]:
    """By replica, in the order of rank."""
    found: dict[str, list[state.Shard]] = defaultdict(list)
    rows = models.Shard.objects.filter(**_of(replicas)).order_by("rank")
    columns = ("replica_id", "node_id", "rank", "state", "cores", raw.text("gpus"), raw.text("progress"), "rendezvous")
    for replica, node, rank, told, cores, gpus, progress, rendezvous in raw.rows(rows.values_list(*columns)):
        note = state.in_words(_progress(progress)) if progress != "{}" else ""
        found[replica].append(state.Shard(node, rank, told, cores, _cards(gpus), note, rendezvous))
    return found


def _of(replicas: models.ReplicaQuerySet) -> dict[str, Any]:
    """The filter for rows of these replicas; none where they are all that there are."""
    return {"replica__in": replicas.order_by().values("name")} if replicas.query.where else {}


def _loads(replicas: models.ReplicaQuerySet, now: datetime) -> dict[str, state.Load]:
    rows = models.ReplicaLoad.objects.filter(at__gt=now - FORGOTTEN, **_of(replicas)).order_by("-at", "gateway")
    by_replica: dict[str, list[_Told]] = defaultdict(list)
    columns = ("replica", raw.text("at"), "in_flight", "running", "waiting", "kv_used")
    for row in raw.rows(rows.values_list(*columns)):
        by_replica[row[0]].append(row)
    return {replica: _together(told, now - FRESH) for replica, told in by_replica.items()}


_Told = tuple[Any, ...]
"""What a gateway told of a replica: its name, when, in flight through that gateway, and what it saw of the engine:
running, waiting, share of the cache."""


def _together(told: list[_Told], since: datetime) -> state.Load:
    """One replica's load from what each gateway holds, newest first. One that tells nothing since then says nothing of
    the engine, and makes the sum unknown."""
    (_, newest_at, _, running, waiting, kv_used), oldest = told[0], raw.moment(told[-1][1])
    fresh = raw.moment(newest_at) >= since
    return state.Load(
        at=oldest,
        in_flight=sum([each[2] for each in told]) if oldest >= since else None,
        running=running if fresh else None,
        waiting=waiting if fresh else None,
        kv_used=kv_used if fresh else None,
    )


def _backoffs(rows: QuerySet[models.Backoff]) -> tuple[state.Backoff, ...]:
    return tuple(state.Backoff(**row) for row in rows.values(*(field.name for field in fields(state.Backoff))))


def _statuses(rows: QuerySet[models.ModelStatus]) -> tuple[state.Status, ...]:
    return tuple(
        state.Status(model, tuple(why for why in reasons if isinstance(why, str)), asked_at)
        for model, reasons, asked_at in rows.values_list("model", "reasons", "demand_at")
    )
