"""What a gateway does with what the store says, and without it; over a real port and both ways in."""

from __future__ import annotations

from threading import Event

import pytest

from catalog import spec
from routing import loops
from tests.routing.conftest import Start
from tests.routing.gateways import (
    CHAT,
    KEY,
    MemoryStore,
    code,
    contents,
    endpoint,
    eventually,
    grant,
    key_of,
)
from tests.stubs.mock_engine import MockEngine


# --- the store -------------------------------------------------------------------------------------------------------
async def test_a_revoked_key_and_a_new_endpoint_take_effect_without_a_restart(start: Start, engine: MockEngine) -> None:
    store = MemoryStore(contents(endpoint(engine.port)))
    async with start(store) as gateway:
        assert (await gateway.chat()).status_code == 200
        store.change(grants=())
        await eventually(lambda: not gateway.gateway.plane.table.grants)
        for _ in range(20):
            assert (await gateway.chat()).status_code == 401  # never let in again
        async with MockEngine(key=key_of("n-1")) as other:
            store.change(grants=(grant(),), endpoints=(endpoint(other.port, "n-1", "n"),), models=())
            await eventually(lambda: not gateway.gateway.plane.table.names)
            assert (await gateway.chat()).status_code == 404


async def test_load_and_health_survive_a_new_table_only_where_nothing_moved(start: Start, engine: MockEngine) -> None:
    store = MemoryStore(contents(endpoint(engine.port)))
    async with start(store) as gateway:
        plane = gateway.gateway.plane
        (before,) = plane.table.targets
        store.change(endpoints=(endpoint(engine.port, slots=9),))
        await eventually(lambda: plane.table.targets[0].weight == 9)
        assert plane.table.targets[0] is before
        store.change(endpoints=(endpoint(engine.port + 1),))
        await eventually(lambda: plane.table.targets[0] is not before)


async def test_without_the_store_it_serves_on_what_it_knows_says_so_and_stops_in_time(
    start: Start, engine: MockEngine
) -> None:
    store = MemoryStore(contents(endpoint(engine.port)))
    async with start(store) as gateway:
        store.away = True
        await eventually(lambda: gateway.gateway.plane.store_away)
        assert (await gateway.chat()).status_code == 200
        assert "llmgw_table_stale 1.0" in (await gateway.http.get("/metrics")).text
        assert (await gateway.http.get("/ready")).status_code == 200
        plane = gateway.gateway.plane
        assert plane.confirmed_at is not None
        plane.confirmed_at -= plane.settings.gateway.stale_for_s
        response = await gateway.chat()
        assert (response.status_code, code(response)) == (503, "store_unreachable")
        assert (await gateway.http.get("/ready")).status_code == 503
        assert store.usage == {}
        store.away = False
        await gateway.records(1)  # what was served meanwhile arrives
        await eventually(lambda: not gateway.gateway.plane.store_away)
        assert (await gateway.chat()).status_code == 200


async def test_a_store_that_hangs_without_failing_is_said_to_be_away(
    start: Start, engine: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "SILENT_S", 0.2)
    asked, answers = Event(), Event()

    class Hangs(MemoryStore):
        def revision(self) -> int:
            if asked.is_set():
                answers.wait(60)
            return super().revision()

    try:
        async with start(Hangs(contents(endpoint(engine.port)))) as gateway:
            asked.set()
            await eventually(lambda: gateway.gateway.plane.store_away)
            assert "llmgw_table_stale 1.0" in (await gateway.http.get("/metrics")).text
            assert (await gateway.chat()).status_code == 200
            answers.set()
            await eventually(lambda: not gateway.gateway.plane.store_away)
    finally:
        answers.set()


async def test_scraped_load_and_own_requests_are_told_to_the_store(start: Start, engine: MockEngine) -> None:
    async with start(contents(endpoint(engine.port))) as gateway:
        (target,) = gateway.gateway.plane.table.targets
        await eventually(lambda: target.running is not None)
        loops = gateway.gateway.loops
        assert loops is not None
        await loops.report_loads()
        row = gateway.store.loads["m-1"]
        assert (row.in_flight, row.running, row.waiting, row.kv_used) == (0, 0, 0, None)
        engine.metrics = b"<html>"
        await eventually(lambda: target.running is None)  # unknown, not zero
        await loops.report_loads()
        assert gateway.store.loads["m-1"].running is None
        gateway.store.loads.clear()
        await loops.report_loads()
        assert gateway.store.loads == {}  # nothing changed, nothing written


async def test_a_drained_replicas_requests_are_told_each_time_until_it_is_gone(
    start: Start, engine: MockEngine
) -> None:
    async with start(contents(endpoint(engine.port))) as gateway:
        loops = gateway.gateway.loops
        assert loops is not None
        gateway.store.change(endpoints=(endpoint(engine.port, draining=True),))
        await eventually(lambda: bool(gateway.gateway.plane.table.leaving))
        for _ in range(2):
            gateway.store.loads.clear()
            await loops.report_loads()
            assert gateway.store.loads["m-1"].in_flight == 0
        gateway.store.change(endpoints=(), models=(spec.Model(name="m"),))
        await eventually(lambda: not gateway.gateway.plane.table.leaving)
        gateway.store.loads.clear()
        await loops.report_loads()
        assert gateway.store.loads == {}


async def test_a_store_that_takes_no_usage_but_answers_is_said_once_and_serving_is_not_called_stale(
    start: Start, engine: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(contents(endpoint(engine.port)), full=True)
    async with start(store) as gateway:
        with caplog.at_level("INFO"):
            assert (await gateway.chat()).status_code == 200
            await eventually(lambda: store.refused >= 3)
            assert "llmgw_table_stale 0.0" in (await gateway.http.get("/metrics")).text
            store.full = False
            await gateway.records(1)
            await eventually(lambda: "answers again (usage)" in caplog.text)
        said = [line.message for line in caplog.records if "The store" in line.message]
        assert len(said) == 2
        assert "finished requests wait in the journal" in said[0]


async def test_a_store_that_is_away_has_not_answered_again_because_there_was_nothing_to_tell_it(
    start: Start, engine: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with start(contents(endpoint(engine.port))) as gateway:
        loops = gateway.gateway.loops
        assert loops is not None
        await loops.report_loads()
        loops._away.add("load")
        gateway.store.away = True
        with caplog.at_level("INFO"):
            await loops._guard("load", loops.report_loads())
            assert "answers again (load)" not in caplog.text
            gateway.store.away = False
            await loops._guard("load", loops.report_loads())
            assert "answers again (load)" in caplog.text


async def test_stopping_ends_streams_with_an_error_and_loses_no_record(start: Start, engine: MockEngine) -> None:
    store = MemoryStore(contents(endpoint(engine.port)))
    async with start(store) as gateway:
        for _ in range(20):
            assert (await gateway.chat()).status_code == 200
        body = {**CHAT, "stream": True, "max_tokens": 10_000, "delay": 0.05}
        headers = {"authorization": f"Bearer {KEY}"}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            pieces = response.aiter_text()
            assert "hello" in await anext(pieces)
            await gateway.gateway.stop()
            assert '"gateway_stopping"' in "".join([piece async for piece in pieces])
    assert len(store.usage) == 21
    assert store.key_use.keys() == {1}
    assert not list((gateway.gateway.settings.data_dir / "journal").iterdir())
