"""The gateway's edge to the store: what its loops read and write, never a request. Runs in threads of its own."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import msgspec
from django.db import DataError, IntegrityError, connection, connections, transaction

from catalog.models import Model
from llmgw.core.clock import Clock
from llmgw.core.models import Revision, Secret
from llmgw.core.store_clock import STORE_CLOCK
from nodes.actions import note_demand
from nodes.engine_keys import SECRET_NAME
from nodes.models import Backoff, Replica, ReplicaLoad
from routing.shapes import Record
from routing.table import Contents, Failing
from tenants import rollup
from tenants.limit_models import Price
from tenants.limits import Budget
from tenants.models import Key, Project, Usage, User

log = logging.getLogger(__name__)

UNFIT = (DataError, OverflowError, ValueError)
"""What the database, or the library in front of it, says of a value that no column takes."""
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

    def spent(self, budgets: Sequence[Budget]) -> dict[int, tuple[float, int]]: ...

    def save_usage(self, records: Sequence[Record]) -> None: ...

    def save_demand(self, models: Sequence[str], cold: bool) -> None: ...

    def save_key_use(self, used: dict[int, float]) -> None: ...

    def save_loads(self, gateway: str, rows: Sequence[LoadRow]) -> None: ...

    def forget_loads(self, gateway: str) -> None: ...

    def close(self) -> None: ...


class DjangoStore:
    """`clock` dates what all gateways compare: the store's own time, so that one whose clock is off harms no other."""

    def __init__(self, clock: Clock = STORE_CLOCK) -> None:
        self.clock = clock

    def revision(self) -> int:
        _reconnect()
        return Revision.current()

    def contents(self) -> Contents:
        """The revision is read first: a change in between is then seen again, never missed."""
        _reconnect()
        revision = Revision.current()
        return Contents(
            revision=revision,
            grants=Key.objects.snapshot(),
            models=Model.objects.snapshot(),
            endpoints=Replica.objects.all().endpoints(),
            engine_secret=Secret.named(SECRET_NAME),
            failing=tuple(
                Failing(model, reason, next_try_at.timestamp())
                for model, reason, next_try_at in Backoff.objects.values_list("model", "reason", "next_try_at")
            ),
            prices=Price.objects.snapshot(),
        )

    def spent(self, budgets: Sequence[Budget]) -> dict[int, tuple[float, int]]:
        """Per budget when its current period began, epoch seconds, and what was used since."""
        _reconnect()
        return rollup.spent(budgets, time.time())

    def save_demand(self, models: Sequence[str], cold: bool) -> None:
        """On-demand models that are asked for; `cold`: one of them has no replica yet."""
        _reconnect()
        note_demand(models, cold=cold, now=self.clock.now())

    def save_usage(self, records: Sequence[Record]) -> None:
        _reconnect()
        try:
            _insert_new(records)
        except (IntegrityError, *UNFIT):
            # A project, key or person was deleted meanwhile: what was used stays counted without them. Or a record
            # does not fit any column, and must not keep all others out for ever.
            _insert_what_fits(records)

    def save_key_use(self, used: dict[int, float]) -> None:
        """When each key was last used, epoch seconds."""
        _reconnect()
        with transaction.atomic():
            for key_id, at in sorted(used.items()):
                Key.objects.filter(pk=key_id).update(last_used_at=datetime.fromtimestamp(at, UTC))

    def save_loads(self, gateway: str, rows: Sequence[LoadRow]) -> None:
        _reconnect()
        now = self.clock.now()
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
        _reconnect()
        ReplicaLoad.objects.filter(gateway=gateway).delete()

    def close(self) -> None:
        """Called in each thread that used the store, at its end."""
        connections.close_all()


def gateway_name(pid: int) -> str:
    """Names this process among all gateways."""
    return f"{socket.gethostname()[:80]}:{pid}"


def _reconnect() -> None:
    """Drop this thread's connection when it broke; a good one is kept, whatever its age."""
    if connection.connection is not None and (connection.errors_occurred or not connection.is_usable()):
        connection.close()


_COLUMN_OF = {field.name: str(field.column) for field in Usage._meta.concrete_fields}
_COLUMNS = tuple(_COLUMN_OF[name] for name in Record.__struct_fields__)
_encode = msgspec.json.Encoder().encode
_AT, _EXPLAINED = (Record.__struct_fields__.index(name) for name in ("at", "explained"))
ASKED_AT_ONCE = 500
AT_ONCE = 50
"""Rows a statement: one call into the database's library for all of them, which leaves the event loop alone."""


