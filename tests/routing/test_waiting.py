"""Requests for a model that no replica serves yet: they wait, bounded in number and time, and are told the truth."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from catalog import spec
from nodes.state import Endpoint
from routing import loops
from routing.table import Failing
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
    raw_chat,
)
from tests.routing.pressure import Gate, admission, at_rest, leave, queue_up
from tests.stubs.mock_engine import DONE, TOKEN, MockEngine

ON_DEMAND = spec.Model(name="m", scaling=spec.Scaling(min=0, max=1))


def cold(*endpoints: Endpoint, model: spec.Model = ON_DEMAND, **changes: Any) -> MemoryStore:
    """A store with an on-demand model that nothing serves."""
    return MemoryStore(replace(contents(*endpoints, models=(model,)), **changes))


def loading(state: str = "loading") -> Endpoint:
    return endpoint(None, state=state)


@pytest.fixture
def gate(engine: MockEngine) -> Gate:
    return Gate(engine)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Demand is told ten times a second."""
    monkeypatch.setattr(loops, "DEMAND_S", 0.1)
    monkeypatch.setattr(loops, "COLD_AGAIN_S", 0.1)


async def one_of_many(gateway: Running, number: int) -> tuple[int, dict[bytes, bytes], bytes]:
    """One request over a connection of its own: status, headers and body."""
    body = json.dumps({**CHAT, "user": f"{number}"}).encode()
    got = await gateway.raw(raw_chat(body, extra=b"Connection: close\r\n"), timeout_s=100)
    head, _, body = got.partition(b"\r\n\r\n")
    lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:]]
    return int(head.split(b" ")[1]), {name.lower(): value for name, _, value in lines}, body


# --- many ------------------------------------------------------------------------------------------------------------
async def test_five_hundred_at_once_make_one_load_a_bounded_queue_and_no_stampede(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    store = cold()
    async with start(store, queue_limit=100, on_demand_wait_s=100) as gateway:
        began = time.monotonic()
        tasks = [asyncio.create_task(one_of_many(gateway, number)) for number in range(500)]
        await eventually(lambda: sum(task.done() for task in tasks) == 400, timeout_s=60)
        assert admission(gateway).waiting == 100
        for task in tasks:
            if task.done():
                status, headers, body = task.result()
                assert (status, json.loads(body)["error"]["code"]) == (503, "model_loading")
                assert int(headers[b"retry-after"]) >= 1
        await eventually(lambda: store.demand)
        messages = len(store.demand)
        assert set(store.demand) == {"m"}
        assert messages <= 2 + (time.monotonic() - began) / loops.COLD_AGAIN_S
        store.change(endpoints=(loading(),))
        store.change(endpoints=(endpoint(engine.port, slots=4),))
        await eventually(lambda: gate.inside == 4)
        assert admission(gateway).waiting == 96
        gate.open()
        results = [result for result in await asyncio.gather(*tasks) if result[0] == 200]
        assert len(results) == 100
        assert gate.most == 4
        await at_rest(gateway)
        assert len(await gateway.records(500)) == 500


async def test_those_who_waited_for_a_replica_go_in_the_order_in_which_they_came(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    store = cold()
    async with start(store) as gateway:
        users = [f"{number}" for number in range(10)]
        tasks = await queue_up(gateway, [(user, KEY) for user in users])
        store.change(endpoints=(endpoint(engine.port, slots=2),))
        for number in range(2, 10):
            await eventually(lambda number=number: len(gate.users) == number)  # type: ignore[misc]
            gate.let_go()
        gate.open()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        # Two are let in at once, over two connections; which of them the engine hears first is open.
        assert [sorted(gate.users[:2]), *gate.users[2:]] == [users[:2], *users[2:]]
        assert gate.most == 2


# --- what is told ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("states", "says"), [((), "is being started"), (("fetching",), "is loading (fetching)")])
async def test_when_the_wait_is_over_it_is_told_that_the_model_is_loading(
    start: Start, states: tuple[str, ...], says: str
) -> None:
    async with start(cold(*map(loading, states)), on_demand_wait_s=0.3) as gateway:
        response = await gateway.chat()
        assert (response.status_code, code(response)) == (503, "model_loading")
        assert int(response.headers["retry-after"]) >= 1
        assert says in response.json()["error"]["message"]
        assert int(response.headers["x-llmgw-queue-ms"]) >= 300
        await at_rest(gateway)
        (record,) = await gateway.records()
        assert (record.status, record.error_code, record.prompt_tokens) == (503, "model_loading", None)
        assert record.explained is not None
        assert (record.explained.loading, record.explained.position) == (True, 1)


async def test_who_came_while_it_loaded_is_served_once_it_is_ready(start: Start, engine: MockEngine) -> None:
    store = cold()
    async with start(store) as gateway:
        asked = asyncio.create_task(gateway.chat())
        await eventually(lambda: admission(gateway).waiting == 1)
        store.change(endpoints=(endpoint(engine.port),))
        response = await asked
        assert (response.status_code, response.headers["x-llmgw-replica"]) == (200, "m-1")
        (record,) = await gateway.records()
        assert record.explained is not None
        assert record.explained.loading
        assert record.queue_ms > 0


async def test_a_model_that_is_kept_up_is_waited_for_as_well_and_needs_no_demand(
    start: Start, engine: MockEngine, often: None
) -> None:
    store = cold(loading("starting"), model=spec.Model(name="m", scaling=spec.Scaling(1, 1)))
    async with start(store) as gateway:
        asked = asyncio.create_task(gateway.chat())
        await eventually(lambda: admission(gateway).waiting == 1)
        store.change(endpoints=(endpoint(engine.port),))
        assert (await asked).status_code == 200
        assert store.demand == []


async def test_a_waiting_stream_hears_which_stage_the_load_is_in(start: Start, engine: MockEngine) -> None:
    store = cold()
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 1}).encode()
    async with start(store, on_demand_wait_s=100) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_chat(body, extra=b"X-Llmgw-Progress: sse\r\n"))
        async with asyncio.timeout(60):
            got = await reader.readuntil(b'"stage":"loading","position":1')
            store.change(endpoints=(loading("fetching"),))
            got += await reader.readuntil(b'"stage":"fetching","position":1')
            store.change(endpoints=(endpoint(engine.port),))
            got += await reader.readuntil(DONE)
        assert b'"expected_s"' not in got
        assert TOKEN in got
        writer.close()


