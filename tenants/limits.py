"""What may be used along the path organisation > team > project > key, as values. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from tenants import money

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


# --- what may be set -------------------------------------------------------------------------------------------------
MAX_NAMES = 256
MAX_NAME = 200
MAX_BAND = 20
MAX_AMOUNT = 10**18
MAX_BUDGETS = 8
"""Of one subject: each of them is looked at for every request."""
MAX_QUOTAS = 100
"""Of one team: there are hardly as many kinds of cards."""
MAX_CARDS = 1_000_000
MAX_GPU_CLASS = 40
GPU_CLASS = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*-[1-9][0-9]{0,3}g\Z")
"""A card's product and its memory in GiB, as agents report it."""


def names_objection(names: object) -> str:
    """Why this is no list of names of models and adapters, in a sentence; empty when it is."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return 'Write a list of names of models and adapters, such as ["smollm2"]; [] means all.'
    if len(names) > MAX_NAMES:
        return f"There are {len(names)} names; {MAX_NAMES} are the most."
    for name in names:
        if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
            return f"A name has 1 to {MAX_NAME} characters that can be seen; {_shown(name)} is none."
    return ""


def class_objection(gpu_class: str) -> str:
    """Why this cannot be a GPU class, in a sentence; empty when it can."""
    if len(gpu_class) <= MAX_GPU_CLASS and GPU_CLASS.match(gpu_class):
        return ""
    return f"{_shown(gpu_class)} is not a class such as h100-80g: small letters, memory in GiB."


def _shown(text: str) -> str:
    return repr(text[:40]).encode("utf-8", "backslashreplace").decode()


def amount_of(unit: Unit, written: Decimal) -> int:
    """A budget's amount as rows have it, from how people write it. ValueError says what is wrong with it."""
    if unit == "tokens":
        if written != written.to_integral_value():
            raise ValueError("Tokens are whole; leave the decimals out.")
        found = int(written)
    else:
        found = money.units(written)
    if not 0 < found <= MAX_AMOUNT:
        raise ValueError("An amount is more than nothing and has at most 10 digits before the point (tokens: 18).")
    return found


def written_amount(unit: Unit, amount: int) -> Decimal:
    return Decimal(amount) if unit == "tokens" else money.decimal(amount)


def runs_out(*, start: float, end: float | None, now: float, used: int, amount: int) -> float | None:
    """When a budget is used up at the pace so far, if that is before its period ends."""
    if used <= 0 or used >= amount or now <= start or end is None:
        return None
    at = start + (now - start) * amount / used
    return at if at < end else None


def priced(models: frozenset[str] | None, prices: Iterable[money.Price], now: float) -> bool:
    """Whether any of these models (None: any at all) has a price at that time; without one money is not counted."""
    return any(price.valid_from <= now and (models is None or price.model in models) for price in prices)
