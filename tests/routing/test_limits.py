"""Limits and budgets of one process: who is let in, what is given back, and what those are told who are not."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from routing.limits import Account, Hold, Limiter, Meter
from routing.over import NEVER_RETRY_S, Over
from tenants.keys import Grant
from tenants.limits import Budget, Limit
from tenants.periods import bounds

WALL = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
MONTH = bounds("month", "UTC", WALL)[0]
PROJECT = Limit("project", 1, "Blue")


def key(name: str, limits: tuple[Limit, ...] = (), budgets: tuple[Budget, ...] = ()) -> Grant:
    return Grant(name, 1, "sk-1234", 1, None, None, None, limits, budgets)


def budget(amount: int, **other: object) -> Budget:
    return replace(Budget(7, "team", 3, "Ops", "tokens", amount, "month"), **other)  # type: ignore[arg-type]


def adopt(limiter: Limiter, *grants: Grant, now: float = 0.0, wall: float = WALL, **spent: int) -> None:
    said = {int(name[1:]): (MONTH, amount) for name, amount in spent.items()}
    limiter.adopt(grants, said, limiter.ledger.asked(), now, wall + now)


def account(limiter: Limiter, grant: Grant) -> Account:
    found = limiter.account(grant)
    assert found is not None
    return found


def alone(*limits: Limit, budgets: tuple[Budget, ...] = (), **spent: int) -> Account:
    """The account of a key with these limits."""
    limiter, grant = Limiter(), key("k", limits, budgets)
    adopt(limiter, grant, **spent)
    return account(limiter, grant)


def passes(account: Account, tokens: int = 10, cost: int = 10, now: float = 0.0) -> Hold:
    hold = account.try_reserve(tokens, cost, now)
    assert hold is not None
    return hold


def refused(account: Account, tokens: int = 10, cost: int = 10, now: float = 0.0) -> Over:
    with pytest.raises(Over) as caught:
        account.try_reserve(tokens, cost, now)
    return caught.value


def state(account: Account) -> list[tuple[float, int]]:
    return [(meter.used, meter.reserved) for meter in account.meters]


# --- properties ------------------------------------------------------------------------------------------------------
SLOTS, REQUESTS, TOKENS, QUOTA, MONEY = 3, 20, 1_000, 5_000, 50_000
PATH = (
    replace(PROJECT, concurrent=SLOTS, requests_per_minute=REQUESTS),
    Limit("key", 2, "ci", tokens_per_minute=TOKENS, concurrent=2),
)
BUDGETS = (budget(QUOTA, time_zone="Europe/Berlin"), budget(MONEY, budget_id=8, unit="money", period="day"))


class Requests(RuleBasedStateMachine):
    """Two keys of one project, one with limits of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = Limiter()
        self.grants = (key("a", PATH, BUDGETS), key("b", PATH[:1], BUDGETS))
        self.limiter.adopt(self.grants, {}, 0, 0.0, WALL)
        self.now = 0.0
        self.open: list[tuple[Hold, int, int]] = []
        self.beyond = {"tokens": 0, "money": 0}

    def of(self, unit: int) -> list[Meter]:
        return [meter for meter in self.limiter.meters.values() if meter.unit == unit]

    @rule(which=st.integers(0, 1), tokens=st.integers(0, 600), cost=st.integers(0, 9_000))
    def reserve(self, which: int, tokens: int, cost: int) -> None:
        found = account(self.limiter, self.grants[which])
        for meter in found.meters:
            meter.used_at(self.now)  # so that nothing but the reservation changes the buckets below
        before = state(found)
        try:
            hold = found.try_reserve(tokens, cost, self.now)
        except Over:
            hold = None
        if hold is None:
            assert state(found) == before
        else:
            self.open.append((hold, tokens, cost))

    @rule(index=st.integers(0, 9), tokens=st.integers(0, 900), cost=st.none() | st.integers(0, 12_000))
    def settle(self, index: int, tokens: int, cost: int | None) -> None:
        if self.open:
            hold, reserved, reserved_cost = self.open.pop(index % len(self.open))
            self.beyond["tokens"] += max(tokens - reserved, 0)
            self.beyond["money"] += max((cost or 0) - reserved_cost, 0)
            hold.settle(tokens, cost, self.now)
            after = [(meter.used, meter.reserved) for meter in self.limiter.meters.values()]
            hold.settle(5, 5, self.now)
            hold.release(self.now)
            assert after == [(meter.used, meter.reserved) for meter in self.limiter.meters.values()]

    @rule(index=st.integers(0, 9))
    def release(self, index: int) -> None:
        if self.open:
            self.open.pop(index % len(self.open))[0].release(self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 61.0, 5_000.0, 90_000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(same=st.booleans())
    def reload(self, same: bool) -> None:
        if not same:
            self.grants = (key("a", PATH, BUDGETS), key("b", PATH[:1], BUDGETS))
        self.limiter.adopt(self.grants, {}, self.limiter.ledger.asked(), self.now, WALL + self.now)

    @invariant()
    def what_runs_is_what_is_reserved_and_no_more_than_may(self) -> None:
        project = next(meter for meter in self.of(2) if meter.name[1] == "project")
        assert project.reserved == len(self.open) <= SLOTS
        assert all(0 <= meter.reserved <= meter.amount for meter in self.of(2))

    @invariant()
    def buckets_are_never_fuller_than_a_minute(self) -> None:
        for meter in (*self.of(0), *self.of(1)):
            assert meter.used >= 0
            assert meter.reserved == 0
        assert all(meter.used <= meter.amount + 1e-3 for meter in self.of(0))

    @invariant()
    def budgets_are_overspent_by_no_more_than_what_went_beyond_its_estimate(self) -> None:
        for unit, kind in ((3, "tokens"), (4, "money")):
            for meter in self.of(unit):
                assert meter.used + meter.reserved <= meter.amount + self.beyond[kind]
                assert meter.reserved == sum(each[1 if unit == 3 else 2] for each in self.open)

    def teardown(self) -> None:
        for hold, _, _ in self.open:
            hold.release(self.now)
        assert all(meter.reserved == 0 for meter in self.limiter.meters.values())


Requests.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRequests = Requests.TestCase


@given(st.lists(st.floats(0, 30), min_size=1, max_size=40))
def test_in_any_minute_no_more_than_two_buckets_full_get_in_and_on_average_one(gaps: list[float]) -> None:
    found, now, times = alone(replace(PROJECT, requests_per_minute=5)), 0.0, []
    for gap in gaps:
        now += gap
        try:
            passes(found, now=now).settle(1, 1, now)
        except Over:
            continue
        times.append(now)
    assert len(times) <= 5 + now * 5 / 60 + 1e-3
    for start in times:
        assert len([time for time in times if start <= time < start + 60]) <= 10


# --- rates and slots -------------------------------------------------------------------------------------------------
def test_a_key_without_limits_has_no_account() -> None:
    limiter = Limiter()
    grants = (key("free"), key("warned", (PROJECT,), (budget(1, stops=False),)))
    adopt(limiter, *grants)
    assert [limiter.account(grant) for grant in grants] == [None, None]
    assert limiter.meters == {}


def test_requests_a_minute_come_back_one_by_one() -> None:
    found = alone(replace(PROJECT, requests_per_minute=2))
    passes(found)
    passes(found)
    over = refused(found)
    assert (over.code, over.resets_s) == ("rate_limited", pytest.approx(30))
    assert str(over) == "Project Blue has used 2 of 2 requests a minute. Try again in 30 s."
    refused(found, now=29.9)
    passes(found, now=30)
    refused(found, now=30)


def test_tokens_a_minute_are_reserved_by_estimate_and_settled_by_use() -> None:
    found = alone(replace(PROJECT, tokens_per_minute=600))
    first = passes(found, tokens=500)
    assert str(refused(found, tokens=200)) == (
        "Project Blue has used 500 of 600 tokens a minute, and this request may need 200. Try again in 10 s."
    )
    first.settle(100, None, 0.0)
    second = passes(found, tokens=500)
    second.settle(900, None, 0.0)
    assert refused(found, tokens=1).resets_s == pytest.approx(40.1)  # in debt by what went beyond the estimate


def test_a_request_larger_than_the_limit_is_told_that_it_never_fits() -> None:
    over = refused(alone(replace(PROJECT, tokens_per_minute=600)), tokens=601)
    assert (over.code, over.resets_s) == ("rate_limited", NEVER_RETRY_S)
    assert "may need 601 tokens, and project Blue is limited to 600 a minute: it never fits" in str(over)


def test_a_limit_of_nothing_lets_nothing_in() -> None:
    assert "may send no requests" in str(refused(alone(replace(PROJECT, requests_per_minute=0))))
    assert "may run no requests" in str(refused(alone(replace(PROJECT, concurrent=0))))
    limited = alone(replace(PROJECT, requests_per_minute=0))
    assert dict(limited.headers(0.0))[b"x-ratelimit-reset-requests"] == b"60s"


def test_what_is_refused_for_one_limit_takes_nothing_of_another() -> None:
    found = alone(replace(PROJECT, requests_per_minute=2, concurrent=1))
    running = passes(found)
    for _ in range(20):
        over = refused(found)
        assert str(over) == "Project Blue runs 1 of 1 requests at once. Try again when one of them has ended."
    running.settle(1, 1, 0.0)
    passes(found)


def test_a_request_that_reached_no_engine_counts_nowhere() -> None:
    found = alone(replace(PROJECT, requests_per_minute=1, tokens_per_minute=10, concurrent=1), budgets=(budget(10),))
    for _ in range(50):
        passes(found).release(0.0)
    assert state(found) == [(0, 0)] * 4


def test_the_tightest_on_the_path_is_what_the_headers_say() -> None:
    found = alone(
        Limit("organisation", 1, "Org", requests_per_minute=100, tokens_per_minute=6_000),
        Limit("key", 2, "ci", requests_per_minute=60),
    )
    passes(found, tokens=150)
    passes(found, tokens=0)
    assert found.headers(0.0) == [
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"58"),
        (b"x-ratelimit-reset-requests", b"2s"),
        (b"x-ratelimit-limit-tokens", b"6000"),
        (b"x-ratelimit-remaining-tokens", b"5850"),
        (b"x-ratelimit-reset-tokens", b"1.5s"),
    ]
    assert found.headers(2.0)[1] == (b"x-ratelimit-remaining-requests", b"60")
    assert alone(replace(PROJECT, concurrent=1)).headers(0.0) == []


