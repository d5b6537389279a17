"""Who may go now and who waits, for one model in one gateway (GW-30, GW-31). Pure: every method takes `now`.

1. There is room and nobody waits: go. Else wait, unless the queue is full.
2. A place comes free: the highest band with waiters goes, unless a lower one is owed its share.
3. Inside a band tenants take turns, one request each; inside a tenant the first to come goes first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

LEAST_SHARE: Final = 0.01
"""Of admissions, for a band that is given less: nobody starves."""
WHOLE: Final = 1_000_000
"""One admission, in the unit in which bands are owed some."""
SMOOTHING: Final = 1 / 16


@dataclass(frozen=True, slots=True)
class Band:
    """`share`: the least part of admissions that it gets while higher bands have waiters; 0 for the first."""

    name: str
    share: float = 0.0


def band_index(bands: Sequence[Band], name: str, default: int = 0) -> int:
    """Where the band of that name stands, highest first; `default` for a name that is none of theirs."""
    return next((index for index, band in enumerate(bands) if band.name == name), default)


class QueueFull(Exception):
    """As many wait already as may."""


class Ticket:
    """One request's place: waiting until `admitted`, over once `ended`."""

    __slots__ = ("admitted", "band", "ended", "number", "since", "tenant", "wake")

    def __init__(self, tenant: int, band: int, since: float, admitted: bool) -> None:
        self.tenant, self.band, self.since, self.admitted = tenant, band, since, admitted
        self.ended = False
        self.number = 0
        self.wake: Callable[[], None] | None = None
        """Called once, when a waiting ticket is admitted; it must not raise."""


