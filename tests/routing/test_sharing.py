"""Limits and budgets that several gateways share through a real Redis, with gateways and Redis failing in between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.core import metrics
from routing.leases import LEASE_S, Lease
from routing.limits import Hold, Limiter
from routing.over import Over
from routing.sharing import FORGET_S, PREFIX, SCRIPT, Share
from tests.routing.shared_limits import GRANTS, Gateway, adopt, gateways
from tests.services import redis_server

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 20


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with redis_server() as url:
        yield url


@pytest.fixture
def url(server: str) -> Iterator[str]:
    """An empty Redis."""
    with redis.Redis.from_url(server) as client:
        client.flushall()
    yield server
    with redis.Redis.from_url(server) as client:
        client.flushall()


@pytest.fixture
async def two(url: str) -> AsyncIterator[list[Gateway]]:
    async with gateways(url, 2) as started:
        yield started


async def soon(question: str, answer: Callable[[], Awaitable[bool]]) -> None:
    end = time.monotonic() + WITHIN_S
    while not await answer():
        assert time.monotonic() < end, f"not within {WITHIN_S} s: {question}"
        await asyncio.sleep(0.05)


async def let_in(gateway: Gateway, name: str) -> Hold:
    """Reserve as soon as there is room."""
    held: list[Hold] = []

    async def passes() -> bool:
        with contextlib.suppress(Over):
            held.append(await gateway.reserve(name))
        return bool(held)

    await soon(f"{name} has room", passes)
    return held[0]


async def at_once(started: list[Gateway], name: str, count: int) -> list[Hold]:
    """`count` requests at the same instant, dealt out to the gateways; gives those that passed."""
    found = await asyncio.gather(
        *(started[number % len(started)].reserve(name) for number in range(count)), return_exceptions=True
    )
    assert all(isinstance(each, Hold | Over) for each in found), found
    return [each for each in found if isinstance(each, Hold)]


# --- who is let in ---------------------------------------------------------------------------------------------------
async def test_of_fifty_at_once_exactly_one_passes_a_budget_worth_one(two: list[Gateway]) -> None:
    for round_ in range(3):
        passed = await at_once(two, "one request", 50)
        assert len(passed) == 1
        passed[0].release(time.monotonic())
        held = await let_in(two[round_ % 2], "one request")  # also on the other gateway
        with pytest.raises(Over) as caught:
            await two[1 - round_ % 2].reserve("one request")
        assert caught.value.code == "quota_exceeded"
        held.release(time.monotonic())
        (await let_in(two[1 - round_ % 2], "one request")).release(time.monotonic())


async def test_three_gateways_together_run_no_more_than_may(url: str) -> None:
    async with gateways(url, 3) as started:
        passed = await at_once(started, "many slots", 120)
        assert len(passed) <= 40
        while len(passed) < 40:  # what lay idle in one gateway's lease comes to whoever asks
            passed.append(await let_in(started[len(passed) % 3], "many slots"))
        assert await at_once(started, "many slots", 3) == []
        for hold in passed:
            hold.settle(1, 1, time.monotonic())
        assert len([await let_in(started[0], "many slots") for _ in range(40)]) == 40


async def test_requests_a_minute_are_counted_together(two: list[Gateway]) -> None:
    began = time.monotonic()
    passed = await at_once(two, "rates", 200)
    passed_s = time.monotonic() - began
    assert 50 <= len(passed) <= 60 + passed_s + 1
    for hold in passed:
        hold.release(time.monotonic())  # none reached an engine
    assert len([await let_in(two[number % 2], "rates") for number in range(40)]) == 40


async def test_a_lone_gateway_refuses_without_waiting_and_says_why(url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        held = [await gateway.reserve("two slots") for _ in range(2)]
        with pytest.raises(Over, match="Project Blue runs 2 of 2 requests at once"):
            await gateway.reserve("two slots")
        for hold in held:
            hold.release(time.monotonic())


async def test_a_busy_key_asks_redis_far_less_than_once_a_request(two: list[Gateway], url: str) -> None:
    with redis.Redis.from_url(url) as client:
        before = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        for _ in range(2_000):
            (await two[0].reserve("fast")).settle(1, 1, time.monotonic())
        after = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert after - before < 1_000  # a slow machine hands out smaller leases, and asks between requests too


async def test_a_cancelled_wait_leaves_nothing_behind(two: list[Gateway]) -> None:
    for _ in range(20):
        waiting = [asyncio.create_task(two[0].reserve("two slots")) for _ in range(2)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(each, Hold):  # what those before were granted was still there
                each.release(time.monotonic())
            else:
                assert isinstance(each, asyncio.CancelledError)
    for _ in range(2):
        await let_in(two[1], "two slots")


# --- what is spent ---------------------------------------------------------------------------------------------------
def spent(url: str, budget: int) -> float:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        (name,) = client.keys(f"{PREFIX}?:budget:{budget}:*")
        return float(client.hget(name, "used"))


async def test_what_one_gateway_spends_the_other_knows_within_a_second_or_so(two: list[Gateway]) -> None:
    (await two[0].reserve("some money", cost=100)).settle(1, 9_950, time.monotonic())

    async def refuses() -> bool:
        try:
            (await two[1].reserve("some money")).release(time.monotonic())
        except Over as over:
            return "99.5" in str(over) or "0.0000995" in str(over)
        return False

    await soon("the other refuses", refuses)


async def test_a_new_redis_starts_from_what_the_store_counted(url: str) -> None:
    async with gateways(url, 2, b2=9_800) as started:
        held = await let_in(started[0], "some money")
        await let_in(started[1], "some money")
        with pytest.raises(Over):
            await started[0].reserve("some money")
        held.settle(1, 100, time.monotonic())
        await soon("it is reported", lambda: _equals(url, 9_900))


async def test_a_gateway_that_starts_later_does_not_count_anew_what_redis_knows(url: str) -> None:
    async with gateways(url, 1, b2=5_000) as (first,):
        (await first.reserve("some money")).settle(1, 1_000, time.monotonic())
        await soon("it is reported", lambda: _equals(url, 6_000))
        async with gateways(url, 1, b2=6_000) as (second,):  # the store has counted it meanwhile
            (await second.reserve("some money")).settle(1, 100, time.monotonic())
            await soon("it is reported", lambda: _equals(url, 6_100))
    assert spent(url, 2) == 6_100


async def test_a_redis_that_lost_everything_learns_it_again(url: str) -> None:
    async with gateways(url, 2, b2=1_000) as started:
        holds = [await each.reserve("some money") for each in started]
        holds[0].settle(1, 2_000, time.monotonic())
        await soon("it is reported", lambda: _equals(url, 3_000))
        with redis.Redis.from_url(url) as client:
            client.flushall()
        holds[1].settle(1, 4_000, time.monotonic())
        await soon("both are known", lambda: _equals(url, 7_000))


async def _equals(url: str, amount: int) -> bool:
    with contextlib.suppress(ValueError):  # there is none
        return spent(url, 2) == amount
    return False


# --- failures --------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def process(url: str, name: str, requests: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.routing.sharing_process", url, name, str(requests)]
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "llmgw.settings"}
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def begin(*children: subprocess.Popen[str]) -> list[int]:
    """Let them make their requests; gives how many of each passed."""
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    return [int(child.stdout.readline()) for child in children if child.stdout is not None]


async def test_two_processes_let_exactly_one_of_fifty_pass(url: str) -> None:
    with process(url, "one request", 25) as first, process(url, "one request", 25) as second:
        assert sorted(begin(first, second)) == [0, 1]


async def test_the_slots_of_a_killed_gateway_come_back_when_its_lease_ends(url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        with process(url, "two slots", 2) as child:
            assert begin(child) == [2]
            with pytest.raises(Over, match="runs 2 of 2"):
                await gateway.reserve("two slots")
            killed_at = time.monotonic()
            child.kill()
            held = await let_in(gateway, "two slots")
            assert time.monotonic() - killed_at > LEASE_S / 5  # nothing told Redis but the lease's end
        await let_in(gateway, "two slots")
        held.release(time.monotonic())


async def test_what_redis_noted_before_its_clock_was_set_back_ends_as_soon_as_any(url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        (await gateway.reserve("two slots")).release(time.monotonic())
    with redis.Redis.from_url(url, decode_responses=True) as client:
        (name,) = client.keys(f"{PREFIX}*")
        later = time.time() + 3600
        client.hset(name, mapping={"g:dead": f"0 2 2 {later + LEASE_S}", "seen": later, "short": later})
        async with gateways(url, 1) as (gateway,):
            with pytest.raises(Over, match="runs 2 of 2"):
                await gateway.reserve("two slots")
            (await let_in(gateway, "two slots")).release(time.monotonic())
        assert float(client.hget(name, "short")) <= time.time()  # else whoever asks gets no more than that


async def test_a_gateway_that_stops_gives_everything_back_at_once(url: str) -> None:
    async with gateways(url, 1) as (stays,):
        async with gateways(url, 1) as (leaves,):
            for hold in [await leaves.reserve("two slots") for _ in range(2)]:
                hold.settle(1, 1, time.monotonic())
        held = [await stays.reserve("two slots") for _ in range(2)]
        assert len(held) == 2


async def test_without_redis_each_gateway_enforces_alone_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "routing.sharing")
    with redis_server() as url:
        async with gateways(url, 2) as started:
            kept = [await each.reserve("two slots") for each in started]
            process_id = _process_id(url)
            os.kill(process_id, signal.SIGSTOP)  # it hangs: the worst way to be gone
            try:
                for each in started:
                    again = await each.reserve("two slots")
                    with pytest.raises(Over):
                        await each.reserve("two slots")
                    again.release(time.monotonic())
                assert all(each.share.away for each in started)
                assert "llmgw_limits_alone 1.0" in metrics.text().decode()
            finally:
                os.kill(process_id, signal.SIGCONT)
            await soon("both are back", lambda: _none_away(started))
            assert "llmgw_limits_alone 0.0" in metrics.text().decode()

            async def both_refuse() -> bool:
                return not await at_once(started, "two slots", 2)

            await soon("what runs is known to both", both_refuse)
            for hold in kept:
                hold.release(time.monotonic())
            await let_in(started[0], "two slots")
            await let_in(started[0], "two slots")
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "each gateway enforces them for itself" in text]) == 2
    assert len([text for text in said if "Redis answers again" in text]) == 2


async def _none_away(started: list[Gateway]) -> bool:
    return not any(each.share.away for each in started)


def _process_id(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


async def test_a_redis_that_goes_while_nobody_asks_is_missed_all_the_same() -> None:
    with redis_server() as url:
        gateway = Gateway(url)
        await gateway.share.start(gateway.limiter)
        assert not gateway.share.away
    await soon("it is missed", lambda: _away(gateway))
    await gateway.share.stop()


async def _away(gateway: Gateway) -> bool:
    return gateway.share.away


async def test_meters_that_are_gone_are_forgotten_once_they_are_given_back(two: list[Gateway]) -> None:
    share, limiter = two[0].share, two[0].limiter
    held = await two[0].reserve("some money")
    limiter.adopt((), {}, 0, time.monotonic(), time.time())
    held.settle(1, 1, time.monotonic())

    async def forgotten() -> bool:
        share._swept_at = 0.0  # it is time again
        return not share._leases

    await soon("it is forgotten", forgotten)


async def test_a_gateway_starts_and_stops_where_no_redis_is() -> None:
    async with gateways("redis://127.0.0.1:1/0", 1) as (gateway,):
        assert gateway.share.away
        (await gateway.reserve("two slots")).release(time.monotonic())


async def test_what_was_spent_while_redis_was_away_is_told_once(url: str) -> None:
    async with gateways(url, 1, b2=1_000) as (gateway,):
        (await gateway.reserve("some money")).settle(1, 500, time.monotonic())
        await soon("it is reported", lambda: _equals(url, 1_500))
        gateway.share._lost("a test says so")
        (await gateway.reserve("some money")).settle(1, 300, time.monotonic())
        gateway.limiter.ledger.mark()
        gateway.limiter.ledger.flushed()
        adopt(gateway.limiter, b2=1_800)  # all that is in the store
        (await gateway.reserve("some money")).settle(1, 40, time.monotonic())
        await soon("Redis is back", lambda: _none_away([gateway]))
        await soon("it is reported", lambda: _equals(url, 1_840))


async def test_a_key_of_another_kind_in_redis_stops_nobody(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.set(f"{PREFIX}2:project:1:0", "odd")
    async with gateways(url, 1) as (gateway,):
        (await gateway.reserve("two slots")).release(time.monotonic())
        assert gateway.share.away


# --- properties ------------------------------------------------------------------------------------------------------
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "release", "talk", "die"]), st.integers(0, 2), st.integers(1, 4_000)
    ),
    max_size=60,
)


class Model:
    """Three gateways whose talks with a real Redis happen one by one, on a clock that stands still."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self.client = client
        self.script = client.register_script(SCRIPT)
        self.grant = next(grant for grant in GRANTS if grant.digest == name)
        self.names = 0
        self.limiters: list[Limiter] = []
        self.leases: list[tuple[str, Lease]] = []
        self.holds: list[list[tuple[Hold, int]]] = [[], [], []]
        self.settled = self.beyond = self.lost = 0
        for place in range(3):
            self.limiters.append(Limiter())
            self.leases.append(self.start(place))

    def start(self, place: int) -> tuple[str, Lease]:
        self.limiters[place] = limiter = Limiter()
        adopt(limiter)
        limiter.share(True)
        account = limiter.account(self.grant)
        assert account is not None
        self.names += 1
        return f"g:{self.names}", Lease(account.meters[0], limiter.ledger, time.monotonic())

    def talk(self, place: int, *, leaving: bool = False) -> None:
        name, lease = self.leases[place]
        now = time.monotonic()
        said = lease.report(now, leaving=leaving)
        (answer,) = self.script(keys=[lease.key("test:")], args=[name, 3_600, FORGET_S, *said])
        lease.answered(answer, now)

    def reserve(self, place: int, amount: int) -> None:
        account = self.limiters[place].account(self.grant)
        assert account is not None
        for _ in range(2):
            lease = self.leases[place][1]
            try:
                hold = account.try_reserve(amount, amount, time.monotonic())
            except Over:
                return
            if hold is not None:
                self.holds[place].append((hold, amount))
                return
            lease.need(1 if lease.meter.unit == 2 else amount)
            self.talk(place)

    def settle(self, place: int, amount: int) -> None:
        if self.holds[place]:
            hold, reserved = self.holds[place].pop()
            hold.settle(amount, amount, time.monotonic())
            self.settled += amount
            self.beyond += max(amount - reserved, 0)

    def release(self, place: int) -> None:
        if self.holds[place]:
            self.holds[place].pop()[0].release(time.monotonic())

    def die(self, place: int) -> None:
        """Its lease ends, and what it held is everybody's again; what it had not reported is in the store's journal."""
        name, lease = self.leases[place]
        self.client.hset(lease.key("test:"), name, f"{lease.meter.taken} 0 0 0")
        self.settled -= lease.meter.taken - lease.said
        self.holds[place] = []
        self.leases[place] = self.start(place)

    @property
    def reserved(self) -> int:
        return sum(amount for holds in self.holds for _, amount in holds)

    @property
    def running(self) -> int:
        return sum(map(len, self.holds))


