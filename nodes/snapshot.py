"""The only bridge from rows to the values that passes and pages decide and print from. Its query counts are pinned."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta

import msgspec
from django.conf import settings
from django.db.models import Count, Q, Sum
from django.utils import timezone

import catalog.models
from agent import protocol
from nodes import models, state
from nodes.summary import Summary, UsageLine, summarise
from tenants.models import Usage

FRESH = timedelta(seconds=10)
"""Gateways report every few seconds; an older figure says nothing about now."""
FORGOTTEN = timedelta(seconds=60)
"""A gateway silent for so long is taken to be gone, and what it held with it."""


class _Facts(msgspec.Struct):
    """Of an inventory, what is decided on; its long lists are only counted."""

    cpu: protocol.Cpu = protocol.Cpu()
    memory_bytes: int | None = None
    disks: tuple[protocol.Disk, ...] = ()
    gpus: tuple[protocol.Gpu, ...] = ()
    builds: tuple[protocol.Build, ...] = ()


def take(now: datetime, *, since: datetime | None = None) -> state.Cluster:
    """All that there is, in eight queries. `since`: when this control plane took the lead, if it has it."""
    nodes = settings.LLMGW.nodes
    return state.Cluster(
        nodes=tuple(_node(row) for row in models.Node.objects.all()),
        models=catalog.models.Model.objects.snapshot(),
        replicas=_replicas(now),
        backoffs=tuple(
            state.Backoff(
                row.model, row.profile, row.profile_digest, row.failures, row.next_try_at, row.reason, row.tail
            )
            for row in models.Backoff.objects.all()
        ),
        statuses=tuple(
            state.Status(row.model, msgspec.convert(row.reasons, tuple[state.TurnedDown, ...]), row.demand_at)
            for row in models.ModelStatus.objects.all()
        ),
        rules=state.Rules(
            unreachable_after=timedelta(seconds=nodes.unreachable_after_s),
            lost_after=timedelta(seconds=nodes.lost_after_s),
            settle=timedelta(seconds=nodes.settle_s),
            drain=timedelta(seconds=nodes.drain_s),
        ),
        since=since,
    )


def current_summary(now: datetime | None = None) -> Summary:
    """What dashboard, API and `llmgw ctl status` print, in nine queries."""
    now = now or timezone.now()
    return summarise(take(now), _usage_today(now), now)


def _node(row: models.Node) -> state.Node:
    facts = msgspec.convert(row.inventory, _Facts)
    load = msgspec.convert(row.load, protocol.NodeLoad)
    free = load.disk_free_bytes
    if free is None:
        free = facts.disks[0].free_bytes if facts.disks else None
    return state.Node(
        name=row.name,
        state=msgspec.convert(row.state, state.Life),
        cordoned=row.cordoned_at is not None,
        draining=row.draining_at is not None,
        address=row.address,
        disabled_engines=frozenset(row.disabled_engines),
        reserved_cores=row.reserved_cores,
        cores=facts.cpu.cores,
        memory_bytes=facts.memory_bytes,
        memory_used_bytes=load.memory_used_bytes,
        disk_free_bytes=free,
        cpu_percent=load.cpu_percent,
        load_1m=load.load_1m,
        gpus=facts.gpus,
        builds=facts.builds,
        files=len(row.inventory.get("files", ())),
        agent_version=row.agent_version,
        registered_at=row.registered_at,
        last_seen_at=row.last_seen_at,
    )


def _replicas(now: datetime) -> tuple[state.Replica, ...]:
    loads = _loads(now)
    return tuple(
        state.Replica(
            name=row.name,
            model=row.model,
            profile=row.profile,
            profile_digest=row.profile_digest,
            made_at=row.made_at,
            engine=row.engine,
            weight=row.weight,
            wanted=msgspec.convert(row.wanted, state.Want),
            wanted_at=row.wanted_at,
            state=msgspec.convert(row.state, protocol.State),
            state_at=row.state_at,
            ready_at=row.ready_at,
            reason=row.reason,
            tail=row.tail,
            shards=tuple(_shard(shard) for shard in sorted(row.shards.all(), key=lambda shard: shard.rank)),
            load=loads.get(row.name),
        )
        for row in models.Replica.objects.prefetch_related("shards")
    )


def _shard(row: models.Shard) -> state.Shard:
    return state.Shard(
        node=row.node_id,
        rank=row.rank,
        state=msgspec.convert(row.state, protocol.State),
        cores=row.cores,
        gpus=tuple(row.gpus),
        note=state.in_words(msgspec.convert(row.progress, protocol.Progress)),
    )


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
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    sums = Usage.objects.filter(at__gte=midnight).aggregate(
        requests=Count("pk"),
        failed=Count("pk", filter=Q(status__gte=400)),
        prompt=Sum("prompt_tokens"),
        completion=Sum("completion_tokens"),
    )
    return UsageLine(sums["requests"], sums["failed"], sums["prompt"] or 0, sums["completion"] or 0)
