"""Traps of accounting: slots that leak, tokens billed twice, budgets that all pass, records lost with a process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from routing import accounting, ejection
from routing.over import QUOTA
from tenants.limits import Budget, Limit
from tenants.money import Price
from tests.bench.rig import ROOT, free_port
from tests.routing.conftest import Start
from tests.routing.gateways import CHAT, KEY, code, contents, endpoint, eventually, grant
from tests.routing.pressure import WAYS, Gate, at_rest, first_byte_s
from tests.routing.test_process import environment, process, ready, seed
from tests.stubs import mock_engine
from tests.stubs.mock_engine import BASE, MockEngine, plain

TWO = Limit("key", 1, "ci", concurrent=2)


# --- slots -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
async def test_a_key_with_two_slots_has_both_after_fifty_requests_that_end_so(
    start: Start, engine: MockEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ejection, "FAILURES", 1000)  # or most of them would not reach the engine
    down = endpoint(free_port(), "down-1", "down")
    budget = Budget(1, "key", 1, "ci", "tokens", 10**9, "total")
    store = contents(endpoint(engine.port), down, grants=(grant(limits=(TWO,), budgets=(budget,)),))
    async with start(store, first_byte_timeout_s=first_byte_s(way), attempts=1) as gateway:
        for _ in range(25):
            await asyncio.gather(*(WAYS[way](gateway, engine, KEY) for _ in range(2)))
            await gateway.quiet()
        await at_rest(gateway)
        engine.behaviour = None
        both = await asyncio.gather(gateway.chat(), gateway.chat())
        assert [answer.status_code for answer in both] == [200, 200]
        await at_rest(gateway)
        (used,) = (meter.used for meter in gateway.gateway.plane.limiter.meters.values() if meter.unit == QUOTA)
        records = await gateway.records(52)
        assert used == sum((record.prompt_tokens or 0) + (record.completion_tokens or 0) for record in records)


async def test_a_failure_of_the_gateway_itself_gives_slots_and_reservations_back(
    start: Start, engine: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.write

    def fails(handle: int, data: bytes) -> int:
        if b'"request_id"' in data:
            raise KeyError("nobody foresaw this")
        return really(handle, data)

    budget = Budget(1, "key", 1, "ci", "tokens", 10**9, "total")
    async with start(contents(endpoint(engine.port), grants=(grant(limits=(TWO,), budgets=(budget,)),))) as gateway:
        with monkeypatch.context() as broken:
            broken.setattr(os, "write", fails)
            for body in ({}, {"model": "q"}, {"stream": True, "max_tokens": 1}) * 3:
                with suppress(httpx.HTTPError):
                    assert (await gateway.chat(body)).status_code in (200, 500)
            await at_rest(gateway)
        assert (await gateway.chat()).status_code == 200
        await at_rest(gateway)


async def test_new_names_of_users_open_no_budget_of_their_own(start: Start, engine: MockEngine) -> None:
    gate = Gate(engine)
    budget = Budget(1, "project", 1, "Blue", "tokens", 200, "total")
    async with start(contents(endpoint(engine.port), grants=(grant(budgets=(budget,)),))) as gateway:
        tasks = [asyncio.create_task(gateway.chat({"user": f"new-{n}", "max_tokens": 100})) for n in range(50)]
        await eventually(lambda: gate.inside == 1 and sum(task.done() for task in tasks) == 49)
        gate.open()
        answers = await asyncio.gather(*tasks)
        assert sorted(answer.status_code for answer in answers) == [200] + [429] * 49


# --- tokens ----------------------------------------------------------------------------------------------------------
PRICE = Price("m", 0.0, 10_000_000, 100_000_000, cached_input=1_000_000)
"""Ten units a token in, one for a cached one, a hundred for one out."""
LARGE = accounting.MAX_TOKENS
USAGES: list[tuple[str, Any, tuple[int | None, int | None, int | None, int | None], int | None]] = [
    (
        "reasoning and cached",
        {
            "prompt_tokens": 2008,
            "completion_tokens": 266,
            "total_tokens": 2274,
            "completion_tokens_details": {"reasoning_tokens": 261},
            "prompt_tokens_details": {"cached_tokens": 1500},
        },
        (2008, 1500, 266, 261),
        508 * 10 + 1500 + 266 * 100,
    ),
    (
        "more cached than there is",
        {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}},
        (5, 5, 1, None),
        5 + 100,
    ),
    (
        "no details",
        {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": None},
        (5, None, 1, None),
        150,
    ),
    ("a wrong total", {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 99}, (5, None, 1, None), 150),
    ("as text and floats", {"prompt_tokens": "12", "completion_tokens": 12.0}, (12, None, 12, None), 1320),
    ("negative", {"prompt_tokens": 5, "completion_tokens": -3}, (5, None, 0, None), 50),
    ("absurd", {"prompt_tokens": 10**18, "completion_tokens": 1}, (LARGE, None, 1, None), LARGE * 10 + 100),
    ("embeddings", {"prompt_tokens": 8, "total_tokens": 8}, (8, None, 0, None), 80),
]


@pytest.mark.parametrize(("usage", "tokens", "cost"), [row[1:] for row in USAGES], ids=[row[0] for row in USAGES])
async def test_whatever_usage_an_engine_tells_is_counted_once_and_passed_unchanged(
    start: Start, engine: MockEngine, usage: Any, tokens: tuple[int | None, ...], cost: int
) -> None:
    body = json.dumps({**BASE, "choices": [{"index": 0}] * 3, "usage": usage}).encode()
    engine.behaviour = mock_engine.says(plain(body))
    async with start(replace(contents(endpoint(engine.port)), prices=(PRICE,))) as gateway:
        response = await gateway.chat({"n": 3})
        assert (response.status_code, response.content) == (200, body)
        (record,) = await gateway.records()
        found = (record.prompt_tokens, record.cached_tokens, record.completion_tokens, record.reasoning_tokens)
        assert found == tokens
        assert record.cost == cost
        assert not record.estimated


@pytest.mark.parametrize("usage", [None, {}, "x", [], {"prompt_tokens": None, "completion_tokens": None}])
async def test_usage_that_says_nothing_is_estimated_and_marked_and_never_nothing(
    start: Start, engine: MockEngine, usage: Any
) -> None:
    body = json.dumps({**BASE, "choices": [{"index": 0, "text": "hello " * 40}], "usage": usage}).encode()
    engine.behaviour = mock_engine.says(plain(body))
    async with start(replace(contents(endpoint(engine.port)), prices=(PRICE,))) as gateway:
        response = await gateway.chat()
        assert (response.status_code, response.content) == (200, body)
        (record,) = await gateway.records()
        assert record.estimated
        assert record.prompt_tokens
        assert record.completion_tokens
        assert record.cost == record.prompt_tokens * 10 + record.completion_tokens * 100


# --- records ---------------------------------------------------------------------------------------------------------
async def ask_until_it_dies(port: int, key: str, ended: list[str]) -> None:
    """Whole answers and streams over a few connections; the ids of those that ended as they should."""

    async def some(http: httpx.AsyncClient, stream: bool) -> None:
        with suppress(httpx.TransportError):
            while True:
                body = {**CHAT, "stream": stream, "max_tokens": 3}
                response = await http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                if not stream or response.text.endswith("data: [DONE]\n\n"):
                    ended.append(response.headers["x-request-id"])

    headers = {"authorization": f"Bearer {key}"}
    base = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base, headers=headers, trust_env=False, timeout=60) as http:
        await asyncio.gather(*(some(http, stream) for stream in (True, False, False, True)))


def rows(data: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(data / "llmgw.sqlite3", timeout=30) as database:
        found = database.execute(query).fetchall()
    database.close()
    return found


@asynccontextmanager
async def nursery(data: Path) -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    """Yields what begins a gateway on a port and gives its pid; none is left afterwards."""
    pids: list[int] = []
    with (data / "log").open("ab") as log:
        parent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.routing.nursery"),
            cwd=ROOT,
            env=environment(data),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert parent.stdin is not None
    assert parent.stdout is not None
    one_at_a_time = asyncio.Lock()

    async def begin(port: int) -> int:
        async with one_at_a_time:
            parent.stdin.write(b"%d\n" % port)
            pid = int(await parent.stdout.readline())
            pids.append(pid)
        await ready(data, port, lambda: Path(f"/proc/{pid}").exists())
        return pid

    try:
        yield begin
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.stdin.close()
        async with asyncio.timeout(60):
            await parent.wait()


SUMS = "SELECT {}, SUM(prompt_tokens), SUM(completion_tokens) FROM {} "


@pytest.mark.timeout(900)
async def test_killed_twenty_times_under_load_every_request_that_ended_has_exactly_one_record(tmp_path: Path) -> None:
    """Two gateways over one store, killed in turn, so that each finds what the other has left behind."""
    kills = 20
    async with MockEngine() as engine:
        key = await seed(engine, tmp_path)
        ended: list[str] = []

        async def lives_and_dies(times: int) -> None:
            for _ in range(times):
                port = free_port()
                pid = await begin(port)
                mine: list[str] = []
                asking = asyncio.create_task(ask_until_it_dies(port, key, mine))
                enough = random.randint(0, 120)
                await eventually(lambda: len(mine) >= enough, timeout_s=100)  # noqa: B023
                os.kill(pid, signal.SIGKILL)
                await asking
                ended.extend(mine)

        async with nursery(tmp_path) as begin:
            await asyncio.gather(lives_and_dies(kills // 2), lives_and_dies(kills // 2))
        ids = "SELECT request_id FROM tenants_usage"
        async with process(tmp_path, free_port()):
            await eventually(lambda: set(ended) <= {row[0] for row in rows(tmp_path, ids)}, timeout_s=100)
            await eventually(lambda: not list((tmp_path / "journal").glob("*.jsonl")), timeout_s=100)
        found = [row[0] for row in rows(tmp_path, ids)]
        assert len(ended) == len(set(ended))
        assert len(found) == len(set(found))
        assert len(found) - len(ended) <= 4 * kills  # finished, while their clients never saw the end
        assert rows(tmp_path, SUMS.format("COUNT(*)", "tenants_usage")) == rows(
            tmp_path, SUMS.format("SUM(requests)", "tenants_usageslot")
        )


async def test_a_request_that_was_refused_and_one_that_waited_have_one_record_each(
    start: Start, engine: MockEngine
) -> None:
    gate = Gate(engine)
    async with start(contents(endpoint(engine.port, slots=1), grants=(grant(limits=(TWO,)),))) as gateway:
        tasks = [asyncio.create_task(gateway.chat()) for _ in range(10)]
        await eventually(lambda: gate.inside == 1 and sum(task.done() for task in tasks) == 8)
        gate.open()
        answers = await asyncio.gather(*tasks)
        assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 8
        assert {code(answer) for answer in answers if answer.status_code == 429} == {"rate_limited"}
        records = await gateway.records(10)
        assert sorted(record.request_id for record in records) == sorted(
            answer.headers["x-request-id"] for answer in answers
        )
