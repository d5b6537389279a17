"""Whether two agents take turns to speak for one node, as copies of one machine do (ND-4). Pure.

Each process of an agent has a name of its own. One that comes again after another took its place was there all the
time, so there are two. One machine's agents only follow each other: an old one comes after its successor at most once,
with what it had sent before it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

WITHIN = timedelta(minutes=10)
RETURNS = 3
"""How often somebody must have come back in that time."""
KEPT = 16


class Turn(msgspec.Struct, frozen=True, gc=False):
    """An agent's process that spoke for the node: `whence` in words, `at`: when it came last."""

    instance: str
    whence: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Taken:
    """The comer speaks for the node from now on; the turns to remember."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Contested:
    """Another agent, `kept`, speaks for the node and goes on; the turns to remember."""

    kept: Turn
    turns: tuple[Turn, ...]


def judge(past: Sequence[Turn], comer: Turn, *, spoken_for: bool) -> Taken | Contested:
    """`past`: oldest first. `spoken_for`: the one that came last is still heard."""
    recent = tuple(turn for turn in past if comer.at - turn.at <= WITHIN)
    if recent and recent[-1].instance == comer.instance:
        return Taken((*recent[:-1], comer))
    came_before = any(turn.instance == comer.instance for turn in recent)
    if spoken_for and came_before and _returns((*recent, comer)) >= RETURNS:
        # Remembered for as long as the other one keeps asking.
        return Contested(recent[-1], tuple(msgspec.structs.replace(turn, at=comer.at) for turn in recent))
    return Taken((*recent, comer)[-KEPT:])


def _returns(turns: Sequence[Turn]) -> int:
    """How often somebody came who had been there before the one before."""
    return sum(any(past.instance == turn.instance for past in turns[:place]) for place, turn in enumerate(turns))