@given(steps=STEPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", ["two slots", "some money"])
def test_whatever_gateways_do_and_when_they_die_no_limit_is_passed(
    server: str, name: str, steps: list[tuple[str, int, int]]
) -> None:
    with redis.Redis.from_url(server) as client:
        client.flushall()
        model = Model(client, name)
        for what, place, amount in steps:
            match what:
                case "reserve":
                    model.reserve(place, amount)
                case "settle":
                    model.settle(place, amount)
                case "release":
                    model.release(place)
                case "talk":
                    model.talk(place)
                case _:
                    model.die(place)
            if name == "two slots":
                assert model.running <= 2
            else:
                assert model.settled + model.reserved <= 10_000 + model.beyond
        for place in range(3):
            while model.holds[place]:
                model.release(place)
            model.talk(place, leaving=True)
        assert all(lease.over for _, lease in model.leases)
        if name != "two slots":
            assert float(client.hget(model.leases[0][1].key("test:"), "used") or 0) == model.settled


def test_a_new_period_is_a_new_lease_and_late_answers_of_the_old_one_are_nothing() -> None:
    limiter = Limiter()
    adopt(limiter)
    limiter.share(True)
    meter = next(meter for meter in limiter.meters.values() if meter.name[2] == 1 and meter.unit == 3)
    lease = Lease(meter, limiter.ledger, 0.0)
    lease.need(100)
    lease.report(0.0)
    old_key = lease.key(PREFIX)
    assert meter.ends_at is not None
    limiter.roll(meter, meter.ends)
    lease.answered((b"100", b"50", b"0", b"0", 0, b"x"), 0.0)
    assert (meter.allowed, meter.used) == (0, 0)
    lease.need(100)
    assert lease.report(0.0)[0] == b""
    assert lease.key(PREFIX) != old_key


async def test_a_redis_too_slow_for_a_request_is_as_good_as_none(two: list[Gateway], url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.client_pause(1_500)
        (await two[0].reserve("two slots")).release(time.monotonic())
    assert two[0].share.away


async def test_a_failure_that_nobody_foresaw_is_said_and_sharing_goes_on(
    two: list[Gateway], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.delattr(Lease, "report")
        (await two[0].reserve("two slots")).release(time.monotonic())
    assert "Sharing limits among gateways failed" in caplog.text
    await soon("sharing goes on", lambda: _none_away(two))


def test_a_share_that_never_started_stops() -> None:
    asyncio.run(Share("redis://127.0.0.1:1/0").stop())


@pytest.mark.parametrize("steps", range(6))
async def test_sharing_stops_at_whatever_step_of_a_talk_with_redis_it_is_told_to(url: str, steps: int) -> None:
    """With Python 3.11 a cancellation is lost as Redis has just been written to."""
    gateway = Gateway(url)
    adopt(gateway.limiter, b2=1000)
    await gateway.share.start(gateway.limiter)
    hold = await gateway.reserve("some money")
    hold.settle(1, 2000, time.monotonic())
    waiting = asyncio.create_task(gateway.reserve("some money"))
    for _ in range(steps):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await gateway.share.stop()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
