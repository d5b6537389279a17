"""What a pass may do, each with its reason in words for the timeline: the values between deciding and doing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from catalog import spec
from nodes.expiry import Expired
from nodes.placement import Part
from nodes.state import Backoff, TurnedDown


@dataclass(frozen=True, slots=True)
class Start:
    """A new replica of `model` under `profile`, in the parts that placement gave it. Rank 0 starts; others wait."""

    replica: str
    model: spec.Model
    profile: spec.Profile
    parts: tuple[Part, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Join:
    """The leader of `replica` listens: the shards of these `ranks` are told to start (ND-43)."""

    replica: str
    model: spec.Model
    profile: spec.Profile
    ranks: tuple[int, ...]
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
    """Earlier failures of the profile no longer count, on one `node` or everywhere."""

    model: str
    profile: str
    why: str
    node: str = ""


Action = Expired | Start | Join | Drain | Stop | Forget | BackOff | Recover


@dataclass(frozen=True, slots=True)
class Plan:
    """`reasons`: for each model that was looked at, why its next replica found no place; empty when it needs none."""

    actions: tuple[Action, ...] = ()
    reasons: tuple[tuple[str, tuple[TurnedDown, ...]], ...] = ()
    unfinished: bool = False
    """Whether models were left for the next pass, which is to follow at once."""
