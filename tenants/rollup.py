"""Sums of usage by quarters of an hour: written with the usage rows themselves, read for budgets and long ranges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from django.db import connection
from django.db.models import F, Q, QuerySet, Sum

from tenants.limit_models import UsageSlot
from tenants.limits import Budget, Subject
from tenants.models import Project
from tenants.periods import bounds
from tenants.usage import FAILED_FROM

SLOT_S = 900
NAMED_AT_ONCE = 500
"""Up to so many projects and keys are asked for by number; beyond that all are summed, and who matters is picked."""


class Counted(Protocol):
    """A finished request, as routing.journal.Record has it. None is unknown and adds nothing."""

    @property
    def at(self) -> float: ...
    @property
    def project(self) -> int | None: ...
    @property
    def key(self) -> int | None: ...
    @property
    def user(self) -> int | None: ...
    @property
    def model(self) -> str: ...
    @property
    def adapter(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def cached_tokens(self) -> int | None: ...
    @property
    def completion_tokens(self) -> int | None: ...
    @property
    def cost(self) -> int | None: ...


# --- writing ---------------------------------------------------------------------------------------------------------
_NAMES = ("at", "project", "key", "user", "model", "adapter")
_SUMS = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "cost", "unpriced")


def _statement() -> str:
    table = f'"{UsageSlot._meta.db_table}"'
    columns = ", ".join(f'"{name}"' for name in _NAMES + _SUMS)
    values = ", ".join(["%s"] * len(_NAMES + _SUMS))
    unique = ", ".join(f'"{name}"' for name in _NAMES)
    sums = ", ".join(f'"{name}" = {table}."{name}" + excluded."{name}"' for name in _SUMS)
    return f"INSERT INTO {table} ({columns}) VALUES ({values}) ON CONFLICT ({unique}) DO UPDATE SET {sums}"  # noqa: S608  names of our own columns


_UPSERT = _statement()


def add(rows: Iterable[Counted]) -> None:
    """Count requests; call in the transaction that inserts their usage rows, with those that were really inserted.

    One statement a distinct slot, all in one call into the database's library, and in the same order everywhere: so
    gateways that write at once wait for each other and never for ever.
    """
    sums: dict[tuple[int, int, int, int, str, str], list[int]] = {}
    for row in rows:
        # To the microsecond first, as the rows say it: whoever looks for one looks in its very quarter.
        quarter = round(row.at * 1e6) // (SLOT_S * 1_000_000)
        name = (quarter, row.project or 0, row.key or 0, row.user or 0, row.model, row.adapter)
        found = sums.get(name)
        if found is None:
            found = sums[name] = [0, 0, 0, 0, 0, 0, 0]
        found[0] += 1
        if row.status >= FAILED_FROM:
            found[1] += 1
        found[2] += row.prompt_tokens or 0
        found[3] += row.cached_tokens or 0
        found[4] += row.completion_tokens or 0
        if row.cost is not None:
            found[5] += row.cost
        elif row.prompt_tokens is not None or row.completion_tokens is not None:
            found[6] += 1  # one that was refused used nothing that a price could be for
    if not sums:
        return
    moment = connection.ops.adapt_datetimefield_value
    values = [
        (moment(datetime.fromtimestamp(name[0] * SLOT_S, UTC)), *name[1:], *found)
        for name, found in sorted(sums.items())
    ]
    with connection.cursor() as cursor:
        cursor.executemany(_UPSERT, values)


# --- reading ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Spent:
    """What a budget's current period holds. `amount` in the budget's unit; `unpriced` of `requests` cost nothing."""

    start: float
    amount: int = 0
    requests: int = 0
    unpriced: int = 0


def spent(budgets: Iterable[Budget], now: float) -> dict[int, tuple[float, int]]:
    """Per budget: when its current period began, and what was used since, in its unit. Queries as `standing`."""
    return {number: (each.start, each.amount) for number, each in standing(budgets, now).items()}


def standing(budgets: Iterable[Budget], now: float) -> dict[int, Spent]:
    """What each budget's current period holds so far. Everything counts that was recorded, failed requests too.

    One query for each instant at which periods began (one time zone has at most four), and one for the tree, however
    many budgets there are.
    """
    by_start: dict[float, list[Budget]] = defaultdict(list)
    for budget in budgets:
        by_start[bounds(budget.period, budget.time_zone, now)[0]].append(budget)
    if not by_start:
        return {}
    above: dict[int, dict[Subject, int]] = {
        project: {"organisation": organisation, "team": team, "project": project}
        for project, team, organisation in Project.objects.values_list("pk", "team_id", "team__organisation_id")
    }
    found: dict[int, Spent] = {}
    for start, group in by_start.items():
        wanted = {(budget.subject, budget.subject_id) for budget in group}
        sums = _sums_since(start, wanted, above)
        for budget in group:
            tokens, cost, requests, unpriced = sums.get((budget.subject, budget.subject_id), _NOTHING)
            amount = cost if budget.unit == "money" else tokens
            found[budget.budget_id] = Spent(start, amount, requests, unpriced)
    return found


_Sums = tuple[int, int, int, int]
_NOTHING: _Sums = (0, 0, 0, 0)


def _sums_since(
    start: float, wanted: set[tuple[Subject, int]], above: dict[int, dict[Subject, int]]
) -> dict[tuple[Subject, int], _Sums]:
    """Tokens, cost, requests and those without a price, of each of `wanted`. One query."""
    keys = [number for subject, number in wanted if subject == "key"]
    projects = [project for project, over in above.items() if not wanted.isdisjoint(over.items())]
    rows: QuerySet[UsageSlot] = UsageSlot.objects.all()
    if start > 0:
        rows = rows.filter(at__gte=datetime.fromtimestamp(start, UTC))
    if len(keys) + len(projects) <= NAMED_AT_ONCE:
        rows = rows.filter(Q(project__in=projects) | Q(key__in=keys))
    found: dict[tuple[Subject, int], _Sums] = {}
    groups = rows.values_list("project", "key").order_by()
    for project, key, *group in groups.annotate(
        tokens=Sum(F("prompt_tokens") + F("completion_tokens")),
        units=Sum("cost"),
        calls=Sum("requests"),
        free=Sum("unpriced"),
    ):
        over: dict[Subject, int] = {**above.get(project, {}), "key": key}
        for each in over.items():
            if each in wanted:
                a, b, c, d = found.get(each, _NOTHING)
                found[each] = (a + int(group[0]), b + int(group[1]), c + int(group[2]), d + int(group[3]))
    return found