def test_a_wider_limit_may_be_the_tighter_one() -> None:
    found = alone(Limit("team", 1, "T", requests_per_minute=6), Limit("key", 2, "ci", requests_per_minute=60))
    assert found.headers(0.0)[0] == (b"x-ratelimit-limit-requests", b"6")


def test_of_several_that_are_reached_the_one_that_lasts_longest_is_told() -> None:
    found = alone(replace(PROJECT, requests_per_minute=1), budgets=(budget(10),), b7=10)
    assert refused(found).code == "quota_exceeded"


# --- budgets ---------------------------------------------------------------------------------------------------------
def test_a_used_up_token_quota_names_itself_and_its_reset() -> None:
    over = refused(alone(budgets=(budget(10_000, time_zone="Europe/Berlin"),)), tokens=10_001)
    assert over.code == "quota_exceeded"
    assert str(over) == (
        "The token quota of team Ops for this month has 0 of 10,000 used; this request may need 10,001."
        " It resets on 2026-12-01 at 00:00 (Europe/Berlin)."
    )
    assert over.resets_s == datetime(2026, 11, 30, 23, tzinfo=UTC).timestamp() - WALL


def test_money_that_requests_in_flight_hold_may_come_back_soon() -> None:
    found = alone(budgets=(budget(10**8, unit="money"),), b7=5 * 10**7)
    hold = passes(found, cost=4 * 10**7)
    over = refused(found, cost=2 * 10**7)
    assert (over.code, over.resets_s) == ("budget_exceeded", 2)
    assert str(over) == (
        "The budget of team Ops for this month has 0.50 of 1.00 used and 0.40 reserved for requests in flight;"
        " this request may cost 0.20. Try again when some of them have ended."
        " It resets on 2026-12-01 at 00:00 (UTC)."
    )
    hold.settle(1, None, 0.0)  # a model without a price costs nothing
    passes(found, cost=2 * 10**7)


