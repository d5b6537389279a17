"""What was used since midnight UTC and what it cost, in all and by project. Query counts are pinned."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db.models import Sum

from nodes.summary import ProjectLine, UsageLine
from tenants import money, usage
from tenants.models import Project

PROJECTS = 50
_SUMMED = ("requests", "failed", "prompt_tokens", "completion_tokens", "cost", "unpriced")


def today(now: datetime) -> tuple[UsageLine, tuple[ProjectLine, ...]]:
    """What was used since midnight UTC, and which projects used most. Two queries: one over the sums of quarters of an
    hour, as a day may have millions of requests, and one for the names."""
    slots = usage.sums_of_today(now).values_list("project")
    of = {project: sums for project, *sums in slots.annotate(*(Sum(name) for name in _SUMMED))}
    whole = _used([sum(column) for column in zip(*of.values(), strict=True)] or [0] * len(_SUMMED))
    busiest = sorted((number for number in of if number), key=lambda number: (-of[number][0], number))[:PROJECTS]
    names = {
        number: (name, team)
        for number, name, team in Project.objects.filter(pk__in=busiest).values_list("pk", "name", "team__name")
    }
    return whole, tuple(
        ProjectLine(number, *names[number], usage=_used(of[number])) for number in busiest if number in names
    )


def _used(sums: Sequence[int]) -> UsageLine:
    requests, failed, prompt, completion, cost, unpriced = map(int, sums)
    spend = None if unpriced and not cost else money.decimal(cost)
    return UsageLine(requests, failed, prompt, completion, spend, unpriced)
