"""What a pass may do, each with its reason in words for the timeline: the values between deciding and doing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from catalog import spec
from nodes.expiry import Expired
from nodes.placement import Part
from nodes.state import Backoff, TurnedDown


@dataclass(frozen=True, slots=True)
class Start:
    """A new replica of `model` under `profile`, in the parts that placement gave it."""

    replica: str
    model: spec.Model
    profile: spec.Profile
    parts: tuple[Part, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Gateways send it nothing new; it stops when it is idle or its time is up."""

    replica: str
    model: str
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    replica: str
    model: str
    why: str


@dataclass(frozen=True, slots=True)
class Forget:
    """It is over, or out of reach: its row goes, and so do commands to start it."""

    replica: str
    model: str
    why: str


@dataclass(frozen=True, slots=True)
class BackOff:
    backoff: Backoff
    why: str


@dataclass(frozen=True, slots=True)
class Recover:
    """Earlier failures of the profile no longer count."""

    model: str
    profile: str
    why: str


Action = Expired | Start | Drain | Stop | Forget | BackOff | Recover


@dataclass(frozen=True, slots=True)
class Plan:
    """`reasons`: for each model that was looked at, why its next replica found no place; empty when it needs none."""

    actions: tuple[Action, ...] = ()
    reasons: tuple[tuple[str, tuple[TurnedDown, ...]], ...] = ()