def test_a_budget_without_end_says_so() -> None:
    over = refused(alone(budgets=(budget(5, period="total"),)))
    assert str(over).endswith("in total has 0 of 5 used; this request may need 10. It never resets: have it raised.")


def test_what_costs_nothing_passes_a_budget_that_is_used_up() -> None:
    found = alone(budgets=(budget(10, unit="money"),), b7=11)
    refused(found, cost=1)
    passes(found, cost=0).settle(1, 0, 0.0)


def test_a_budget_begins_anew_when_its_period_ends_and_takes_what_is_in_flight_along() -> None:
    limiter, grant = Limiter(), key("k", (), (budget(100, period="day"),))
    limiter.adopt((grant,), {7: (bounds("day", "UTC", WALL)[0], 90)}, 0, 0.0, WALL)
    found = account(limiter, grant)
    across = passes(found, tokens=10)
    refused(found, tokens=1, now=12 * 3600 - 1)
    passes(found, tokens=90, now=12 * 3600).release(12 * 3600)
    refused(found, tokens=91, now=12 * 3600)
    across.settle(10, 0, 36 * 3600)  # a day later: it counts when it ends
    assert state(found) == [(10, 0)]
    assert limiter.ledger.uncounted(found.meters[0]) == 10


def test_a_wall_clock_that_jumps_moves_periods_and_refills_no_bucket() -> None:
    limiter, grant = Limiter(), key("k", (replace(PROJECT, requests_per_minute=1),), (budget(100),))
    adopt(limiter, grant, b7=95)
    found = account(limiter, grant)
    passes(found, tokens=5)
    adopt(limiter, grant, now=1.0, wall=WALL + 86_400 * 365)
    assert refused(found, tokens=1, now=1.0).code == "rate_limited"
    adopt(limiter, grant, now=2.0, b7=95)
    assert refused(found, tokens=1, now=61.0).code == "quota_exceeded"


