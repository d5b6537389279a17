"""How a subject stands, for pages and the API: what holds for it, what its budgets have left, what it used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from django.conf import settings
from django.db.models import F, Q, Sum

from tenants import limits, rollup
from tenants.limit_models import BudgetQuerySet
from tenants.limits import Effective, Level, Limit, Subject, effective
from tenants.models import Budget, Key, Organisation, Price, Project, Team, UsageSlot, User
from tenants.periods import DAY, bounds, zone

KINDS: dict[Subject, type[Organisation] | type[Team] | type[Project] | type[Key]] = {
    "organisation": Organisation,
    "team": Team,
    "project": Project,
    "key": Key,
}
ABOVE: dict[Subject, tuple[str, ...]] = {
    "organisation": (),
    "team": ("organisation",),
    "project": ("team__organisation",),
    "key": ("project__team__organisation",),
}
"""What to read along with a subject, so that walking up its path asks nothing more."""
_WITH_SUBJECTS = [
    "__".join(part for part in (kind, *over) if part) for kind, over in ABOVE.items() if kind != "organisation"
] + ["organisation"]


def currency() -> str:
    return str(settings.LLMGW.usage.currency)


def path_of(subject: Any) -> list[tuple[Subject, Any]]:
    """The subject and all that it is in, widest first."""
    match subject:
        case Key():
            return [*path_of(subject.project), ("key", subject)]
        case Project():
            return [*path_of(subject.team), ("project", subject)]
        case Team():
            return [*path_of(subject.organisation), ("team", subject)]
        case _:
            return [("organisation", subject)]


def levels(subject: Any) -> list[Level]:
    return [
        Level(
            Limit(kind, row.pk, row.name, row.requests_per_minute, row.tokens_per_minute, row.max_concurrent),
            row.band,
            frozenset(row.models_allowed) if row.models_allowed else None,
        )
        for kind, row in path_of(subject)
    ]


def effective_of(subject: Any) -> Effective:
    return effective(levels(subject))


def bands() -> list[str]:
    """The names of the bands that gateways know, highest first."""
    return list(settings.LLMGW.gateway.bands)


def band_objection(band: str, subject: Any = None, user: User | None = None) -> str:
    """Why this person may not give `subject` this band, in a sentence; empty when they may.

    The nearest band on a path counts, so only operators set one above what holds without it.
    """
    known = bands()
    if not band or (subject is not None and band == subject.band):
        return ""
    if band not in known:
        return f"There is no such band; known: {', '.join(known)}."
    if user is None or user.is_operator:
        return ""
    held = effective(levels(subject)[:-1]).band
    held = held if held in known else str(settings.LLMGW.gateway.default_band)
    if known.index(band) < known.index(held):
        return f"The band {band} is above {held}, which holds here. Ask an operator for it."
    return ""


# --- budgets ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class BudgetLine:
    """A budget with where it stands. `amount` and `spent.amount` in its unit; times are aware."""

    row: Budget
    kind: Subject
    name: str
    spent: rollup.Spent
    time_zone: str
    resets_at: datetime | None
    runs_out_at: datetime | None
    unpriced: str
    """Why money is counted in part or not at all; empty when all is."""

    @property
    def share(self) -> float:
        return 100 * self.spent.amount / self.row.amount

    @property
    def over(self) -> bool:
        return self.spent.amount >= self.row.amount


def on_path(subject: Any) -> Q:
    """Budgets of the subject and of all that it is in."""
    found = Q()
    for kind, row in path_of(subject):
        found |= Q(**{kind: row.pk})
    return found


def budget_lines(rows: Iterable[Budget], now: datetime) -> list[BudgetLine]:
    """`rows` read with `with_subjects`. A bounded number of queries however many there are (rollup.standing)."""
    rows = list(rows)
    values = [row.value(path_of(row.subject)[0][1].time_zone) for row in rows]
    spent = rollup.standing(values, now.timestamp())
    prices = Price.objects.all().snapshot() if any(row.unit == "money" for row in rows) else ()
    lines = []
    for row, value in zip(rows, values, strict=True):
        used = spent[row.pk]
        _, end = bounds(value.period, value.time_zone, now.timestamp())
        dry = limits.runs_out(start=used.start, end=end, now=now.timestamp(), used=used.amount, amount=row.amount)
        models_allowed = effective_of(row.subject).models if row.unit == "money" else None
        priced = row.unit != "money" or limits.priced(models_allowed, prices, now.timestamp())
        lines.append(
            BudgetLine(
                row=row,
                kind=value.subject,
                name=value.name,
                spent=used,
                time_zone=value.time_zone,
                resets_at=_aware(end, value.time_zone),
                runs_out_at=_aware(dry, value.time_zone),
                unpriced=_unpriced(used, priced) if row.unit == "money" else "",
            )
        )
    return lines


def with_subjects(rows: BudgetQuerySet) -> BudgetQuerySet:
    return rows.select_related(*_WITH_SUBJECTS)


def _unpriced(used: rollup.Spent, priced: bool) -> str:
    if not used.unpriced:
        return "" if priced or used.requests else "No price is set for what this may use: it counts nothing."
    if not used.amount:
        return "No request of this period had a price: it counts nothing."
    return f"{used.unpriced:,} of {used.requests:,} requests of this period had no price and count nothing."


def _aware(instant: float | None, time_zone: str) -> datetime | None:
    return None if instant is None else datetime.fromtimestamp(instant, UTC).astimezone(zone(time_zone))


# --- use -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Use:
    requests: int = 0
    tokens: int = 0
    cost: int = 0
    unpriced: int = 0


@dataclass(frozen=True, slots=True)
class DayUse:
    day: date
    use: Use


_SUMS = {
    "calls": Sum("requests"),
    "tokens": Sum(F("prompt_tokens") + F("completion_tokens")),
    "units": Sum("cost"),
    "free": Sum("unpriced"),
}


def slots_of(subject: Any) -> Q:
    match subject:
        case Key():
            return Q(key=subject.pk)
        case Project():
            return Q(project=subject.pk)
        case Team():
            return Q(project__in=Project.objects.filter(team=subject).values("pk"))
        case _:
            return Q(project__in=Project.objects.filter(team__organisation=subject).values("pk"))


def this_month(subject: Any, now: datetime) -> list[DayUse]:
    """Every day of the month so far, in the organisation's time zone. One query over at most 3,000 quarters."""
    time_zone = path_of(subject)[0][1].time_zone
    start, _ = bounds("month", time_zone, now.timestamp())
    where = zone(time_zone)
    rows = UsageSlot.objects.filter(slots_of(subject), at__gte=datetime.fromtimestamp(start, UTC))
    days: dict[date, list[int]] = {}
    day = datetime.fromtimestamp(start, where).date()
    while day <= now.astimezone(where).date():
        days[day] = [0, 0, 0, 0]
        day += DAY
    for at, *sums in rows.values_list("at").order_by().annotate(**_SUMS):
        held = days.setdefault(at.astimezone(where).date(), [0, 0, 0, 0])
        for place, value in enumerate(sums):
            held[place] += int(value)
    return [DayUse(day, Use(*sums)) for day, sums in sorted(days.items())]


def in_all(days: Sequence[DayUse]) -> Use:
    held = [day.use for day in days]
    return Use(
        sum(each.requests for each in held),
        sum(each.tokens for each in held),
        sum(each.cost for each in held),
        sum(each.unpriced for each in held),
    )


def month_by(name: str, rows: Iterable[int], now: datetime, time_zone: str) -> dict[int, Use]:
    """Of each project or key (`name`) what it used this month. One query."""
    start, _ = bounds("month", time_zone, now.timestamp())
    wanted = UsageSlot.objects.filter(**{f"{name}__in": list(rows)}, at__gte=datetime.fromtimestamp(start, UTC))
    return {
        pk: Use(*(int(value) for value in sums)) for pk, *sums in wanted.values_list(name).order_by().annotate(**_SUMS)
    }