# --- what does not come ----------------------------------------------------------------------------------------------
async def test_a_load_that_fails_is_told_to_those_who_wait_at_once_and_with_its_reason(
    start: Start, engine: MockEngine, often: None
) -> None:
    store = cold(loading())
    async with start(store, on_demand_wait_s=100) as gateway:
        tasks = await queue_up(gateway, [(f"{number}", KEY) for number in range(5)])
        reason = "the weights do not fit"
        store.change(endpoints=(), failing=(Failing("m", reason, time.time() + 40),))
        for response in await asyncio.gather(*tasks):
            assert (response.status_code, code(response)) == (503, "engine_down")
            assert f"Model m did not start ({reason})" in response.json()["error"]["message"]
            assert 30 <= int(response.headers["retry-after"]) <= 41
        await at_rest(gateway)
        late = await gateway.chat()  # and whoever comes now does not wait
        assert (code(late), late.headers["x-llmgw-queue-ms"]) == ("engine_down", "0")
        store.change(endpoints=(endpoint(engine.port),), failing=())
        await eventually(lambda: gateway.gateway.plane.table.targets)
        assert (await gateway.chat()).status_code == 200


async def test_a_failed_load_that_is_being_tried_again_is_waited_for(start: Start, engine: MockEngine) -> None:
    store = cold(loading("starting"), failing=(Failing("m", "killed by signal 9", time.time() + 40),))
    async with start(store) as gateway:
        asked = asyncio.create_task(gateway.chat())
        await eventually(lambda: admission(gateway).waiting == 1)
        store.change(endpoints=(endpoint(engine.port),))
        assert (await asked).status_code == 200


async def test_a_model_that_leaves_the_catalog_leaves_nobody_waiting(start: Start) -> None:
    store = cold()
    async with start(store, on_demand_wait_s=100) as gateway:
        held = admission(gateway)
        tasks = await queue_up(gateway, [("1", KEY), ("2", KEY)])
        store.change(models=(spec.Model(name="other"),))
        for response in await asyncio.gather(*tasks):
            assert (response.status_code, code(response)) == (404, "model_unknown")
            assert "left the catalog" in response.json()["error"]["message"]
        assert (held.in_flight, held.waiting) == (0, 0)


async def test_a_model_that_is_switched_off_leaves_nobody_waiting(start: Start) -> None:
    store = cold()
    async with start(store, on_demand_wait_s=100) as gateway:
        tasks = await queue_up(gateway, [("1", KEY)])
        store.change(models=(spec.Model(name="m", scaling=spec.Scaling(0, 0)),))
        response = await tasks[0]
        assert (response.status_code, code(response)) == (503, "no_endpoint")
        assert int(response.headers["retry-after"]) >= 1


