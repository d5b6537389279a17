"""Limits, budgets and prices as a client meets them: what it is told, what is counted, and what is given back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from catalog import spec
from routing.limits import Meter
from routing.over import MONEY, QUOTA, REQUESTS, SLOTS, TOKENS
from routing.table import Contents
from tenants.limits import Budget, Limit
from tenants.money import Price
from tests.routing.conftest import Start
from tests.routing.gateways import (
    CHAT,
    KEY,
    MemoryStore,
    Running,
    code,
    contents,
    endpoint,
    eventually,
    grant,
    running,
)
from tests.routing.pressure import Gate, admission, at_rest, leave, queue_up
from tests.services import redis_server
from tests.stubs import mock_engine
from tests.stubs.mock_engine import BASE, MockEngine, plain

OTHER = "sk-other" + "o" * 40
PROJECT = Limit("project", 1, "Blue")
CENT = Price("m", 0.0, 1_000_000, 1_000_000)
"""One unit a token."""


def budget(amount: int, **changes: Any) -> Budget:
    return replace(Budget(1, "team", 1, "Ops", "tokens", amount, "total"), **changes)


def limited(
    engine: MockEngine, *limits: Limit, budgets: tuple[Budget, ...] = (), price: Price | None = None, slots: int = 100
) -> Contents:
    """A model `m` and one key with these limits and budgets."""
    made = contents(endpoint(engine.port, slots=slots), grants=(grant(limits=limits, budgets=budgets),))
    return replace(made, prices=() if price is None else (price,))


def meter(gateway: Running, unit: int) -> Meter:
    (found,) = (each for each in gateway.gateway.plane.limiter.meters.values() if each.unit == unit)
    return found


def refused(response: httpx.Response, kind: str) -> str:
    """Its message, when it is a well-made 429 of that kind."""
    assert (response.status_code, code(response)) == (429, kind), response.text
    assert int(response.headers["retry-after"]) >= 1
    message = response.json()["error"]["message"]
    assert isinstance(message, str)
    return message


def answers_with(usage: object) -> mock_engine.Behaviour:
    return mock_engine.says(plain(json.dumps({**BASE, "choices": [], "usage": usage}).encode()))


# --- rates -----------------------------------------------------------------------------------------------------------
async def test_requests_a_minute_are_counted_told_and_refused_beyond(start: Start, engine: MockEngine) -> None:
    async with start(limited(engine, replace(PROJECT, requests_per_minute=3))) as gateway:
        for left in (2, 1, 0):
            response = await gateway.chat({"stream": left == 1, "max_tokens": 1})
            assert response.status_code == 200
            assert response.headers["x-ratelimit-limit-requests"] == "3"
            assert response.headers["x-ratelimit-remaining-requests"] == f"{left}"
            assert response.headers["x-ratelimit-reset-requests"].endswith("s")
        response = await gateway.chat()
        message = refused(response, "rate_limited")
        assert message.startswith("Project Blue has used 3 of 3 requests a minute. Try again in ")
        assert 1 <= int(response.headers["retry-after"]) <= 20
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(engine.requests) == 3
        late = [record for record in await gateway.records(4) if record.status == 429]
        assert [(record.error_code, record.replica, record.cost) for record in late] == [("rate_limited", "", None)]


async def test_tokens_a_minute_are_reserved_by_estimate_and_settled_by_use(start: Start, engine: MockEngine) -> None:
    gate = Gate(engine)
    async with start(limited(engine, replace(PROJECT, tokens_per_minute=1000))) as gateway:
        task = asyncio.create_task(gateway.chat({"max_tokens": 600}))
        await eventually(lambda: gate.inside == 1)
        message = refused(await gateway.chat({"max_tokens": 600}), "rate_limited")
        assert "of 1,000 tokens a minute, and this request may need 6" in message
        gate.open()
        response = await task
        # 50 tokens were used, the rest is back.
        assert int(response.headers["x-ratelimit-remaining-tokens"]) < 400
        response = await gateway.chat({"max_tokens": 600})
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-tokens"] == "1000"
        await at_rest(gateway)
        assert 0 < meter(gateway, TOKENS).used <= 100


async def test_a_request_that_never_fits_is_told_so(start: Start, engine: MockEngine) -> None:
    async with start(limited(engine, replace(PROJECT, tokens_per_minute=100))) as gateway:
        response = await gateway.chat({"max_tokens": 5000})
        assert "it never fits" in refused(response, "rate_limited")
        assert engine.requests == []


@pytest.mark.parametrize("digits", [19, 320, 4299])
@pytest.mark.parametrize("unit", ["rate", "tokens", "money"])
async def test_a_bound_beyond_all_sense_is_refused_and_recorded_as_any_that_never_fits(
    start: Start, engine: MockEngine, digits: int, unit: str
) -> None:
    limits = (replace(PROJECT, tokens_per_minute=100),) if unit == "rate" else ()
    budgets = () if unit == "rate" else (budget(100, unit=unit),)
    async with start(limited(engine, *limits, budgets=budgets, price=CENT)) as gateway:
        asked = b'{"model":"m","n":100,"messages":[],"max_tokens":' + b"9" * digits + b"}"
        response = await gateway.chat(asked)
        kind = {"rate": "rate_limited", "tokens": "quota_exceeded", "money": "budget_exceeded"}[unit]
        assert len(refused(response, kind)) < 400
        (row,) = await gateway.records()
        assert row.error_code == kind


async def test_requests_at_once_are_refused_beyond_and_free_when_one_ends(start: Start, engine: MockEngine) -> None:
    gate = Gate(engine)
    async with start(limited(engine, replace(PROJECT, concurrent=2))) as gateway:
        tasks = await queue_up(gateway, [("1", KEY), ("2", KEY)])
        message = refused(await gateway.chat(), "rate_limited")
        assert message == "Project Blue runs 2 of 2 requests at once. Try again when one of them has ended."
        assert gate.inside == 2
        gate.let_go()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        third = asyncio.create_task(gateway.chat())
        await eventually(lambda: len(gate.users) == 3)
        gate.open()
        assert {answer.status_code for answer in await asyncio.gather(*tasks, third)} == {200}
        await at_rest(gateway)


async def test_who_waits_in_a_queue_holds_its_slot_and_gives_it_back(start: Start, engine: MockEngine) -> None:
    gate = Gate(engine)
    async with start(limited(engine, replace(PROJECT, concurrent=2), slots=1), queue_wait_s=60) as gateway:
        tasks = await queue_up(gateway, [("1", KEY), ("2", KEY)])
        assert admission(gateway).waiting == 1
        refused(await gateway.chat(), "rate_limited")
        tasks[1].cancel()
        await eventually(lambda: meter(gateway, SLOTS).reserved == 1)
        tasks += await queue_up(gateway, [("3", KEY)])
        gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.users == ["1", "3"]
        await at_rest(gateway)


async def test_a_request_refused_for_its_slot_takes_nothing_of_the_minute(start: Start, engine: MockEngine) -> None:
    gate = Gate(engine)
    async with start(limited(engine, replace(PROJECT, concurrent=1, requests_per_minute=2))) as gateway:
        (task,) = await queue_up(gateway, [("1", KEY)])
        for _ in range(5):
            assert "at once" in refused(await gateway.chat(), "rate_limited")
        gate.open()
        assert (await task).status_code == 200
        assert (await gateway.chat()).status_code == 200  # judged by the first one alone
        assert "2 of 2 requests a minute" in refused(await gateway.chat(), "rate_limited")


async def test_the_narrowest_of_a_path_counts_and_keys_below_share(start: Start, engine: MockEngine) -> None:
    team = Limit("team", 1, "Ops", requests_per_minute=3)
    keys = (
        grant(limits=(team, replace(PROJECT, requests_per_minute=100))),
        grant(OTHER, key_id=2, project_id=2, limits=(team, Limit("key", 2, "ci", requests_per_minute=1))),
    )
    async with start(contents(endpoint(engine.port), grants=keys)) as gateway:
        first = await gateway.chat(key=OTHER)
        assert first.headers["x-ratelimit-limit-requests"] == "1"
        assert refused(await gateway.chat(key=OTHER), "rate_limited").startswith("Key ci has used 1 of 1")
        assert (await gateway.chat()).headers["x-ratelimit-remaining-requests"] == "1"
        assert (await gateway.chat()).status_code == 200
        assert refused(await gateway.chat(), "rate_limited").startswith("Team Ops has used 3 of 3")


async def test_without_limits_nothing_is_told_of_any(start: Start, engine: MockEngine) -> None:
    async with start(limited(engine)) as gateway:
        response = await gateway.chat()
        assert not [name for name in response.headers if name.startswith("x-ratelimit")]
        assert gateway.gateway.plane.limiter.account(grant()) is None


async def test_errors_tell_of_limits_too_once_the_key_is_known(start: Start, engine: MockEngine) -> None:
    async with start(limited(engine, replace(PROJECT, requests_per_minute=10))) as gateway:
        assert (await gateway.chat({"model": "q"})).headers["x-ratelimit-remaining-requests"] == "10"
        engine.behaviour = mock_engine.fails(b"400 Bad Request")
        assert (await gateway.chat()).headers["x-ratelimit-remaining-requests"] == "9"
        assert "x-ratelimit-limit-requests" not in (await gateway.chat(key="sk-no" + "x" * 40)).headers


async def test_a_limit_that_is_raised_holds_at_once_and_what_was_used_stays_used(
    start: Start, engine: MockEngine
) -> None:
    store = MemoryStore(limited(engine, replace(PROJECT, requests_per_minute=2)))
    async with start(store) as gateway:
        for _ in range(2):
            assert (await gateway.chat()).status_code == 200
        refused(await gateway.chat(), "rate_limited")
        store.change(grants=(grant(limits=(replace(PROJECT, requests_per_minute=4),)),))
        await eventually(lambda: meter(gateway, REQUESTS).amount == 4)
        for _ in range(2):
            assert (await gateway.chat()).status_code == 200
        refused(await gateway.chat(), "rate_limited")


# --- what is reserved ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "path", "completion"),
    [
        ({"max_tokens": 10}, "chat/completions", 10),
        ({"max_completion_tokens": 7, "max_tokens": 10}, "chat/completions", 7),
        ({"max_completion_tokens": None, "max_tokens": 10}, "chat/completions", 10),
        ({"max_output_tokens": 9}, "responses", 9),
        ({"max_tokens": 10, "n": 3}, "chat/completions", 30),
        ({"n": 3}, "chat/completions", 192),
        ({}, "chat/completions", 64),
        ({"max_tokens": None, "n": None}, "chat/completions", 64),
        ({"max_tokens": -1}, "completions", 64),
        ({"max_tokens": "10", "n": "3"}, "completions", 64),
        ({"max_tokens": True, "n": True}, "completions", 64),
        ({"max_tokens": 0}, "completions", 0),
        ({"max_output_tokens": 1}, "chat/completions", 64),
        ({"max_completion_tokens": 1, "max_tokens": 10}, "completions", 10),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "responses", 64),
        ({"max_tokens": 10, "n": -5}, "completions", 10),
        ({"input": "hello"}, "embeddings", 0),
        ({"query": "q", "documents": ["a", "b"], "max_tokens": 9}, "rerank", 0),
    ],
)
async def test_what_a_request_may_use_is_reserved(
    start: Start, engine: MockEngine, body: dict[str, Any], path: str, completion: int
) -> None:
    gate = Gate(engine)
    store = limited(engine, budgets=(budget(10**9), budget(10**9, budget_id=2, unit="money")), price=CENT)
    async with start(store, assumed_output_tokens=64) as gateway:
        prompts: dict[str, dict[str, Any]] = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}
        sent = json.dumps({"model": "m", **prompts.get(path, {}), **body}).encode()
        task = asyncio.create_task(gateway.chat(sent, path=f"/v1/{path}"))
        await eventually(lambda: gate.inside == 1)
        assert meter(gateway, QUOTA).reserved == len(sent) // 4 + completion
        assert meter(gateway, MONEY).reserved == len(sent) // 4 + completion
        gate.open()
        await task
        await at_rest(gateway)
        assert (meter(gateway, QUOTA).used, meter(gateway, MONEY).used) == (50, 50)


async def test_the_dearest_of_a_chain_is_reserved_and_the_one_that_served_is_paid(
    start: Start, engine: MockEngine
) -> None:
    gate = Gate(engine)
    models = (spec.Model(name="cheap", fallbacks=("m", "free")), spec.Model(name="m"), spec.Model(name="free"))
    made = contents(
        endpoint(engine.port, model="cheap"),
        models=models,
        grants=(grant(budgets=(budget(10**9, unit="money"),)),),
    )
    prices = (Price("cheap", 0.0, 1_000_000, 1_000_000), Price("m", 0.0, 5_000_000, 5_000_000))
    async with start(replace(made, prices=prices)) as gateway:
        sent = json.dumps({**CHAT, "model": "cheap", "max_tokens": 10}).encode()
        task = asyncio.create_task(gateway.chat(sent))
        await eventually(lambda: gate.inside == 1)
        assert meter(gateway, MONEY).reserved == 5 * (len(sent) // 4 + 10)
        gate.open()
        await task
        await at_rest(gateway)
        assert meter(gateway, MONEY).used == 50


# --- budgets ---------------------------------------------------------------------------------------------------------
WORTH_ONE = 1000
BODY = json.dumps({**CHAT, "max_tokens": 700}).encode()


@pytest.mark.parametrize("unit", ["tokens", "money"])
async def test_of_fifty_at_once_exactly_one_passes_a_budget_worth_one_and_the_sum_is_right(
    start: Start, engine: MockEngine, unit: Any
) -> None:
    gate = Gate(engine)
    kind = "quota_exceeded" if unit == "tokens" else "budget_exceeded"
    store = MemoryStore(limited(engine, budgets=(budget(WORTH_ONE, unit=unit),), price=CENT))
    async with start(store) as gateway:
        tasks = [asyncio.create_task(gateway.chat(BODY)) for _ in range(50)]
        await eventually(lambda: sum(task.done() for task in tasks) == 49 and gate.users)
        assert len(gate.users) == 1
        gate.open()
        answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers].count(200) == 1
        messages = {refused(answer, kind) for answer in answers if answer.status_code != 200}
        assert len(messages) == 1
        assert "of team Ops in total has " in messages.pop()
        await at_rest(gateway)
        records = await gateway.records(50)
        spent = sum((record.prompt_tokens or 0) + (record.completion_tokens or 0) for record in records)
        assert spent == sum(record.cost or 0 for record in records) == 50
        found = meter(gateway, QUOTA if unit == "tokens" else MONEY)
        assert found.used == 50
        # 950 are left: the same request fits again, and the budget is used up by what is really used.
        for _ in range(5):
            assert (await gateway.chat(BODY)).status_code == 200
        assert found.used == 300
        refused(await gateway.chat(BODY), kind)


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
async def test_what_was_reserved_comes_back_when_nothing_was_used(
    start: Start, engine: MockEngine, stream: bool
) -> None:
    body = {"max_tokens": 700, "stream": stream}
    async with start(limited(engine, budgets=(budget(WORTH_ONE),))) as gateway:
        engine.behaviour = mock_engine.fails(b"500 Oops")
        assert (await gateway.chat(body)).status_code == 502
        assert meter(gateway, QUOTA).used == 0
        engine.behaviour = mock_engine.fails(b"400 Bad Request")
        assert (await gateway.chat(body)).status_code == 400
        assert meter(gateway, QUOTA).used == 0
        gate = Gate(engine)
        for _ in range(3):
            before = len(gate.users)
            await leave(gateway, body, lambda before=before: len(gate.users) > before)  # type: ignore[misc]
            await at_rest(gateway)
        # The engine had begun on three prompts; how far it got is estimated by their length.
        assert 0 < meter(gateway, QUOTA).used < 150
        gate.open()
        assert (await gateway.chat(body)).status_code == 200
        await at_rest(gateway)
        records = await gateway.records(6)
        assert meter(gateway, QUOTA).used == sum((r.prompt_tokens or 0) + (r.completion_tokens or 0) for r in records)


async def test_a_budget_is_not_forgotten_by_a_restart(start: Start, engine: MockEngine) -> None:
    store = MemoryStore(limited(engine, budgets=(budget(800, unit="money"),), price=CENT))
    async with start(store) as gateway:
        assert (await gateway.chat(BODY)).status_code == 200
        assert (await gateway.chat(BODY)).status_code == 200
    assert sum(record.cost or 0 for record in store.usage.values()) == 100
    async with start(store) as gateway:
        message = refused(await gateway.chat(BODY), "budget_exceeded")
        assert "has 0.000001 of 0.000008 used" in message


async def test_a_budget_that_only_warns_refuses_nobody(start: Start, engine: MockEngine) -> None:
    async with start(limited(engine, budgets=(budget(1, stops=False),))) as gateway:
        for _ in range(3):
            assert (await gateway.chat(BODY)).status_code == 200


async def test_a_model_without_a_price_costs_nothing_and_says_so(start: Start, engine: MockEngine) -> None:
    async with start(limited(engine, budgets=(budget(1, unit="money"),))) as gateway:
        for _ in range(3):
            assert (await gateway.chat(BODY)).status_code == 200
        assert [record.cost for record in await gateway.records(3)] == [None] * 3
        assert meter(gateway, MONEY).used == 0


async def test_the_price_of_the_day_counts_with_cached_tokens_at_theirs_and_a_fee_for_each(
    start: Start, engine: MockEngine
) -> None:
    prices = (
        Price("m", 0.0, 9_000_000, 9_000_000),
        Price("m", 1000.0, 2_000_000, 10_000_000, cached_input=1_000_000, request=7),
        Price("m", 10.0**11, 99_000_000, 99_000_000),
        Price("other", 0.0, 99_000_000, 99_000_000),
    )
    usage = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 60}}
    engine.behaviour = answers_with(usage)
    async with start(replace(limited(engine), prices=prices)) as gateway:
        await gateway.chat()
        (record,) = await gateway.records()
        assert record.cost == 7 + 40 * 2 + 60 + 3 * 10


async def test_refusals_and_failures_cost_nothing_but_what_was_used(start: Start, engine: MockEngine) -> None:
    async with start(limited(engine, price=replace(CENT, request=5))) as gateway:
        await gateway.chat({"model": "q"})
        engine.behaviour = mock_engine.fails(b"500 Oops")
        await gateway.chat()
        engine.behaviour = mock_engine.fails(b"400 Bad Request")
        await gateway.chat()
        assert [record.cost for record in await gateway.records(3)] == [None] * 3


# --- several gateways ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


async def test_two_gateways_that_share_a_redis_let_one_of_fifty_pass(
    engine: MockEngine, tmp_path: Path, redis_url: str
) -> None:
    gate = Gate(engine)
    store = MemoryStore(limited(engine, budgets=(budget(WORTH_ONE, unit="money"),), price=CENT))
    async with (
        running(tmp_path / "one", store, redis_url=redis_url) as one,
        running(tmp_path / "two", store, redis_url=redis_url) as two,
    ):
        await eventually(lambda: one.gateway.plane.table.targets and two.gateway.plane.table.targets)
        tasks = [asyncio.create_task((one, two)[number % 2].chat(BODY)) for number in range(50)]
        await eventually(lambda: sum(task.done() for task in tasks) == 49 and gate.users)
        assert len(gate.users) == 1
        gate.open()
        answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers].count(200) == 1
        for answer in answers:
            if answer.status_code != 200:
                refused(answer, "budget_exceeded")
        await at_rest(one)
        await at_rest(two)
        records = await one.records(50)
        assert sum(record.cost or 0 for record in records) == 50


async def test_who_leaves_while_a_lease_is_asked_for_leaves_nothing_reserved(
    engine: MockEngine, tmp_path: Path, redis_url: str
) -> None:
    limits = (Limit("project", 77, "Blue", concurrent=1),)
    gate = Gate(engine)
    store = MemoryStore(limited(engine, *limits))
    async with (
        running(tmp_path / "one", store, redis_url=redis_url) as one,
        running(tmp_path / "two", store, redis_url=redis_url) as two,
    ):
        await eventually(lambda: one.gateway.plane.table.targets and two.gateway.plane.table.targets)
        (task,) = await queue_up(one, [("1", KEY)])
        for _ in range(5):  # waits for what the other gateway has, or hears that there is nothing to wait for
            before = len(store.usage)
            await leave(two, {}, lambda before=before: two.gateway.plane.active or len(store.usage) > before)  # type: ignore[misc]
            await two.quiet()
        gate.open()
        assert (await task).status_code == 200
        await at_rest(one)
        await at_rest(two)
        for gateway in (two, one, two):
            found: list[int] = []
            for _ in range(100):
                response = await gateway.chat()
                found.append(response.status_code)
                if response.status_code == 200:
                    break
                await asyncio.sleep(0.1)
            assert found[-1] == 200
