"""What was used: totals of a day, latest requests, pages of them by key (never by offset, never counted)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta

from django.db.models import Count, F, Q, QuerySet, Sum

from tenants.limit_models import UsageSlotQuerySet
from tenants.models import Project, Usage, UsageSlot, User

PAGE = 100
QUARTER = timedelta(minutes=15)
UNANSWERED_FROM, FAILED_FROM = 400, 500
"""Between them a request was refused, or its client left."""
Cursor = tuple[datetime, int]
"""Place of a row in the order of time: when it ended, and its id among those that ended together."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Finished requests of a span. Tokens of requests that did not report them are not in the sums."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ProjectTotals:
    project_id: int
    project: str
    team: str
    totals: Totals


@dataclass(frozen=True, slots=True)
class Page:
    rows: tuple[Usage, ...]
    older: str
    """Cursor of the next page; empty on the last one."""


def midnight(now: datetime) -> datetime:
    return now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


_SUMS = {
    "requests": Count("pk"),
    "failed": Count("pk", filter=Q(status__gte=FAILED_FROM)),
    "prompt": Sum("prompt_tokens"),
    "completion": Sum("completion_tokens"),
}


def totals(rows: QuerySet[Usage]) -> Totals:
    """Of `rows`, which name their span. One query."""
    sums = rows.aggregate(**_SUMS)
    return Totals(sums["requests"] or 0, sums["failed"] or 0, sums["prompt"] or 0, sums["completion"] or 0)


def total(sums: UsageSlotQuerySet) -> Totals:
    """Of sums by quarters of an hour, which name their span. One query."""
    found = sums.aggregate(**{field.name: Sum(field.name) for field in fields(Totals)})
    return Totals(**{name: value or 0 for name, value in found.items()})


def sums_of_today(now: datetime) -> UsageSlotQuerySet:
    """The sums of every quarter of an hour since midnight UTC. Each is named: told only where they begin, SQLite may
    look through all that were ever kept."""
    quarters = timedelta(days=1) // QUARTER
    return UsageSlot.objects.filter(at__in=[midnight(now) + number * QUARTER for number in range(quarters)]).order_by()


def today_by_project(now: datetime, user: User, *, limit: int = 50) -> tuple[ProjectTotals, ...]:
    """Projects that this person sees and that were used since midnight UTC, busiest first. Two queries."""
    seen = sums_of_today(now).visible_to(user).exclude(project=0)
    sums = seen.values_list("project").annotate(*(Sum(field.name) for field in fields(Totals)))
    found = {project: Totals(*used) for project, *used in sums.order_by(F("requests__sum").desc(), "project")[:limit]}
    names = Project.objects.filter(pk__in=found).values_list("pk", "name", "team__name")
    of = {pk: (name, team) for pk, name, team in names}
    return tuple(ProjectTotals(pk, *of[pk], used) for pk, used in found.items() if pk in of)


def page(rows: QuerySet[Usage], *, before: str = "", size: int = PAGE) -> Page:
    """Newest first, from the cursor on. One query, whose cost does not grow with the table."""
    cursor = read_cursor(before)
    if cursor is not None:
        at, pk = cursor
        rows = rows.filter(Q(at__lt=at) | Q(at=at, pk__lt=pk), at__lte=at)
    found = tuple(rows.select_related("project", "key").defer("explained").order_by("-at", "-pk")[: size + 1])
    shown = found[:size]
    return Page(rows=shown, older=write_cursor(shown[-1].at, shown[-1].pk) if len(found) > size else "")


def write_cursor(at: datetime, pk: int) -> str:
    return f"{at.astimezone(UTC).strftime('%Y%m%dT%H%M%S.%fZ')}_{pk}"


def read_cursor(text: str) -> Cursor | None:
    """None for anything that `write_cursor` did not write: the first page is shown then."""
    moment, _, pk = text.partition("_")
    try:
        at = datetime.strptime(moment, "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=UTC)
        number = int(pk)
    except ValueError:
        return None
    return (at, number) if 0 < number < 2**63 else None
