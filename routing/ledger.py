"""What requests cost that the store has not counted yet, so that what it says and what is known here add up. Pure.

    settled --mark--> on the way to the store --flushed--> in the store --asked--> counted there --answered--> dropped

A read that begins after a flush has ended finds what was flushed, one that began before may not: until the answer to
a later read, it is counted here as well. So spend is at worst counted twice for one read, and never forgotten.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

MOST_READS: Final = 8
"""Reads without an answer that are told apart; what belongs to earlier ones waits for a later answer."""

K = TypeVar("K")


class Ledger(Generic[K]):
    __slots__ = ("_fresh", "_moved", "_moving", "_reads", "_ticket")

    def __init__(self) -> None:
        self._fresh: dict[K, int] = {}
        self._moving: dict[K, int] = {}
        self._moved: dict[K, int] = {}
        self._reads: list[tuple[int, dict[K, int]]] = []
        self._ticket = 0

    def settled(self, key: K, amount: int) -> None:
        """Call in one step with appending the record to the journal, after it."""
        self._fresh[key] = self._fresh.get(key, 0) + amount

    def mark(self) -> None:
        """The journal hands over everything it has now: call in one step with that."""
        _pour(self._fresh, self._moving)

    def flushed(self) -> None:
        """The store has committed all that was handed over. A flush that fails says nothing: the next covers it."""
        _pour(self._moving, self._moved)

    def asked(self) -> int:
        """The store is about to be asked what was spent; its answer comes with this ticket, or never."""
        if self._moved:
            self._ticket += 1
            self._reads.append((self._ticket, self._moved))
            self._moved = {}
            if len(self._reads) > MOST_READS:
                _, earlier = self._reads.pop(-2)
                _pour(earlier, self._reads[-1][1])
        return self._ticket

    def answered(self, ticket: int) -> None:
        self._reads = [read for read in self._reads if read[0] > ticket]

    def uncounted(self, key: K) -> int:
        """What was settled here and may be missing in the store's last answer."""
        found = self._fresh.get(key, 0) + self._moving.get(key, 0) + self._moved.get(key, 0)
        for _, read in self._reads:
            found += read.get(key, 0)
        return found

    def forget(self, key: K) -> None:
        """A new period begins: what belongs to the last one counts no more."""
        for kept in (self._fresh, self._moving, self._moved, *(read for _, read in self._reads)):
            kept.pop(key, None)


def _pour(source: dict[K, int], into: dict[K, int]) -> None:
    for key, amount in source.items():
        into[key] = into.get(key, 0) + amount
    source.clear()
