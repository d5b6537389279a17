"""What may be used along the path organisation > team > project > key, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Subject = Literal["organisation", "team", "project", "key"]
SUBJECTS: tuple[Subject, ...] = ("organisation", "team", "project", "key")
Unit = Literal["money", "tokens"]
Period = Literal["day", "week", "month", "total"]


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
