"""The gateway's edge to the store: what its loops read and write, never a request. Runs in threads of its own."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

from django.db import IntegrityError, close_old_connections, connections, transaction
from django.utils import timezone

from catalog.models import Model
from llmgw.core.models import Revision, Secret
from nodes.engine_keys import SECRET_NAME
from nodes.models import Replica, ReplicaLoad
from routing.journal import Record
from routing.table import Contents
from tenants.models import Key, Project, Usage, User, store_usage

LOADS_KEPT = timedelta(minutes=10)
"""Load rows of gateways that are gone are removed after this."""


@dataclass(frozen=True, slots=True)
class LoadRow:
    replica: str
    in_flight: int
    running: int | None
    waiting: int | None
    kv_used: float | None


class Store(Protocol):
    """The seam between the data plane and the database."""

    def revision(self) -> int: ...

    def contents(self) -> Contents: ...

    def save_usage(self, records: Sequence[Record]) -> None: ...

    def save_key_use(self, used: dict[int, float]) -> None: ...

    def save_loads(self, gateway: str, rows: Sequence[LoadRow]) -> None: ...

    def forget_loads(self, gateway: str) -> None: ...

    def close(self) -> None: ...


class DjangoStore:
    def revision(self) -> int:
        close_old_connections()
        return Revision.current()

    def contents(self) -> Contents:
        """The revision is read first: a change in between is then seen again, never missed."""
        close_old_connections()
        revision = Revision.current()
        return Contents(
            revision=revision,
            grants=Key.objects.snapshot(),
            models=Model.objects.snapshot(),
            endpoints=Replica.objects.all().endpoints(),
            engine_secret=Secret.named(SECRET_NAME),
        )

    def save_usage(self, records: Sequence[Record]) -> None:
        close_old_connections()
        rows = [_row(record) for record in records]
        try:
            with transaction.atomic():
                store_usage(rows)
        except IntegrityError:
            # A project, key or person was deleted meanwhile; what was used stays counted without them.
            with transaction.atomic():
                store_usage(_without_the_gone(rows))

    def save_key_use(self, used: dict[int, float]) -> None:
        """When each key was last used, epoch seconds."""
        close_old_connections()
        with transaction.atomic():
            for key_id, at in sorted(used.items()):
                Key.objects.filter(pk=key_id).update(last_used_at=datetime.fromtimestamp(at, UTC))

    def save_loads(self, gateway: str, rows: Sequence[LoadRow]) -> None:
        close_old_connections()
        now = timezone.now()
        ReplicaLoad.objects.bulk_create(
            [
                ReplicaLoad(
                    gateway=gateway,
                    replica=row.replica,
                    in_flight=row.in_flight,
                    running=row.running,
                    waiting=row.waiting,
                    kv_used=row.kv_used,
                    at=now,
                )
                for row in rows
            ],
            update_conflicts=True,
            unique_fields=["gateway", "replica"],
            update_fields=["in_flight", "running", "waiting", "kv_used", "at"],
        )
        ReplicaLoad.objects.filter(at__lt=now - LOADS_KEPT).delete()

    def forget_loads(self, gateway: str) -> None:
        close_old_connections()
        ReplicaLoad.objects.filter(gateway=gateway).delete()

    def close(self) -> None:
        """Called in each thread that used the store, at its end."""
        connections.close_all()


def gateway_name(pid: int) -> str:
    """Names this process among all gateways."""
    return f"{socket.gethostname()[:80]}:{pid}"


def _row(record: Record) -> Usage:
    return Usage(
        request_id=record.request_id,
        at=datetime.fromtimestamp(record.at, UTC),
        project_id=record.project,
        key_id=record.key,
        user_id=record.user,
        route=record.route[:60],
        model=record.model[:200],
        replica=record.replica[:120],
        node=record.node[:120],
        status=record.status,
        error_code=record.error_code,
        streamed=record.streamed,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        reasoning_tokens=record.reasoning_tokens,
        estimated=record.estimated,
        queue_ms=record.queue_ms,
        first_token_ms=record.first_token_ms,
        total_ms=record.total_ms,
    )


def _without_the_gone(rows: Iterable[Usage]) -> list[Usage]:
    rows = list(rows)
    projects = set(Project.objects.filter(pk__in={row.project_id for row in rows}).values_list("pk", flat=True))
    keys = set(Key.objects.filter(pk__in={row.key_id for row in rows}).values_list("pk", flat=True))
    users = set(User.objects.filter(pk__in={row.user_id for row in rows}).values_list("pk", flat=True))
    for row in rows:
        row.project_id = row.project_id if row.project_id in projects else None
        row.key_id = row.key_id if row.key_id in keys else None
        row.user_id = row.user_id if row.user_id in users else None
    return rows