def test_budgets_of_one_period_begin_anew_together() -> None:
    limiter, grant = Limiter(), key("k", (), (budget(10), budget(20, budget_id=8)))
    adopt(limiter, grant, b7=4, b8=5)
    assert [meter.used for meter in account(limiter, grant).meters] == [4, 5]
    adopt(limiter, grant, wall=WALL + 3 * 86_400)
    assert [meter.used for meter in account(limiter, grant).meters] == [0, 0]


def test_spend_is_what_the_store_says_and_what_it_cannot_know_yet() -> None:
    limiter, grant = Limiter(), key("k", (), (budget(100),))
    adopt(limiter, grant, b7=10)
    found = account(limiter, grant)
    (meter,) = found.meters
    passes(found, tokens=20).settle(30, 0, 0.0)
    adopt(limiter, grant, b7=10)
    assert meter.used == 40
    limiter.ledger.mark()
    limiter.ledger.flushed()
    adopt(limiter, grant, b7=60)  # others have used 20
    assert meter.used == 60
    adopt(limiter, grant)  # the store did not say
    assert meter.used == 60


def test_the_answer_of_a_period_that_has_ended_is_not_taken() -> None:
    limiter, grant = Limiter(), key("k", (), (budget(100),))
    adopt(limiter, grant, wall=WALL + 3 * 86_400, b7=99)
    passes(account(limiter, grant), tokens=100)


# --- reloads ---------------------------------------------------------------------------------------------------------
def test_what_is_used_and_running_survives_a_change_of_the_limits() -> None:
    limiter, grant = Limiter(), key("k", (replace(PROJECT, requests_per_minute=60, concurrent=2),))
    adopt(limiter, grant)
    hold = passes(account(limiter, grant))
    passes(account(limiter, grant))
    changed = key("k", (replace(PROJECT, name="Green", requests_per_minute=600, concurrent=1),))
    adopt(limiter, changed, now=0.5)
    found = account(limiter, changed)
    assert str(refused(found, now=0.5)).startswith("Project Green runs 2 of 1")
    hold.release(0.5)
    refused(found, now=0.5)
    assert dict(found.headers(0.5))[b"x-ratelimit-remaining-requests"] == b"599"


def test_meters_that_are_gone_are_forgotten() -> None:
    limiter = Limiter()
    for number in range(20):
        adopt(limiter, key("k", (Limit("key", number, "x", concurrent=1, tokens_per_minute=1),)))
        assert len(limiter.meters) == 2
    adopt(limiter)
    assert limiter.meters == {}
    assert limiter.account(key("k")) is None


def test_keys_of_one_project_share_its_account_and_its_meters() -> None:
    limiter, limits = Limiter(), (replace(PROJECT, concurrent=1),)
    both = (key("a", limits), key("b", limits), key("c", (*limits, Limit("key", 3, "c", concurrent=5))))
    adopt(limiter, *both)
    first, second, third = (account(limiter, grant) for grant in both)
    assert first is second
    passes(first)
    assert str(refused(third)).startswith("Project Blue runs 1 of 1")


def test_a_used_up_lease_is_no_refusal_and_takes_nothing() -> None:
    limiter, grant = Limiter(), key("k", (replace(PROJECT, requests_per_minute=5, concurrent=5),))
    adopt(limiter, grant)
    limiter.share(True)
    found = account(limiter, grant)
    assert found.try_reserve(1, 1, 0.0) is None
    assert {(meter.unit, need) for meter, need in found.lacking(1, 1, 0.0)} == {(0, 1), (2, 1)}
    for meter in found.meters:
        meter.allowed, meter.until = 1, 5.0
    passes(found)
    assert found.try_reserve(1, 1, 0.0) is None
    found.meters[0].short_until = 1.0
    assert "runs 1 of 5" in str(refused(found))
    limiter.share(False)
    passes(found)


def test_the_store_cannot_take_back_what_gateways_have_told_each_other() -> None:
    limiter, grant = Limiter(), key("k", (), (budget(100),))
    adopt(limiter, grant, b7=10)
    limiter.share(True)
    (meter,) = account(limiter, grant).meters
    meter.used = 50
    adopt(limiter, grant, b7=20)
    assert meter.used == 50
