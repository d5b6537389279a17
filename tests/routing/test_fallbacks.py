"""Fallbacks over real sockets: in order, each model once, and only where another model can help."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from catalog import spec
from routing.explain import Skipped
from tenants.money import Price
from tests.routing.conftest import Start
from tests.routing.gateways import (
    KEY,
    MemoryStore,
    code,
    contents,
    endpoint,
    eventually,
    grant,
    key_of,
)
from tests.routing.pressure import Gate, admission, at_rest, leave, queue_up
from tests.stubs import mock_engine
from tests.stubs.mock_engine import TOKEN, MockEngine

CIRCLES = {"a": ("b", "c"), "b": ("a", "d"), "c": ("b",), "d": ()}
CHAIN = {"a": ("b", "c"), "b": (), "c": ()}


class Fleet:
    """One engine for each model, and what a store says of them."""

    def __init__(self, engines: Mapping[str, MockEngine]) -> None:
        self.engines = engines

    def __getitem__(self, name: str) -> MockEngine:
        return self.engines[name]

    def store(
        self,
        chains: Mapping[str, Sequence[str]] = CHAIN,
        *,
        cold: Sequence[str] = (),
        slots: int = 4,
        prices: Sequence[Price] = (),
        **changes: Any,
    ) -> MemoryStore:
        """`cold`: on-demand models without a replica."""
        models = tuple(
            spec.Model(name=name, fallbacks=tuple(to), scaling=spec.Scaling(0 if name in cold else 1, 1))
            for name, to in chains.items()
        )
        made = contents(*(self.replica(name, slots) for name in chains if name not in cold), models=models, **changes)
        store = MemoryStore(made)
        store.change(prices=tuple(prices))
        return store

    def replica(self, name: str, slots: int = 4) -> Any:
        return endpoint(self[name].port, f"{name}-1", name, slots=slots)

    def asked(self) -> dict[str, int]:
        """How many requests each engine got."""
        return {name: len(engine.requests) for name, engine in self.engines.items() if engine.requests}


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet({name: await stack.enter_async_context(MockEngine(key=key_of(f"{name}-1"))) for name in "abcd"})


def served_by(response: httpx.Response) -> tuple[int, str | None, str | None]:
    return response.status_code, response.headers.get("x-llmgw-model"), response.headers.get("x-llmgw-replica")


# --- order and number ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
async def test_they_are_tried_in_order_until_one_answers(start: Start, fleet: Fleet, stream: bool) -> None:
    fleet["a"].behaviour = fleet["b"].behaviour = mock_engine.fails(b"500 Oops")
    async with start(fleet.store()) as gateway:
        response = await gateway.chat({"model": "a", "stream": stream, "max_tokens": 1})
        assert served_by(response) == (200, "c", "c-1")
        assert fleet.asked() == {"a": 1, "b": 1, "c": 1}
        assert fleet["c"].requests[0].json["model"] == "c"
        (record,) = await gateway.records()
        assert (record.model, record.replica, record.status) == ("c", "c-1", 200)
        assert record.explained is not None
        assert record.explained.asked == "a"
        assert record.explained.skipped == (Skipped("a", "engine_failed"), Skipped("b", "engine_failed"))
        assert [attempt.replica for attempt in record.explained.attempts] == ["a-1", "b-1"]


@pytest.mark.parametrize("behaviour", [mock_engine.fails(b"500 Oops"), mock_engine.resets, mock_engine.breaks_off])
async def test_in_a_circle_of_fallbacks_each_model_is_tried_once(
    start: Start, fleet: Fleet, caplog: pytest.LogCaptureFixture, behaviour: mock_engine.Behaviour
) -> None:
    for engine in fleet.engines.values():
        engine.behaviour = behaviour
    async with start(fleet.store(CIRCLES)) as gateway:
        response = await gateway.chat({"model": "a"})
        assert (response.status_code, code(response)) == (502, "engine_failed")
        assert "The engine of model a failed" in response.json()["error"]["message"]
        assert fleet.asked() == {"a": 1, "b": 1, "c": 1}
        assert (await gateway.http.get("/health")).status_code == 200
        (record,) = await gateway.records()
        assert (record.model, record.error_code, record.cost) == ("a", "engine_failed", None)
        await at_rest(gateway)
    said = [line for line in caplog.records if line.name.startswith("routing")]
    assert len(said) <= 2 * 3
    assert all(not line.exc_info and len(line.getMessage()) < 500 for line in said)


async def test_many_requests_that_fail_everywhere_write_little(
    start: Start, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    for engine in fleet.engines.values():
        engine.behaviour = mock_engine.fails(b"500 Oops", b"x" * 100_000, b"text/html")
    async with start(fleet.store(CIRCLES)) as gateway:
        body = {"model": "a", "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a":'}}]}]}
        answers = await asyncio.gather(*(gateway.chat(body) for _ in range(50)))
        assert {code(answer) for answer in answers} <= {"engine_failed", "engine_down"}
        assert max(len(answer.content) for answer in answers) < 1000
        await at_rest(gateway)
    assert sum(len(line.getMessage()) for line in caplog.records) < 100_000


async def test_a_refusal_of_the_engine_is_nobody_elses_business(start: Start, fleet: Fleet) -> None:
    for engine in fleet.engines.values():
        engine.behaviour = mock_engine.fails(b"400 Bad Request")
    async with start(fleet.store(CIRCLES)) as gateway:
        for _ in range(5):
            response = await gateway.chat({"model": "a"})
            assert (response.status_code, response.headers["x-llmgw-model"]) == (400, "a")
        assert fleet.asked() == {"a": 5}
        assert all(target.health.failures == 0 for target in gateway.gateway.plane.table.targets)


async def test_a_stream_that_broke_after_its_first_byte_is_not_begun_anew(start: Start, fleet: Fleet) -> None:
    fleet["a"].behaviour = mock_engine.streams(TOKEN, then_close=True)
    async with start(fleet.store()) as gateway:
        response = await gateway.chat({"model": "a", "stream": True})
        assert response.text.startswith(TOKEN.decode())
        assert '"engine_failed"' in response.text
        assert fleet.asked() == {"a": 1}


async def test_a_model_whose_engine_is_down_falls_back_and_comes_back(start: Start, fleet: Fleet) -> None:
    port = fleet["a"].port
    await fleet["a"].stop()
    async with start(fleet.store()) as gateway:
        for _ in range(6):
            assert served_by(await gateway.chat({"model": "a"}))[:2] == (200, "b")
        await fleet["a"].start(port)
        try:
            for _ in range(200):
                if served_by(await gateway.chat({"model": "a"}))[1] == "a":
                    break
                await asyncio.sleep(0.1)
            assert fleet.asked()["a"] >= 1
        finally:
            await fleet["a"].stop()
            await fleet["a"].start()
        assert len(fleet["c"].requests) == 0


async def test_an_alias_leads_to_its_models_fallbacks_and_a_fallback_may_be_named_by_alias(
    start: Start, fleet: Fleet
) -> None:
    fleet["a"].behaviour = mock_engine.fails(b"500 Oops")
    models = (
        spec.Model(name="a", aliases=("chat",), fallbacks=("Second", "a", "b", "gone")),
        spec.Model(name="b", aliases=("second",)),
    )
    async with start(contents(fleet.replica("a"), fleet.replica("b"), models=models)) as gateway:
        response = await gateway.chat({"model": "chat"})
        assert served_by(response) == (200, "b", "b-1")
        assert fleet.asked() == {"a": 1, "b": 1}
        assert fleet["b"].requests[0].json["model"] == "b"


# --- no room ---------------------------------------------------------------------------------------------------------
PRICES = (Price("a", 0.0, 1_000_000, 1_000_000), Price("b", 0.0, 3_000_000, 7_000_000))


async def test_a_model_without_room_falls_back_after_a_while_at_the_price_of_the_one_that_serves(
    start: Start, fleet: Fleet
) -> None:
    gate = Gate(fleet["a"])
    async with start(fleet.store(slots=1, prices=PRICES), fallback_after_s=0.3) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)], "a")
        response = await gateway.chat({"model": "a"})
        assert served_by(response) == (200, "b", "b-1")
        assert int(response.headers["x-llmgw-queue-ms"]) >= 300
        assert admission(gateway, "a").waiting == 0
        gate.open()
        assert served_by(await task) == (200, "a", "a-1")
        records = {record.model: record for record in await gateway.records(2)}
        assert (records["a"].cost, records["b"].cost) == (10 + 40, 10 * 3 + 40 * 7)
        assert records["b"].explained is not None
        assert records["b"].explained.skipped == (Skipped("a", "engine_busy"),)
        assert records["b"].queue_ms >= 300
        await at_rest(gateway)


async def test_room_in_time_is_better_than_a_fallback(start: Start, fleet: Fleet) -> None:
    gate = Gate(fleet["a"])
    async with start(fleet.store(slots=1), fallback_after_s=60) as gateway:
        tasks = await queue_up(gateway, [("first", KEY), ("second", KEY)], "a")
        gate.open()
        for task in tasks:
            assert served_by(await task) == (200, "a", "a-1")


async def test_a_full_queue_falls_back_at_once(start: Start, fleet: Fleet) -> None:
    gate = Gate(fleet["a"])
    async with start(fleet.store(slots=1), queue_limit=0, fallback_after_s=60) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)], "a")
        response = await gateway.chat({"model": "a"})
        assert served_by(response) == (200, "b", "b-1")
        assert response.headers["x-llmgw-queue-ms"] == "0"
        gate.open()
        await task


async def test_where_nobody_has_room_it_is_told_of_the_model_that_was_asked_for(start: Start, fleet: Fleet) -> None:
    gates = [Gate(fleet[name]) for name in "abc"]
    async with start(fleet.store(slots=1), fallback_after_s=0.1, queue_wait_s=0.2) as gateway:
        tasks = [task for name in "abc" for task in await queue_up(gateway, [(name, KEY)], name)]
        response = await gateway.chat({"model": "a"})
        assert (response.status_code, code(response)) == (503, "engine_busy")
        assert response.json()["error"]["message"].startswith("Model a had no room")
        assert int(response.headers["x-llmgw-queue-ms"]) >= 400
        for gate in gates:
            gate.open()
        await asyncio.gather(*tasks)
        record = next(record for record in await gateway.records(4) if record.error_code)
        assert (record.model, record.replica) == ("a", "")
        assert record.explained is not None
        assert [each.model for each in record.explained.skipped] == ["a", "b", "c"]
        await at_rest(gateway)


async def test_the_record_names_no_replica_of_another_model_than_its_own(start: Start, fleet: Fleet) -> None:
    gate = Gate(fleet["a"])
    fleet["b"].behaviour = fleet["c"].behaviour = mock_engine.fails(b"500 Oops")
    async with start(fleet.store(slots=1), fallback_after_s=0.1) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)], "a")
        assert code(await gateway.chat({"model": "a"})) == "engine_busy"
        gate.open()
        await task
        record = next(record for record in await gateway.records(2) if record.error_code)
        assert (record.model, record.replica, record.node) == ("a", "", "")
        assert record.explained is not None
        assert [attempt.replica for attempt in record.explained.attempts] == ["b-1", "c-1"]


async def test_who_leaves_while_it_waits_for_room_asks_no_fallback(start: Start, fleet: Fleet) -> None:
    gate = Gate(fleet["a"])
    async with start(fleet.store(slots=1), fallback_after_s=60) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)], "a")
        await leave(gateway, {"model": "a"}, lambda: admission(gateway, "a").waiting == 1)
        await eventually(lambda: admission(gateway, "a").waiting == 0)
        gate.open()
        await task
        await at_rest(gateway)
        assert fleet.asked() == {"a": 1}


# --- loading ---------------------------------------------------------------------------------------------------------
async def test_while_a_model_loads_its_fallback_serves_at_once_and_the_load_is_asked_for(
    start: Start, fleet: Fleet
) -> None:
    store = fleet.store(cold=("a",))
    async with start(store) as gateway:
        response = await gateway.chat({"model": "a"})
        assert served_by(response) == (200, "b", "b-1")
        assert response.headers["x-llmgw-queue-ms"] == "0"
        await eventually(lambda: store.demand)
        assert set(store.demand) == {"a"}
        store.change(endpoints=tuple(fleet.replica(name) for name in "abc"))
        await eventually(lambda: gateway.gateway.plane.table.names["a"].targets)
        assert served_by(await gateway.chat({"model": "a"})) == (200, "a", "a-1")


async def test_a_model_that_failed_to_load_or_is_off_falls_back_too(start: Start, fleet: Fleet) -> None:
    models = (spec.Model(name="a", fallbacks=("b",)), spec.Model(name="b"))
    async with start(contents(fleet.replica("b"), models=models)) as gateway:
        assert served_by(await gateway.chat({"model": "a"})) == (200, "b", "b-1")


async def test_where_the_whole_chain_is_cold_the_model_itself_is_waited_for(start: Start, fleet: Fleet) -> None:
    store = fleet.store(cold=("a", "b", "c"))
    async with start(store) as gateway:
        asked = asyncio.create_task(gateway.chat({"model": "a"}))
        await eventually(lambda: admission(gateway, "a").waiting == 1)
        await eventually(lambda: "a" in store.demand)
        store.change(endpoints=(fleet.replica("a"),))
        assert served_by(await asked) == (200, "a", "a-1")
        await at_rest(gateway)


async def test_a_model_that_became_ready_while_its_fallback_had_no_room_serves(start: Start, fleet: Fleet) -> None:
    gate = Gate(fleet["b"])
    store = fleet.store({"a": ("b",), "b": ()}, cold=("a",), slots=1)
    async with start(store, queue_wait_s=1) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)], "b")
        asked = asyncio.create_task(gateway.chat({"model": "a"}))
        await eventually(lambda: admission(gateway, "b").waiting == 1)
        store.change(endpoints=(fleet.replica("a"), fleet.replica("b", 1)))
        assert served_by(await asked) == (200, "a", "a-1")
        gate.open()
        await task


async def test_a_fallback_that_became_ready_while_the_model_had_no_room_serves(start: Start, fleet: Fleet) -> None:
    gate = Gate(fleet["a"])
    store = fleet.store({"a": ("b",), "b": ()}, cold=("b",), slots=1)
    async with start(store, fallback_after_s=1) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)], "a")
        asked = asyncio.create_task(gateway.chat({"model": "a"}))
        await eventually(lambda: admission(gateway, "a").waiting == 1)
        store.change(endpoints=(fleet.replica("a", 1), fleet.replica("b")))
        assert served_by(await asked) == (200, "b", "b-1")
        gate.open()
        await task


async def test_a_fallback_that_left_the_catalog_meanwhile_is_passed_over(start: Start, fleet: Fleet) -> None:
    gate = Gate(fleet["a"])
    store = fleet.store(slots=1)
    async with start(store, fallback_after_s=0.5) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)], "a")
        asked = asyncio.create_task(gateway.chat({"model": "a"}))
        await eventually(lambda: admission(gateway, "a").waiting == 1)
        models = (spec.Model(name="a", fallbacks=("c",)), spec.Model(name="c"))
        store.change(models=models, endpoints=(fleet.replica("a", 1), fleet.replica("c", 1)))
        assert served_by(await asked) == (200, "c", "c-1")
        gate.open()
        await task
        assert "b" not in fleet.asked()


async def test_a_replica_that_goes_while_others_wait_for_room_lets_them_fall_back_at_once(
    start: Start, fleet: Fleet
) -> None:
    gate = Gate(fleet["a"])
    store = fleet.store(slots=1)
    async with start(store, fallback_after_s=60, on_demand_wait_s=60) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)], "a")
        asked = asyncio.create_task(gateway.chat({"model": "a"}))
        await eventually(lambda: admission(gateway, "a").waiting == 1)
        loading = endpoint(None, "a-2", "a", state="loading")
        store.change(endpoints=(loading, fleet.replica("b"), fleet.replica("c")))
        assert served_by(await asked) == (200, "b", "b-1")
        gate.open()
        assert (await task).status_code == 200


# --- who may ---------------------------------------------------------------------------------------------------------
async def test_a_fallback_that_the_key_may_not_use_is_passed_over(start: Start, fleet: Fleet) -> None:
    fleet["a"].behaviour = mock_engine.fails(b"500 Oops")
    async with start(fleet.store(grants=(grant(models=frozenset({"a", "c"})),))) as gateway:
        assert served_by(await gateway.chat({"model": "a"})) == (200, "c", "c-1")
        assert fleet.asked() == {"a": 1, "c": 1}
        fleet["c"].behaviour = mock_engine.fails(b"500 Oops")
        response = await gateway.chat({"model": "a"})
        assert (response.status_code, code(response)) == (502, "engine_failed")
        assert '"b"' not in json.dumps(response.json())


async def test_a_key_that_may_use_only_the_model_itself_gets_its_refusal(start: Start, fleet: Fleet) -> None:
    async with start(
        fleet.store(cold=("a",), grants=(grant(models=frozenset({"a"})),)), on_demand_wait_s=0.2
    ) as gateway:
        response = await gateway.chat({"model": "a"})
        assert (response.status_code, code(response)) == (503, "model_loading")
        assert fleet.asked() == {}


async def test_a_request_for_the_fallback_itself_has_its_own_chain(start: Start, fleet: Fleet) -> None:
    """c falls back on b alone, whoever falls back on c."""
    fleet["c"].behaviour = fleet["b"].behaviour = mock_engine.fails(b"500 Oops")
    async with start(fleet.store(CIRCLES)) as gateway:
        assert code(await gateway.chat({"model": "c"})) == "engine_failed"
        assert fleet.asked() == {"c": 1, "b": 1}
