"""The only bridge from rows to the values that passes and pages decide and print from. Its query counts are pinned."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from datetime import datetime, timedelta

import msgspec
from django.conf import settings
from django.db.models import Sum, TextField
from django.db.models.functions import Cast
from django.utils import timezone

import catalog.models
from agent import protocol
from nodes import asides, models, state
from nodes.alerts import Alert, of_claims, of_listener, of_stops
from nodes.exposure import exposed
from nodes.idle import names_to_look_up
from nodes.summary import Summary, UsageLine, summarise
from tenants import usage
from tenants.models import Team, UsageSlot

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


# Whole clusters are read on every pass and page: columns without models, and JSON read once, straight into shape.
_facts = msgspec.json.Decoder(_Facts).decode
_node_load = msgspec.json.Decoder(protocol.NodeLoad).decode
_labels = msgspec.json.Decoder(dict[str, str]).decode
_cards = msgspec.json.Decoder(tuple[str, ...]).decode
_progress = msgspec.json.Decoder(protocol.Progress).decode


class _Inventories:
    """Inventories of nodes as they were read last. Most say the same for days, and are then the same values, which
    makes comparing whole fleets cheap."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, _Facts]] = {}

    def read(self, texts: Mapping[str, str]) -> Mapping[str, _Facts]:
        """By node. Others are forgotten."""
        before, self._known = self._known, {}
        for node, text in texts.items():
            digest = hashlib.sha256(text.encode()).digest()
            known = before.get(node)
            self._known[node] = known if known and known[0] == digest else (digest, _facts(text))
        return {node: facts for node, (_, facts) in self._known.items()}


_inventories = _Inventories()


def _text(column: str) -> Cast:
    """A JSON column as its text."""
    return Cast(column, TextField())


def take(now: datetime, *, since: datetime | None = None) -> state.Cluster:
    """All that there is, in nine queries. `since`: when this control plane took the lead, if it has it."""
    nodes = settings.LLMGW.nodes
    return state.Cluster(
        nodes=tuple(_nodes()),
        models=catalog.models.Model.objects.snapshot(),
        replicas=_replicas(now),
        backoffs=tuple(
            state.Backoff(**row)
            for row in models.Backoff.objects.values(*(field.name for field in fields(state.Backoff)))
        ),
        statuses=tuple(
            state.Status(model, tuple(why for why in reasons if isinstance(why, str)), asked_at)
            for model, reasons, asked_at in models.ModelStatus.objects.values_list("model", "reasons", "demand_at")
        ),
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
    """What dashboard, API and `llmgw ctl status` print, in thirteen queries, and one more where replicas are idle."""
    now = now or timezone.now()
    cluster = take(now)
    summary = summarise(
        cluster,
        _usage_today(now),
        now,
        users=asides.users(now),
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


def _nodes() -> Iterator[state.Node]:
    columns = (
        "name",
        "state",
        "cordoned_at",
        "draining_at",
        "address",
        "disabled_engines",
        "reserved_cores",
        _text("labels"),
        _text("inventory"),
        _text("load"),
        "agent_version",
        "registered_at",
        "last_seen_at",
    )
    rows = list(models.Node.objects.values_list(*columns))
    inventories = _inventories.read({row[0]: row[8] for row in rows})
    for name, life, cordoned, draining, address, disabled, reserved, labels, _, loaded, *rest in rows:
        version, since, seen = rest
        facts, load = inventories[name], _node_load(loaded)
        free = load.disk_free_bytes
        if free is None:
            free = facts.disks[0].free_bytes if facts.disks else None
        yield state.Node(
            name=name,
            state=life,
            cordoned=cordoned is not None,
            draining=draining is not None,
            labels=tuple(sorted(_labels(labels).items())),
            address=address,
            disabled_engines=frozenset(disabled),
            reserved_cores=reserved,
            cores=facts.cpu.cores,
            memory_bytes=facts.memory_bytes,
            memory_used_bytes=load.memory_used_bytes,
            disk_free_bytes=free,
            cpu_percent=load.cpu_percent,
            load_1m=load.load_1m,
            gpus=facts.gpus,
            gpus_fault=facts.gpus_fault,
            fabrics=facts.fabrics,
            builds=facts.builds,
            files=len(facts.files),
            agent_version=version,
            registered_at=since,
            last_seen_at=seen,
        )


def _replicas(now: datetime) -> tuple[state.Replica, ...]:
    loads, shards = _loads(now), _shards()
    columns = [field.name for field in fields(state.Replica) if field.name not in ("shards", "load")]
    return tuple(
        state.Replica(**row, shards=tuple(shards.get(row["name"], ())), load=loads.get(row["name"]))
        for row in models.Replica.objects.values(*columns)
    )


def _shards() -> dict[str, list[state.Shard]]:
    """By replica, in the order of rank."""
    found: dict[str, list[state.Shard]] = defaultdict(list)
    rows = models.Shard.objects.order_by("rank").values_list(
        "replica_id", "node_id", "rank", "state", "cores", _text("gpus"), _text("progress"), "rendezvous"
    )
    for replica, node, rank, told, cores, gpus, progress, rendezvous in rows:
        note = state.in_words(_progress(progress))
        found[replica].append(state.Shard(node, rank, told, cores, _cards(gpus), note, rendezvous))
    return found


def _loads(now: datetime) -> dict[str, state.Load]:
    by_replica: dict[str, list[models.ReplicaLoad]] = defaultdict(list)
    for row in models.ReplicaLoad.objects.filter(at__gt=now - FORGOTTEN).order_by("-at", "gateway"):
        by_replica[row.replica].append(row)
    return {replica: _together(rows, now) for replica, rows in by_replica.items()}


def _together(rows: list[models.ReplicaLoad], now: datetime) -> state.Load:
    """One replica's load from what each gateway holds, newest first. A gateway gone quiet makes the sum unknown."""
    newest, oldest = rows[0], rows[-1]
    heard = now - oldest.at <= FRESH
    fresh = now - newest.at <= FRESH
    return state.Load(
        at=oldest.at,
        in_flight=sum(row.in_flight for row in rows) if heard else None,
        running=newest.running if fresh else None,
        waiting=newest.waiting if fresh else None,
        kv_used=newest.kv_used if fresh else None,
    )


def _usage_today(now: datetime) -> UsageLine:
    """From the sums of quarters of an hour: a day may have millions of requests."""
    slots = UsageSlot.objects.filter(at__gte=usage.midnight(now))
    sums = slots.aggregate(*(Sum(field.name) for field in fields(UsageLine)))
    return UsageLine(*(sums[f"{field.name}__sum"] or 0 for field in fields(UsageLine)))