def _statement(rows: int) -> str:
    values = "({})".format(", ".join(["%s"] * len(_COLUMNS)))
    table = Usage._meta.db_table
    return f"INSERT INTO {table} ({', '.join(_COLUMNS)}) VALUES {', '.join([values] * rows)} ON CONFLICT DO NOTHING"  # noqa: S608  names of our own columns


_MANY, _ONE = _statement(AT_ONCE), _statement(1)


def _moments() -> Callable[[float], Any]:
    """How the database takes epoch seconds; for SQLite a text, whose seconds many records in a row share."""
    if connection.vendor != "sqlite":
        return lambda at: datetime.fromtimestamp(at, UTC)
    last, text = -1, ""

    def moment(at: float) -> str:
        nonlocal last, text
        micros = round(at * 1e6)
        second, rest = divmod(micros, 1_000_000)
        if second != last:
            last, text = second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M:%S")
        return f"{text}.{rest:06}" if rest else text

    return moment


class AlreadyThere(Exception):
    """An earlier process, or an attempt whose outcome was unknown, brought some of the records there."""


def _insert_new(records: Sequence[Record]) -> None:
    """In one transaction, without those that are there."""
    for last in (False, False, True):
        try:
            with transaction.atomic():
                _insert(records)
            return
        except AlreadyThere:
            if last:
                raise
            records = _new(records)


def _insert(records: Sequence[Record]) -> None:
    """Usage rows and what they add to the sums, without model instances, whose making is most of what a bulk_create
    costs. Raises AlreadyThere when a request id is."""
    moment, inserted = _moments(), 0
    whole = len(records) - len(records) % AT_ONCE
    with connection.cursor() as cursor:
        for statement, rows, first, end in ((_MANY, AT_ONCE, 0, whole), (_ONE, 1, whole, len(records))):
            if first < end:
                groups = [_values(records[at : at + rows], moment) for at in range(first, end, rows)]
                cursor.executemany(statement, groups)
                inserted += cursor.rowcount
    if inserted != len(records):
        raise AlreadyThere
    rollup.add(records)


def _values(records: Sequence[Record], moment: Callable[[float], Any]) -> list[Any]:
    """Of all their columns, one after the other: a list a row would only keep the garbage collector busy."""
    values: list[Any] = []
    for record in records:
        row = len(values)
        values += msgspec.structs.astuple(record)
        values[row + _AT] = moment(record.at)
        if record.explained is not None:
            # PostgreSQL takes no NUL in JSON, which may stand in a name that a client wrote.
            values[row + _EXPLAINED] = _encode(record.explained).decode().replace("\\u0000", "\\ufffd")
    return values


def _new(records: Sequence[Record]) -> list[Record]:
    there: set[str] = set()
    for at in range(0, len(records), ASKED_AT_ONCE):
        ids = [each.request_id for each in records[at : at + ASKED_AT_ONCE]]
        there.update(Usage.objects.filter(request_id__in=ids).values_list("request_id", flat=True))
    return list({each.request_id: each for each in records if each.request_id not in there}.values())


def _insert_what_fits(records: Sequence[Record]) -> None:
    try:
        _insert_new(_without_the_gone(records))
    except UNFIT as error:
        if len(records) == 1 and records[0].explained is not None:
            _insert_what_fits([msgspec.structs.replace(records[0], explained=None)])
            return
        if len(records) == 1:
            log.error("The store cannot hold the usage of this request (%s), which is left out: %r", error, records[0])
            return
        middle = len(records) // 2
        _insert_what_fits(records[:middle])
        _insert_what_fits(records[middle:])


def _without_the_gone(records: Iterable[Record]) -> list[Record]:
    records = list(records)
    projects = set(Project.objects.filter(pk__in={each.project for each in records}).values_list("pk", flat=True))
    keys = set(Key.objects.filter(pk__in={each.key for each in records}).values_list("pk", flat=True))
    users = set(User.objects.filter(pk__in={each.user for each in records}).values_list("pk", flat=True))
    return [
        msgspec.structs.replace(
            each,
            project=each.project if each.project in projects else None,
            key=each.key if each.key in keys else None,
            user=each.user if each.user in users else None,
        )
        for each in records
    ]