async def test_an_unknown_model_is_404_and_nobodys_demand(start: Start, often: None) -> None:
    store = cold()
    async with start(store, on_demand_wait_s=0.2) as gateway:
        response = await gateway.chat({"model": "nobody"})
        assert (response.status_code, code(response)) == (404, "model_unknown")
        other = await gateway.chat({"model": "m"}, key="sk-nobody" + "x" * 40)
        assert other.status_code == 401
        await asyncio.sleep(0.3)
        assert store.demand == []


async def test_a_key_that_may_not_use_the_model_starts_nothing(start: Start, often: None) -> None:
    store = cold(grants=(grant(models=frozenset({"other"})),))
    async with start(store) as gateway:
        assert (await gateway.chat()).status_code == 403
        await asyncio.sleep(0.3)
        assert store.demand == []


async def test_who_leaves_during_the_load_frees_its_place_and_the_load_goes_on(
    start: Start, engine: MockEngine, often: None
) -> None:
    store = cold()
    async with start(store) as gateway:
        held = admission(gateway)
        for _ in range(5):
            await leave(gateway, {}, lambda: held.waiting == 1)
            await eventually(lambda: held.waiting == 0)
        await eventually(lambda: "m" in store.demand)
        store.change(endpoints=(endpoint(engine.port),))
        await eventually(lambda: held.capacity == 4)
        assert engine.requests == []
        assert (await gateway.chat()).status_code == 200
        await at_rest(gateway)
        assert [record.error_code for record in await gateway.records(6)] == ["client_left"] * 5 + [""]


async def test_a_replica_that_goes_while_others_wait_is_waited_for_again(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    store = cold(endpoint(engine.port, slots=1))
    async with start(store) as gateway:
        tasks = await queue_up(gateway, [("1", KEY), ("2", KEY)])
        store.change(endpoints=(loading(),))
        await eventually(lambda: not gateway.gateway.plane.table.targets)
        gate.open()  # the first one ends where it is
        assert (await tasks[0]).status_code == 200
        assert admission(gateway).waiting == 1
        store.change(endpoints=(endpoint(engine.port),))
        assert (await tasks[1]).status_code == 200
        await at_rest(gateway)


# --- demand ----------------------------------------------------------------------------------------------------------
async def test_each_use_keeps_demand_fresh_and_no_request_is_needed_once_it_runs(
    start: Start, engine: MockEngine, gate: Gate, often: None
) -> None:
    store = cold(endpoint(engine.port))
    async with start(store) as gateway:
        await asyncio.sleep(0.3)
        assert store.demand == []  # nobody asked
        tasks = await queue_up(gateway, [("long", KEY)])
        await eventually(lambda: len(store.demand) >= 3)  # a long answer is use all the time
        gate.open()
        await tasks[0]
        await at_rest(gateway)
        await asyncio.sleep(0.3)
        told = len(store.demand)
        await asyncio.sleep(0.3)
        assert len(store.demand) == told
        await gateway.chat()
        await eventually(lambda: len(store.demand) > told)


async def test_who_waits_keeps_demand_fresh_for_as_long_as_the_load_takes(start: Start, often: None) -> None:
    store = cold(loading())
    async with start(store) as gateway:
        tasks = await queue_up(gateway, [("1", KEY)])
        await eventually(lambda: len(store.demand) >= 4)
        tasks[0].cancel()
        await at_rest(gateway)


async def test_demand_that_the_store_did_not_take_is_told_again(start: Start, engine: MockEngine, often: None) -> None:
    store = cold()
    async with start(store) as gateway:
        await eventually(lambda: gateway.gateway.plane.confirmed_at is not None)
        store.away = True
        asked = asyncio.create_task(gateway.chat())
        await eventually(lambda: admission(gateway).waiting == 1)
        await asyncio.sleep(0.3)
        store.away = False
        await eventually(lambda: "m" in store.demand)
        store.change(endpoints=(endpoint(engine.port),))
        assert (await asked).status_code == 200


async def test_an_aliass_and_an_adapters_demand_is_their_models(start: Start, often: None) -> None:
    model = spec.Model(
        name="m", aliases=("chat",), scaling=spec.Scaling(0, 1), adapters=(spec.Adapter("blue", "/adapters/blue"),)
    )
    store = cold(model=model)
    async with start(store, on_demand_wait_s=0.2) as gateway:
        for name in ("chat", "blue"):
            store.demand.clear()
            assert code(await gateway.chat({"model": name})) == "model_loading"
            await eventually(lambda: store.demand)
            assert set(store.demand) == {"m"}
