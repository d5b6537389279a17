"""Who may go and who waits: the rules hold whatever happens in whatever order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from routing.admission import Admission, Band, QueueFull, Ticket, band_index

BANDS = (Band("high"), Band("normal", 0.3), Band("low", 0.05))
ONE = (Band("only"),)


class AnyOrder(RuleBasedStateMachine):
    """Whatever is asked, ended, cancelled and resized, against a plain list of who waits."""

    @initialize(capacity=st.integers(0, 4), queue_limit=st.integers(0, 12))
    def begin(self, capacity: int, queue_limit: int) -> None:
        self.now = 0.0
        self.admission = Admission(capacity, queue_limit, BANDS)
        self.waiting: list[Ticket] = []
        self.flying: list[Ticket] = []
        self.woken: Counter[Ticket] = Counter()
        # Of a tenant that waits, for each other one of its band: how often that one went since.
        self.overtaken: dict[tuple[int, int], Counter[int]] = {}
        self.passed: list[list[bool]] = [[], [], []]

    def _woken(self, ticket: Ticket) -> None:
        """It was admitted out of the queue: everything that must be true of such a moment."""
        admission = self.admission
        self.woken[ticket] += 1
        assert ticket.admitted
        assert admission.in_flight <= admission.capacity
        peers = [each for each in self.waiting if (each.band, each.tenant) == (ticket.band, ticket.tenant)]
        assert peers[0] is ticket, "first come, first served inside a tenant"
        top = min(each.band for each in self.waiting)
        for band, passed in enumerate(self.passed):
            if band > top and any(each.band == band for each in self.waiting):
                passed.append(band == ticket.band)
                owed = len(passed) * BANDS[band].share
                assert owed - 2 <= sum(passed) <= owed + 2, "a lower band gets its share, and no more"
            else:
                passed.clear()
        self.overtaken.pop((ticket.band, ticket.tenant), None)
        self.waiting.remove(ticket)
        self.flying.append(ticket)
        for tenant in {each.tenant for each in self.waiting if each.band == ticket.band} - {ticket.tenant}:
            gone = self.overtaken.setdefault((ticket.band, tenant), Counter())
            gone[ticket.tenant] += 1
            assert gone[ticket.tenant] == 1, "nobody goes twice before all went once"

    @rule(tenant=st.integers(1, 4), band=st.integers(0, 2))
    def ask(self, tenant: int, band: int) -> None:
        room = self.admission.in_flight < self.admission.capacity
        limit, waits = self.admission.queue_limit, len(self.waiting)
        alone = not any((each.tenant, each.band) == (tenant, band) for each in self.waiting)
        try:
            ticket = self.admission.ask(tenant, band, self.now)
        except QueueFull:
            assert not room
            assert waits >= limit
            assert not alone or waits >= 2 * limit
            return
        assert ticket.admitted is room
        if room:
            self.flying.append(ticket)
            return
        assert waits < limit or (alone and waits < 2 * limit)
        ticket.wake = lambda: self._woken(ticket)
        self.waiting.append(ticket)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), took=st.floats(0, 100))
    def end(self, data: st.DataObject, took: float) -> None:
        self.now += took
        ticket = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.admission.end(ticket, self.now)
        before = self.admission.in_flight, self.admission.waiting
        self.admission.end(ticket, self.now)
        assert (self.admission.in_flight, self.admission.waiting) == before

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        place = (ticket.band, ticket.tenant)
        if not any((each.band, each.tenant) == place for each in self.waiting):
            self.overtaken.pop(place, None)
        if not any(each.band == ticket.band for each in self.waiting):
            self.passed[ticket.band].clear()
        self.admission.end(ticket, self.now)
        self.admission.end(ticket, self.now)
        assert not ticket.admitted

    @rule(capacity=st.integers(0, 6))
    def resize(self, capacity: int) -> None:
        self.admission.resize(capacity, self.now)

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        admission = self.admission
        assert (admission.waiting, admission.in_flight) == (len(self.waiting), len(self.flying))
        assert not admission.waiting or admission.in_flight >= admission.capacity

    @invariant()
    def everybody_is_woken_once(self) -> None:
        assert all(count == 1 for count in self.woken.values())
        assert not any(each.admitted for each in self.waiting)

    @invariant()
    def every_waiter_is_told_a_place_in_the_queue(self) -> None:
        assert all(1 <= self.admission.position(each) <= len(self.waiting) for each in self.waiting)
        assert not any(self.admission.position(each) for each in self.flying)

    @invariant()
    def nothing_is_kept_of_who_does_not_wait(self) -> None:
        for band, lane in enumerate(self.admission._lanes):
            waiting = Counter(each.tenant for each in self.waiting if each.band == band)
            assert {tenant: len(line.tickets) for tenant, line in lane.rotation.items()} == waiting
            assert len(lane.depth) == max(waiting.values(), default=0)
            assert sum(lane.depth) == lane.waiting


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def queued(admission: Admission, *asked: tuple[int, int]) -> list[Ticket]:
    """Tickets of (tenant, band) pairs, all of which wait."""
    tickets = [admission.ask(tenant, band, 0.0) for tenant, band in asked]
    assert not any(ticket.admitted for ticket in tickets)
    return tickets


def order(admission: Admission, tickets: Sequence[Ticket]) -> list[Ticket]:
    """The order in which they are admitted when places come free one by one."""
    went: list[Ticket] = []
    for ticket in tickets:
        ticket.wake = lambda ticket=ticket: went.append(ticket)  # type: ignore[misc]
    admission.resize(1, 0.0)
    for index in itertools.count():
        if index == len(went):
            return went
        admission.end(went[index], 0.0)
    raise AssertionError


def test_tenants_take_turns_and_one_that_runs_dry_gives_up_its_turn() -> None:
    admission = Admission(0, 100, ONE)
    tickets = queued(admission, (1, 0), (1, 0), (1, 0), (2, 0), (3, 0), (3, 0))
    assert [ticket.tenant for ticket in order(admission, tickets)] == [1, 2, 3, 1, 3, 1]


def test_the_higher_band_goes_first_and_the_lower_ones_get_what_they_are_promised() -> None:
    admission = Admission(0, 1000, (Band("high"), Band("normal", 0.2), Band("low", 0.1)))
    tickets = queued(admission, *[(1, band) for band in (2, 1, 0) for _ in range(100)])
    went = Counter(ticket.band for ticket in order(admission, tickets)[:101])
    assert went == {0: 71, 1: 20, 2: 10}


def test_a_band_that_is_promised_nothing_is_still_not_starved() -> None:
    admission = Admission(0, 1000, (Band("high"), Band("low", 0.0)))
    tickets = queued(admission, (1, 1), *[(2, 0)] * 150)
    assert order(admission, tickets).index(tickets[0]) == 99


def test_bands_that_are_promised_everything_still_leave_some_to_the_first() -> None:
    admission = Admission(0, 10_000, (Band("high"), Band("normal", 1.0), Band("low", 0.5)))
    tickets = queued(admission, *[(1, band) for band in (2, 1, 0) for _ in range(1000)])
    went = Counter(ticket.band for ticket in order(admission, tickets)[:1000])
    assert [went[band] for band in range(3)] == [pytest.approx(each, abs=2) for each in (10, 660, 330)]


def test_a_band_is_found_by_its_name_and_an_unknown_one_is_the_default() -> None:
    assert band_index(BANDS, "low") == 2
    assert band_index(BANDS, "gone", 1) == 1
    assert band_index(BANDS, "gone") == 0


def test_a_tenant_that_fills_the_queue_keeps_no_other_out() -> None:
    admission = Admission(0, 3, ONE)
    queued(admission, (1, 0), (1, 0), (1, 0))
    with pytest.raises(QueueFull):
        admission.ask(1, 0, 0.0)
    queued(admission, (2, 0), (3, 0), (4, 0))
    for tenant in (2, 5):
        with pytest.raises(QueueFull):
            admission.ask(tenant, 0, 0.0)
    assert admission.waiting == 6


def test_a_cancelled_waiter_frees_its_place_at_once() -> None:
    admission = Admission(0, 1, ONE)
    (first,) = queued(admission, (1, 0))
    with pytest.raises(QueueFull):
        admission.ask(1, 0, 0.0)
    admission.end(first, 0.0)
    (second,) = queued(admission, (1, 0))
    assert order(admission, [first, second]) == [second]


def test_a_waiter_that_nobody_wakes_is_admitted_all_the_same() -> None:
    admission = Admission(0, 1, ONE)
    (ticket,) = queued(admission, (1, 0))
    admission.resize(1, 5.0)
    assert (ticket.admitted, ticket.since, admission.in_flight) == (True, 5.0, 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=60))
def test_the_place_told_is_off_by_less_than_a_turn(tenants: list[int]) -> None:
    admission = Admission(0, 100, ONE)
    tickets = queued(admission, *((tenant, 0) for tenant in tenants))
    told = [admission.position(ticket) for ticket in tickets]
    went = order(admission, tickets)
    for ticket, place in zip(tickets, told, strict=True):
        assert abs(place - 1 - went.index(ticket)) < len(set(tenants))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=80))
def test_the_place_told_across_bands_is_about_right(asked: list[tuple[int, int]]) -> None:
    admission = Admission(0, 100, BANDS)
    tickets = queued(admission, *asked)
    told = [admission.position(ticket) for ticket in tickets]
    went = order(admission, tickets)
    for ticket, place in zip(tickets, told, strict=True):
        assert abs(place - 1 - went.index(ticket)) <= 3 + len(tickets) / 4


def test_the_expected_wait_follows_how_long_places_are_held_and_how_many_there_are() -> None:
    admission = Admission(2, 10, ONE)
    held = [admission.ask(1, 0, 0.0), admission.ask(1, 0, 0.0)]
    first, second = queued(admission, (1, 0), (1, 0))
    assert admission.expected_s(first, 0.0) is None
    admission.end(held[0], 10.0)
    assert admission.expected_s(first, 10.0) == 0.0
    assert admission.expected_s(second, 10.0) == 5.0
    admission.resize(1, 10.0)
    assert admission.expected_s(second, 10.0) == 20.0
    admission.resize(0, 10.0)
    assert admission.expected_s(second, 10.0) is None
    admission.end(held[1], 26.0)
    admission.resize(1, 26.0)
    assert admission.expected_s(second, 26.0) == 11.0