class Admission:
    """At most `capacity` in flight, at most `queue_limit` waiting. A tenant with nobody waiting in a band finds one of
    as many spare places when the queue is full, so that no tenant can keep the others out by filling it."""

    __slots__ = ("_held_s", "_lanes", "capacity", "in_flight", "queue_limit", "waiting")

    def __init__(self, capacity: int, queue_limit: int, bands: Sequence[Band]) -> None:
        """At least one band. Shares that would leave nothing to the first are cut in proportion."""
        shares = [max(band.share, LEAST_SHARE) for band in bands[1:]]
        cut = min(1.0, (1 - LEAST_SHARE) / sum(shares)) if shares else 1.0
        self._lanes = (_Lane(0.0), *(_Lane(share * cut) for share in shares))
        self.capacity, self.queue_limit = capacity, queue_limit
        self.in_flight = self.waiting = 0
        self._held_s: float | None = None

    def ask(self, tenant: int, band: int, now: float) -> Ticket:
        """A ticket that is admitted at once, or waits. Raises QueueFull."""
        if self.in_flight < self.capacity and not self.waiting:
            self.in_flight += 1
            return Ticket(tenant, band, now, True)
        lane = self._lanes[band]
        if self.waiting >= self.queue_limit and (tenant in lane.rotation or self.waiting >= 2 * self.queue_limit):
            raise QueueFull
        ticket = Ticket(tenant, band, now, False)
        lane.join(ticket)
        self.waiting += 1
        return ticket

    def end(self, ticket: Ticket, now: float) -> None:
        """It is done, or it waits no longer. Of no effect the second time."""
        if ticket.ended:
            return
        ticket.ended = True
        if not ticket.admitted:
            ticket.wake = None
            self._lanes[ticket.band].leave(ticket)
            self.waiting -= 1
            return
        self.in_flight -= 1
        held = now - ticket.since
        self._held_s = held if self._held_s is None else self._held_s + (held - self._held_s) * SMOOTHING
        if self.waiting:
            self._admit(now)

    def resize(self, capacity: int, now: float) -> None:
        """More room admits who waits; less lets those in flight end."""
        self.capacity = capacity
        self._admit(now)

    def _admit(self, now: float) -> None:
        while self.waiting and self.in_flight < self.capacity:
            ticket = self._next_lane().take()
            self.waiting -= 1
            self.in_flight += 1
            ticket.admitted, ticket.since = True, now
            wake, ticket.wake = ticket.wake, None
            if wake is not None:
                wake()

    def _next_lane(self) -> _Lane:
        top: _Lane | None = None
        owed: _Lane | None = None
        for lane in self._lanes:
            if not lane.waiting:
                continue
            if top is None:
                top = lane
                continue
            lane.credit += lane.share
            if lane.credit >= WHOLE and (owed is None or lane.credit > owed.credit):
                owed = lane
        assert top is not None, "asked only while somebody waits"
        if owed is None:
            return top
        owed.credit -= WHOLE
        return owed

    # --- what a waiter is told ---------------------------------------------------------------------------------------
    def position(self, ticket: Ticket) -> int:
        """About how many admissions until its own, 1 for the next; 0 when it does not wait. From counts kept for each
        band, so that every waiter can ask every second; who comes later and who leaves is not foreseen."""
        if ticket.admitted or ticket.ended:
            return 0
        lane = self._lanes[ticket.band]
        place = lane.place(ticket)
        higher = sum(each.waiting for each in self._lanes[: ticket.band])
        if higher:
            place = min(higher + place, math.ceil((place * WHOLE - lane.credit) / lane.share))
        for each in self._lanes[ticket.band + 1 :]:
            place += min(each.waiting, place * each.share // WHOLE)
        return max(1, min(place, self.waiting))

    def expected_s(self, ticket: Ticket, now: float) -> float | None:
        """Seconds until it is admitted, if places come free as they did of late; None while nothing says so."""
        if ticket.admitted or ticket.ended:
            return 0.0
        if self._held_s is None or self.capacity <= 0:
            return None
        until_one_ends = self._held_s / self.capacity
        # Whoever is in flight beyond a shrunk capacity must end first.
        return (self.position(ticket) + max(0, self.in_flight - self.capacity)) * until_one_ends


class _Line:
    """One tenant's waiters in a band, and its turn."""

    __slots__ = ("asked", "tickets", "turn")

    def __init__(self, turn: int) -> None:
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.turn = turn
        self.asked = 0


class _Lane:
    """A band's waiters: tenants in rotation, the next one first."""

    __slots__ = ("credit", "depth", "rotation", "share", "turns", "waiting")

    def __init__(self, share: float) -> None:
        self.share = max(1, round(share * WHOLE))
        self.credit = 0
        self.rotation: OrderedDict[int, _Line] = OrderedDict()
        self.waiting = self.turns = 0
        self.depth: list[int] = []
        """How many tenants have more than 0, 1, 2… waiters."""

    def join(self, ticket: Ticket) -> None:
        line = self.rotation.get(ticket.tenant)
        if line is None:
            line = self.rotation[ticket.tenant] = _Line(self._turn())
        ticket.number = line.asked
        line.asked += 1
        length = len(line.tickets)
        line.tickets[ticket] = None
        if length == len(self.depth):
            self.depth.append(0)
        self.depth[length] += 1
        self.waiting += 1

    def leave(self, ticket: Ticket) -> None:
        line = self.rotation[ticket.tenant]
        del line.tickets[ticket]
        self._shorter(ticket.tenant, line)

    def take(self) -> Ticket:
        tenant, line = next(iter(self.rotation.items()))
        ticket, _ = line.tickets.popitem(last=False)
        line.turn = self._turn()
        self.rotation.move_to_end(tenant)
        self._shorter(tenant, line)
        return ticket

    def place(self, ticket: Ticket) -> int:
        """About its place among the band's waiters, from 1."""
        line = self.rotation[ticket.tenant]
        before = min(ticket.number - next(iter(line.tickets)).number, len(line.tickets) - 1)
        first = next(iter(self.rotation.values()))
        same_round = min(line.turn - first.turn, self.depth[before] - 1)
        return sum(self.depth[:before]) + same_round + 1

    def _turn(self) -> int:
        self.turns += 1
        return self.turns

    def _shorter(self, tenant: int, line: _Line) -> None:
        self.waiting -= 1
        length = len(line.tickets)
        self.depth[length] -= 1
        if not self.depth[length]:
            self.depth.pop()  # nobody's line is that long any more, and this one's was the longest
        if not length:
            del self.rotation[tenant]
