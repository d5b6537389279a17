"""Which endpoint gets the next request, by the model's routing profile and each one's load as known (GW-40). Pure.

1. One candidate: that one.
2. Replicas that hold the adapter asked for, as long as one of them is not saturated; else all.
3. Of these by the profile; an endpoint whose load is unknown counts as busy as the busiest known one: unknown is never
   idle.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final, TypeVar

from routing.affinity import Index

SPREAD: Final = 1.25
"""How far above the others' mean load an endpoint may be before affinity to it ends…"""
SLACK, SLACK_REQUESTS = 0.25, 2
"""…beyond a quarter of what it serves at once, or two requests where that is more."""
REMEMBERED_GONE: Final = 64


class Candidate:
    """An endpoint as the choice sees it. `running`, `waiting`, `kv_used`: as last scraped, None when unknown.

    `in_flight`: own requests that are open now; `in_flight_then`: those that were when it was scraped. No protocol:
    compiled, that would look each of them up by name.
    """

    __slots__ = ("in_flight", "in_flight_then", "kv_used", "replica", "running", "waiting", "weight")

    replica: str
    weight: int
    running: int | None
    waiting: int | None
    kv_used: float | None
    in_flight: int
    in_flight_then: int


C = TypeVar("C", bound=Candidate)


def load(candidate: Candidate) -> float | None:
    """Requests at the endpoint over what it serves at once; None when its engine does not say. Other people's are as
    old as the scrape; our own, sent and ended since, are counted as they are now."""
    running = candidate.running
    if running is None:
        return None
    others = running + (candidate.waiting or 0) - candidate.in_flight_then
    own = candidate.in_flight
    return (others + own if others > 0 else own) / (candidate.weight or 1)


def saturated(candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Whether it works on as much as it serves at once, or on far more than the others do."""
    weight = candidate.weight or 1
    own = _counted(candidate)
    if own >= 1:
        return True
    others = sum(_counted(each) for each in candidates if each is not candidate)
    mean = others / max(1, len(candidates) - 1)
    return own > SPREAD * mean + max(SLACK, SLACK_REQUESTS / weight)


def _counted(candidate: Candidate) -> float:
    """Its load as known, or else what we ourselves have open there."""
    known = load(candidate)
    return candidate.in_flight / (candidate.weight or 1) if known is None else known


def least_loaded(candidates: Sequence[C], turn: int) -> C:
    """Of at least one; among equals the one with the emptier KV cache (when all say), then by `turn`."""
    least, highest = math.inf, -1.0
    equals: list[C] = []
    for each in candidates:
        own = load(each)
        if own is None:
            if highest < 0:
                highest = max((known for other in candidates if (known := load(other)) is not None), default=0.0)
            own = max(highest, each.in_flight / (each.weight or 1))
        if own < least:
            least, equals = own, [each]
        elif own == least:
            equals.append(each)
    if len(equals) == 1:
        return equals[0]
    emptiest = math.inf
    for each in equals:
        used = each.kv_used
        if used is None:
            break
        if used < emptiest:
            emptiest = used
    else:
        equals = [each for each in equals if each.kv_used == emptiest]
    return equals[turn % len(equals)]


class Chooser:
    """One model's choices. It lives across snapshots of the table, and what it remembers of replicas that are gone is
    bounded."""

    __slots__ = ("_index", "_new", "_standing", "_turn", "last_affinity", "profile")

    def __init__(self, profile: str) -> None:
        self.profile = profile
        self.last_affinity = ""
        """How the last choice followed the prompt's prefix: hit, miss, saturated; empty when it did not look."""
        self._turn = 0
        self._standing: dict[str, int] = {}
        """round_robin: the turn that a replica had last; weighted: how much it is owed."""
        self._index = Index()
        self._new = 0
        """How many prompts went where their prefix was not known."""

    def choose(
        self, candidates: Sequence[C], prompt: tuple[int, ...] | None = None, prefer: frozenset[str] | None = None
    ) -> C | None:
        """`prompt`: its prefix keys, when it has some; `prefer`: replicas that hold the adapter asked for."""
        self.last_affinity = ""
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        self._turn += 1
        if prefer:
            holding = [each for each in candidates if each.replica in prefer and not saturated(each, candidates)]
            candidates = holding or candidates
        profile = self.profile
        if profile == "prefix_affinity" and prompt:
            return self._by_prefix(candidates, prompt)
        if profile == "round_robin":
            return self._longest_ago(candidates)
        if profile == "weighted":
            return self._most_owed(candidates)
        return least_loaded(candidates, self._turn)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget every other replica."""
        self._standing = {name: value for name, value in self._standing.items() if name in replicas}
        self._index.keep(replicas)

    def _by_prefix(self, candidates: Sequence[C], prompt: tuple[int, ...]) -> C:
        places = {each.replica: each for each in candidates}
        self.last_affinity = "miss"
        while (found := self._index.find(prompt, places)) is not None:
            chosen = places[found]
            if not saturated(chosen, candidates):
                self.last_affinity = "hit"
                break
            self.last_affinity = "saturated"
            del places[found]
        else:
            self._new += 1  # a turn of their own, so that equals get as many prefixes each
            chosen = least_loaded(candidates, self._new)
        self._index.note(prompt, chosen.replica)
        return chosen

    def _longest_ago(self, candidates: Sequence[C]) -> C:
        standing = self._standing
        chosen = min(candidates, key=lambda each: standing.get(each.replica, 0))
        standing[chosen.replica] = self._turn
        self._bound(candidates)
        return chosen

    def _most_owed(self, candidates: Sequence[C]) -> C:
        """Smooth weighted round robin: each turn owes every candidate its weight, and who gets it pays for all."""
        standing = self._standing
        for each in candidates:
            standing[each.replica] = standing.get(each.replica, 0) + (each.weight or 1)
        chosen = max(candidates, key=lambda each: standing[each.replica])
        standing[chosen.replica] -= sum((each.weight or 1) for each in candidates)
        self._bound(candidates)
        return chosen

    def _bound(self, candidates: Sequence[C]) -> None:
        if len(self._standing) > len(candidates) + REMEMBERED_GONE:
            self.keep({each.replica for each in candidates})
