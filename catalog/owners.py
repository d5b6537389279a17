"""Whether the teams that own models are there: a capacity quota binds by the short name that a model gives (TN-6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from catalog.names import nearest
from catalog.spec import Model, Problem
from tenants.models import Team


def objections(new: Sequence[Model], old: Sequence[Model]) -> list[Problem]:
    """Teams that are named anew and that there are none of, or several. What stood before stays: a team that was
    renamed since must not keep people from changing other models."""
    before = {model.name: model.team for model in old}
    named = [model for model in new if model.team and model.team != before.get(model.name)]
    if not named:
        return []
    known = Counter(Team.objects.order_by().values_list("slug", flat=True))
    return [Problem(model.name, "", "team", text) for model in named if (text := _objection(model.team, known))]


def _objection(team: str, known: Counter[str]) -> str:
    if known[team] > 1:
        return f"{known[team]} organisations have a team {team}; give one of these another short name first."
    if not known[team]:
        return f"There is no team {team[:80]!r}.{nearest(team, known)} Write a team's short name, or leave it out."
    return ""
