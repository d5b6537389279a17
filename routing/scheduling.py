"""Which endpoint gets the next request, from what each one's load is known to be. Pure.

An endpoint whose load is unknown counts as busy as the busiest known one: unknown is never idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """An endpoint as the choice sees it. `running`, `waiting`, `kv_used`: as last scraped, None when unknown.

    `sent`: own requests sent since that scrape and still open; `in_flight`: all own requests still open.
    """

    @property
    def weight(self) -> int: ...
    @property
    def running(self) -> int | None: ...
    @property
    def waiting(self) -> int | None: ...
    @property
    def kv_used(self) -> float | None: ...
    @property
    def sent(self) -> int: ...
    @property
    def in_flight(self) -> int: ...


C = TypeVar("C", bound=Candidate)


def load(candidate: Candidate) -> float | None:
    """Requests at the endpoint over what it serves at once; None when its engine does not say."""
    if candidate.running is None:
        return None
    return (candidate.running + (candidate.waiting or 0) + candidate.sent) / max(1, candidate.weight)


def choose(candidates: Sequence[C], turn: int) -> C | None:
    """The least loaded candidate; among equals the one with the emptier KV cache (when all say), then by `turn`."""
    count = len(candidates)
    if count <= 1:
        return candidates[0] if candidates else None
    loads = [load(each) for each in candidates]
    highest = max((known for known in loads if known is not None), default=0.0)
    kv = [each.kv_used for each in candidates]
    compare_kv = None not in kv

    def rank(index: int) -> tuple[float, float, int]:
        each, known = candidates[index], loads[index]
        if known is None:
            known = max(highest, each.in_flight / max(1, each.weight))
        return known, (kv[index] or 0.0) if compare_kv else 0.0, (index - turn) % count

    return candidates[min(range(count), key=rank)]
