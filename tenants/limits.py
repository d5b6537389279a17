"""What may be used along the path organisation > team > project > key, as values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Subject = Literal["organisation", "team", "project", "key"]
SUBJECTS: tuple[Subject, ...] = ("organisation", "team", "project", "key")
Unit = Literal["money", "tokens"]
Period = Literal["day", "week", "month", "total"]
Kind = Literal["requests_per_minute", "tokens_per_minute", "concurrent"]
KINDS: tuple[Kind, ...] = ("requests_per_minute", "tokens_per_minute", "concurrent")


@dataclass(frozen=True, slots=True)
class Limit:
    """The rates of one subject; None: not limited. `name` is what people call the subject."""

    subject: Subject
    subject_id: int
    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """What one subject may use in a period. `amount`: tokens, or money in units of 10^-8 (see tenants.money).

    Periods begin in `time_zone`. `stops`: what goes beyond it is refused; otherwise it only warns.
    """

    budget_id: int
    subject: Subject
    subject_id: int
    name: str
    unit: Unit
    amount: int
    period: Period
    time_zone: str = "UTC"
    stops: bool = True


@dataclass(frozen=True, slots=True)
class Level:
    """All that one subject sets. `band` empty and `models` None: nothing set here."""

    limit: Limit
    band: str = ""
    models: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """The tightest of one kind on a path and whose it is; both None where nobody limits it."""

    kind: Kind
    value: int | None = None
    of: Limit | None = None


@dataclass(frozen=True, slots=True)
class Effective:
    """What holds at the end of a path. `models` None: all; `models_of`: whoever leaves something out."""

    rates: tuple[Rate, ...]
    band: str = ""
    band_of: Limit | None = None
    models: frozenset[str] | None = None
    models_of: tuple[Limit, ...] = ()


def effective(path: Sequence[Level]) -> Effective:
    """What holds for the last of `path` (widest first): of rates the tightest, of bands the nearest, of models what
    everybody allows. Of equals the widest counts: lifting the narrower one would change nothing."""
    models: frozenset[str] | None = None
    for level in path:
        models = both(models, level.models)
    nearest = next((level for level in reversed(path) if level.band), None)
    return Effective(
        rates=tuple(_tightest(kind, path) for kind in KINDS),
        band=nearest.band if nearest else "",
        band_of=nearest.limit if nearest else None,
        models=models,
        models_of=tuple(level.limit for level in path if level.models is not None),
    )


def _tightest(kind: Kind, path: Sequence[Level]) -> Rate:
    found = Rate(kind)
    for level in path:
        value: int | None = getattr(level.limit, kind)
        if value is not None and (found.value is None or value < found.value):
            found = Rate(kind, value, level.limit)
    return found


def both(wider: frozenset[str] | None, narrower: frozenset[str] | None) -> frozenset[str] | None:
    """What two lists of names allow together; None allows all."""
    if wider is None or narrower is None:
        return narrower if wider is None else wider
    return wider & narrower
