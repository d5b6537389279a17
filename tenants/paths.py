"""From rows of the tenant tree to what each key allows: its path's limits, budgets, names and band. Pure.

Ten thousand keys share what they have in common: a key that sets nothing carries its project's very values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from tenants.keys import Grant
from tenants.limits import Budget, Level, Limit, Period, Subject, Unit, both


class Node(NamedTuple):
    """One subject as its row has it; `above` is the id of the wider one, `time_zone` only an organisation's."""

    pk: int
    above: int | None
    name: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrent: int | None
    band: str
    models_allowed: list[str]
    time_zone: str = ""


class KeyRow(NamedTuple):
    """A key: its subject's columns, and what only keys have."""

    node: Node
    digest: str
    prefix: str
    user_id: int | None
    expires_at: datetime | None


class BudgetRow(NamedTuple):
    pk: int
    subject: Subject
    subject_id: int
    unit: Unit
    amount: int
    period: Period
    stops: bool


@dataclass(frozen=True, slots=True)
class Path:
    """What holds down to one subject, widest first."""

    time_zone: str
    limits: tuple[Limit, ...] = ()
    budgets: tuple[Budget, ...] = ()
    models: frozenset[str] | None = None
    band: str = ""


def level(subject: Subject, node: Node) -> Level:
    rates = (node.requests_per_minute, node.tokens_per_minute, node.max_concurrent)
    models = frozenset(node.models_allowed) if node.models_allowed else None
    return Level(Limit(subject, node.pk, node.name, *rates), node.band, models)


def down(above: Path, subject: Subject, node: Node, budgets: Iterable[BudgetRow] = ()) -> Path:
    """The path one step further, to `node`. Where that sets nothing it is the very path above."""
    own = level(subject, node)
    rates = (node.requests_per_minute, node.tokens_per_minute, node.max_concurrent)
    limits = above.limits if rates == (None, None, None) else (*above.limits, own.limit)
    added = tuple(_budget(row, node.name, above.time_zone) for row in budgets)
    if limits is above.limits and not added and not own.band and own.models is None:
        return above
    return Path(
        time_zone=above.time_zone,
        limits=limits,
        budgets=above.budgets + added,
        models=both(above.models, own.models),
        band=own.band or above.band,
    )


def _budget(row: BudgetRow, name: str, time_zone: str) -> Budget:
    return Budget(row.pk, row.subject, row.subject_id, name, row.unit, row.amount, row.period, time_zone, row.stops)


def project_paths(
    organisations: Iterable[Node], teams: Iterable[Node], projects: Iterable[Node], budgets: Iterable[BudgetRow]
) -> tuple[dict[int, Path], Mapping[tuple[Subject, int], list[BudgetRow]]]:
    """Each project's path by its id, and the budgets by subject."""
    own: dict[tuple[Subject, int], list[BudgetRow]] = {}
    for row in budgets:
        own.setdefault((row.subject, row.subject_id), []).append(row)
    over: dict[int | None, Path] = {
        node.pk: down(Path(node.time_zone), "organisation", node, own.get(("organisation", node.pk), ()))
        for node in organisations
    }
    steps: tuple[tuple[Subject, Iterable[Node]], ...] = (("team", teams), ("project", projects))
    for subject, nodes in steps:
        over = {
            node.pk: down(over[node.above], subject, node, own.get((subject, node.pk), ()))
            for node in nodes
            if node.above in over
        }
    return {pk: path for pk, path in over.items() if pk is not None}, own


def grants(
    keys: Iterable[KeyRow],
    organisations: Iterable[Node],
    teams: Iterable[Node],
    projects: Iterable[Node],
    budgets: Iterable[BudgetRow],
) -> tuple[Grant, ...]:
    """What each key allows. A key whose project went away while rows were read is left out."""
    over, own = project_paths(organisations, teams, projects, budgets)
    found = []
    shared: dict[frozenset[str] | None, frozenset[str] | None] = {}
    for node, digest, prefix, user_id, expires_at in keys:
        above = over.get(node.above or 0)
        if above is None:
            continue
        path = down(above, "key", node, own.get(("key", node.pk), ()))
        found.append(
            Grant(
                digest=digest,
                key_id=node.pk,
                prefix=prefix,
                project_id=node.above,
                user_id=user_id,
                models=shared.setdefault(path.models, path.models),
                expires_at=expires_at.timestamp() if expires_at else None,
                limits=path.limits,
                budgets=path.budgets,
                band=path.band,
            )
        )
    return tuple(found)
