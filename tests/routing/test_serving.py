"""Places and queues over real sockets: who gets in, who waits, who is told to come again, and that every place is given
up whatever happens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai as openai_client
import pytest

from catalog import spec
from routing import ejection
from tests.routing.conftest import Start
from tests.routing.gateways import (
    CHAT,
    KEY,
    Running,
    code,
    contents,
    endpoint,
    eventually,
    grant,
    key_of,
    raw_chat,
)
from tests.routing.pressure import WAYS, Gate, admission, at_rest, first_byte_s, leave, queue_up
from tests.services import free_port
from tests.stubs import mock_engine
from tests.stubs.mock_engine import DONE, TOKEN, MockEngine

OTHER = "sk-other" + "o" * 40
THIRD = "sk-third" + "t" * 40
KEYS = (grant(), grant(OTHER, key_id=2, project_id=2), grant(THIRD, key_id=3, project_id=3))


@pytest.fixture
def gate(engine: MockEngine) -> Gate:
    return Gate(engine)


def one(engine: MockEngine, slots: int = 1, **changes: Any) -> Any:
    """A model `m` with one replica of so many slots, for three projects' keys."""
    return contents(endpoint(engine.port, slots=slots), grants=KEYS, **changes)


# --- who gets in -----------------------------------------------------------------------------------------------------
async def test_no_more_are_at_the_engine_than_it_has_slots_and_all_are_served(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine, slots=4)) as gateway:
        tasks = [asyncio.create_task(gateway.chat()) for _ in range(40)]
        await eventually(lambda: gate.inside == 4 and admission(gateway).waiting == 36)
        gate.let_go(2)
        await eventually(lambda: len(gate.users) == 6)
        assert (gate.inside, admission(gateway).waiting) == (4, 34)
        gate.open()
        answers = await asyncio.gather(*tasks)
        assert {answer.status_code for answer in answers} == {200}
        assert gate.most == 4
        waited = sorted(int(answer.headers["x-llmgw-queue-ms"]) for answer in answers)
        assert waited[:4] == [0] * 4
        assert waited[-1] > 0
        await at_rest(gateway)
        assert len(await gateway.records(40)) == 40


async def test_several_replicas_slots_add_up(start: Start) -> None:
    async with MockEngine(key=key_of("m-1")) as first, MockEngine(key=key_of("m-2")) as second:
        gates = Gate(first), Gate(second)
        replicas = (endpoint(first.port, "m-1", slots=2), endpoint(second.port, "m-2", slots=1))
        async with start(contents(*replicas)) as gateway:
            tasks = [asyncio.create_task(gateway.chat()) for _ in range(9)]
            await eventually(lambda: gates[0].inside + gates[1].inside == 3 and admission(gateway).waiting == 6)
            for gate in gates:
                gate.open()
            assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
            await at_rest(gateway)


async def test_inside_a_project_the_first_to_come_goes_first_and_projects_take_turns(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine)) as gateway:
        users = [("a0", KEY), *((f"a{n}", KEY) for n in range(1, 6)), ("b1", OTHER), ("b2", OTHER), ("c1", THIRD)]
        tasks = await queue_up(gateway, users)
        for _ in users:
            before = len(gate.users)
            gate.let_go()
            await eventually(lambda before=before: len(gate.users) > before or gate.inside == 0)  # type: ignore[misc]
        await asyncio.gather(*tasks)
        assert gate.users == ["a0", "a1", "b1", "c1", "a2", "b2", "a3", "a4", "a5"]
        assert gate.most == 1


async def test_a_higher_band_goes_first_and_a_lower_one_keeps_its_share(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    keys = (grant(band="high"), grant(OTHER, key_id=2, project_id=2, band="low"))
    async with start(
        contents(endpoint(engine.port, slots=1), grants=keys),
        bands={"high": 0.0, "low": 0.25},
        default_band="high",
    ) as gateway:
        users = [("first", KEY), *((f"low{n}", OTHER) for n in range(6)), *((f"high{n}", KEY) for n in range(12))]
        tasks = await queue_up(gateway, users)
        gate.open()
        await asyncio.gather(*tasks)
        order = gate.users[1:]
        assert [user for user in order if user.startswith("high")] == [f"high{n}" for n in range(12)]
        assert order[0] == "high0"
        while_both_wait = order[: order.index("high11")]
        assert len([user for user in while_both_wait if user.startswith("low")]) == len(while_both_wait) // 4
        records = await gateway.records(len(users))
        assert {(record.key, record.band) for record in records} == {(1, "high"), (2, "low")}


async def test_a_models_band_holds_where_the_key_has_none(start: Start, engine: MockEngine) -> None:
    models = (spec.Model(name="m", band="low"), spec.Model(name="plain"))
    replicas = (endpoint(engine.port), endpoint(engine.port, "m-1", "plain"))
    async with start(contents(*replicas, models=models)) as gateway:
        await gateway.chat()
        await gateway.chat({"model": "plain"})
        assert {(record.model, record.band) for record in await gateway.records(2)} == {
            ("m", "low"),
            ("plain", "normal"),
        }


async def test_more_room_lets_the_waiting_in_and_less_lets_those_at_work_end(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine)) as gateway:
        tasks = [asyncio.create_task(gateway.chat()) for _ in range(8)]
        await eventually(lambda: gate.inside == 1 and admission(gateway).waiting == 7)
        gateway.store.change(endpoints=(endpoint(engine.port, slots=3),))
        await eventually(lambda: gate.inside == 3)
        gateway.store.change(endpoints=(endpoint(engine.port, slots=2),))
        await eventually(lambda: admission(gateway).capacity == 2)
        gate.let_go()
        await eventually(lambda: gate.inside == 2)
        gate.let_go()
        await eventually(lambda: len(gate.users) == 4)
        assert gate.inside == 2
        gate.open()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        await at_rest(gateway)


# --- what is said of it ----------------------------------------------------------------------------------------------
async def test_the_record_of_a_request_that_waited_says_so(start: Start, engine: MockEngine, gate: Gate) -> None:
    async with start(one(engine)) as gateway:
        tasks = await queue_up(gateway, [("first", KEY), ("second", KEY), ("third", KEY)])
        gate.open()
        answers = [await task for task in tasks]
        records = {record.request_id: record for record in await gateway.records(3)}
        first, second, third = (records[answer.headers["x-request-id"]] for answer in answers)
        assert first.queue_ms == 0
        assert first.explained is None
        for record, position, answer in ((second, 1, answers[1]), (third, 2, answers[2])):
            assert record.explained is not None
            assert (record.explained.queued, record.explained.position) == (True, position)
            assert record.queue_ms > 0
            assert int(answer.headers["x-llmgw-queue-ms"]) == int(record.queue_ms)
            assert record.total_ms >= record.queue_ms


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_again(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine), queue_limit=2) as gateway:
        tasks = await queue_up(gateway, [("first", KEY), ("second", KEY), ("third", KEY)])
        for _ in range(5):
            response = await gateway.chat({"user": "surplus"})
            assert (response.status_code, code(response)) == (503, "engine_busy")
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["message"].startswith("Model m has no room: 2 requests wait")
        # One project's crowd does not keep another one out.
        tasks += await queue_up(gateway, [("other", OTHER)])
        gate.open()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        assert "surplus" not in gate.users
        await at_rest(gateway)
        refused = [record for record in await gateway.records(9) if record.status == 503]
        assert [(record.error_code, record.replica, record.prompt_tokens) for record in refused] == [
            ("engine_busy", "", None)
        ] * 5


async def test_waiting_bodies_take_no_more_memory_than_they_may(start: Start, engine: MockEngine, gate: Gate) -> None:
    async with start(one(engine), waiting_bytes=2000) as gateway:
        tasks = await queue_up(gateway, [("first", KEY), ("second", KEY)])
        response = await gateway.chat({"user": "surplus", "padding": "x" * 2000})
        assert (response.status_code, code(response)) == (503, "engine_busy")
        assert "take 2,000 bytes, as many as may" in response.json()["error"]["message"]
        tasks += await queue_up(gateway, [("small", KEY)])
        gate.open()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        assert "surplus" not in gate.users
        assert gateway.gateway.plane.waiting_bytes == 0


async def test_without_any_queue_who_finds_no_room_is_refused(start: Start, engine: MockEngine, gate: Gate) -> None:
    async with start(one(engine), queue_limit=0) as gateway:
        tasks = await queue_up(gateway, [("first", KEY)])
        assert code(await gateway.chat()) == "engine_busy"
        gate.open()
        assert (await tasks[0]).status_code == 200
        assert (await gateway.chat()).status_code == 200


async def test_whoever_waited_too_long_is_told_so_and_loses_its_place(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine), queue_wait_s=0.3) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)])
        response = await gateway.chat({"user": "second"})
        assert (response.status_code, code(response)) == (503, "engine_busy")
        assert int(response.headers["retry-after"]) >= 1
        assert int(response.headers["x-llmgw-queue-ms"]) >= 300
        assert "had no room for 0.3 s" in response.json()["error"]["message"]
        assert admission(gateway).waiting == 0
        gate.open()
        assert (await task).status_code == 200
        assert gate.users == ["first"]
        records = {record.error_code: record for record in await gateway.records(2)}
        late = records["engine_busy"]
        assert late.queue_ms >= 300
        assert late.explained is not None
        assert late.explained.position == 1


# --- who leaves ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
async def test_a_client_that_leaves_the_queue_frees_its_place_and_the_engine_never_hears_of_it(
    start: Start, engine: MockEngine, gate: Gate, stream: bool
) -> None:
    async with start(one(engine)) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)])
        held = admission(gateway)
        for _ in range(10):  # a client that tries again and again
            await leave(gateway, {"stream": stream, "user": "left"}, lambda: held.waiting == 1)
            await eventually(lambda: held.waiting == 0)
        gate.open()
        assert (await task).status_code == 200
        assert gate.users == ["first"]
        assert engine.accepted <= 3  # one for the request, the others for scrapes
        await at_rest(gateway)
        left = [record for record in await gateway.records(11) if record.error_code == "client_left"]
        assert [(record.status, record.replica, record.completion_tokens) for record in left] == [(499, "", None)] * 10
        assert all(record.explained is not None and record.explained.position == 1 for record in left)


async def test_who_leaves_the_middle_of_the_queue_moves_up_those_behind(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine)) as gateway:
        tasks = await queue_up(gateway, [(name, KEY) for name in ("first", "second", "third", "fourth")])
        tasks[2].cancel()
        await eventually(lambda: admission(gateway).waiting == 2)
        gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.users == ["first", "second", "fourth"]
        await at_rest(gateway)


# --- every way to end ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
async def test_after_fifty_requests_that_end_so_every_place_is_free(
    start: Start, engine: MockEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ejection, "FAILURES", 1000)  # or most of them would not reach the engine
    nowhere = endpoint(free_port(), "down-1", "down")
    serves = endpoint(engine.port, slots=10)
    async with start(contents(serves, nowhere), first_byte_timeout_s=first_byte_s(way), attempts=1) as gateway:
        for _ in range(5):
            await asyncio.gather(*(WAYS[way](gateway, engine, KEY) for _ in range(10)))
        await at_rest(gateway)
        engine.behaviour = None
        gateway.gateway.plane.bounds.first_byte_timeout_s = 60.0
        assert (await gateway.chat()).status_code == 200
        await at_rest(gateway)


async def test_after_fifty_leave_a_queue_that_moves_every_place_is_free(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine, slots=2)) as gateway:
        tasks = [asyncio.create_task(gateway.chat({"user": f"{n}"})) for n in range(50)]
        await eventually(lambda: admission(gateway).waiting == 48)
        for number, task in enumerate(tasks):
            if number % 3 == 0:
                task.cancel()
            elif number % 3 == 1:
                gate.let_go()
            await asyncio.sleep(0)
        gate.open()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert {each.status_code for each in answers if isinstance(each, httpx.Response)} == {200}
        await at_rest(gateway)
        assert gate.most == 2
        assert len(await gateway.records(50)) == 50


async def test_stopping_refuses_the_waiting_ends_the_running_and_leaves_no_place_taken(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine, slots=1)) as gateway:
        held, store = admission(gateway), gateway.store
        asked = [
            asyncio.create_task(gateway.raw(raw_chat(json.dumps({**CHAT, "user": "x"}).encode()))) for _ in range(5)
        ]
        await eventually(lambda: (held.in_flight, held.waiting) == (1, 4) and gate.inside == 1)
    answers = await asyncio.gather(*asked)
    assert all(answer.startswith(b"HTTP/1.1 503") and b'"gateway_stopping"' in answer for answer in answers)
    assert (held.in_flight, held.waiting) == (0, 0)
    assert gate.users == ["x"]
    assert [record.error_code for record in store.usage.values()] == ["gateway_stopping"] * 5


async def test_bodies_on_their_way_in_take_no_more_memory_than_those_that_wait(
    start: Start, engine: MockEngine
) -> None:
    body = json.dumps({**CHAT, "pad": "x" * 100_000}).encode()
    cut = len(raw_chat(body)) - 50
    async with start(one(engine), waiting_bytes=250_000) as gateway:
        plane = gateway.gateway.plane
        writers = []
        for number in (1, 2):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(raw_chat(body)[:cut])
            writers.append((reader, writer))
            await eventually(lambda number=number: plane.waiting_bytes > number * 90_000)  # type: ignore[misc]
        refused = await gateway.raw(raw_chat(body)[:cut], until=b"}}")
        assert refused.startswith(b"HTTP/1.1 503")
        assert b'"engine_busy"' in refused
        for reader, writer in writers:
            writer.write(raw_chat(body)[cut:])
            async with asyncio.timeout(20):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()
        await at_rest(gateway)
        assert plane.waiting_bytes == 0
        assert sorted(row.status for row in await gateway.records(3)) == [200, 200, 503]


# --- progress --------------------------------------------------------------------------------------------------------
PROGRESS = {"x-llmgw-progress": "sse"}


def comments(text: str) -> tuple[list[dict[str, Any]], str]:
    """What the comments before an answer say, and the rest."""
    found = []
    while text.startswith(": llmgw "):
        line, _, text = text.partition("\n\n")
        found.append(json.loads(line.removeprefix(": llmgw ")))
    return found, text


async def test_a_waiting_stream_that_asks_is_told_how_it_stands_and_then_gets_its_stream_unchanged(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine)) as gateway:
        tasks = await queue_up(gateway, [("first", KEY), ("second", KEY)])
        request = gateway.http.build_request(
            "POST",
            "/v1/chat/completions",
            json={**CHAT, "stream": True},
            headers={"authorization": f"Bearer {KEY}", **PROGRESS},
        )
        response = await gateway.http.send(request, stream=True)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"].startswith("req-")
        lines = response.aiter_lines()
        told: list[dict[str, Any]] = []
        while len(told) < 2:  # one at once, another one a moment later
            line = await anext(lines)
            if line:
                told.append(json.loads(line.removeprefix(": llmgw ")))
        assert [(each["stage"], each["position"]) for each in told] == [("queued", 2), ("queued", 2)]
        assert told[0]["elapsed_s"] < told[1]["elapsed_s"]
        gate.open()
        rest = "\n".join([line async for line in lines])
        await response.aclose()
        _, stream = comments(rest.lstrip("\n"))
        assert stream == (TOKEN + DONE).decode().removesuffix("\n")
        await asyncio.gather(*tasks)
        await at_rest(gateway)


async def test_a_wait_that_ends_in_a_refusal_after_comments_is_one_error_event(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine), queue_wait_s=0.3) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)])
        response = await gateway.chat({"stream": True}, headers=PROGRESS)
        assert response.status_code == 200
        told, rest = comments(response.text)
        assert len(told) == 1
        assert rest.startswith("event: error\ndata: ")
        assert rest.endswith("\n\n")
        assert rest.count("\n\n") == 1
        assert json.loads(rest.partition("data: ")[2])["error"]["code"] == "engine_busy"
        gate.open()
        await task
        late = next(record for record in await gateway.records(2) if record.error_code)
        assert (late.status, late.error_code) == (503, "engine_busy")


async def test_an_engines_refusal_and_a_whole_answer_after_comments_are_events_too(
    start: Start, engine: MockEngine
) -> None:
    for behaviour, kind in (
        (
            mock_engine.fails(
                b"400 Bad Request", b'{"error":{"message":"too long","type":"x","param":null,"code":null}}'
            ),
            True,
        ),
        (mock_engine.says(mock_engine.plain(b'{"object":\n"chat.completion"}')), False),
    ):
        gate = Gate(engine)
        async with start(one(engine)) as gateway:
            (task,) = await queue_up(gateway, [("first", KEY)])
            asked = asyncio.create_task(gateway.chat({"stream": True}, headers=PROGRESS))
            await eventually(lambda gateway=gateway: admission(gateway).waiting == 1)  # type: ignore[misc]
            engine.behaviour = behaviour
            gate.open()
            response = await asked
            told, rest = comments(response.text)
            assert len(told) >= 1
            assert rest.startswith("event: error\n") == kind
            assert rest.count("\n\n") == 1
            assert json.loads(rest.partition("data: ")[2])
            await task


@pytest.mark.parametrize(
    "answer",
    [
        mock_engine.plain(b"x" * 1000, b"audio/mpeg"),
        mock_engine.plain(b'{"a":"' + b"y" * 3_000_000 + b'"}'),
    ],
)
async def test_what_is_no_stream_and_cannot_be_an_event_is_an_error_after_comments(
    start: Start, engine: MockEngine, gate: Gate, answer: bytes
) -> None:
    async with start(one(engine)) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)])
        asked = asyncio.create_task(gateway.chat({"stream": True}, headers=PROGRESS))
        await eventually(lambda: admission(gateway).waiting == 1)
        engine.behaviour = mock_engine.says(answer[:300_000], answer[300_000:])
        gate.open()
        _, rest = comments((await asked).text)
        assert rest.startswith("event: error\ndata: ")
        assert rest.count("\n\n") == 1
        assert "x-llmgw-progress" in json.loads(rest.partition("data: ")[2])["error"]["message"]
        await task
        late = next(record for record in await gateway.records(2) if record.error_code)
        assert (late.status, late.error_code, late.estimated) == (502, "engine_failed", True)
        assert all(target.health == ejection.WELL for target in gateway.gateway.plane.table.targets)
        await at_rest(gateway)


async def test_who_does_not_stream_or_does_not_wait_gets_no_comments(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine)) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)])
        whole = asyncio.create_task(gateway.chat(headers=PROGRESS))
        silent = asyncio.create_task(gateway.chat({"stream": True}))
        await eventually(lambda: admission(gateway).waiting == 2)
        gate.open()
        assert (await whole).json()["object"] == "chat.completion"
        assert (await silent).text == (TOKEN + DONE).decode()
        await task
        assert (await gateway.chat({"stream": True}, headers=PROGRESS)).text == (TOKEN + DONE).decode()


async def test_a_client_that_leaves_among_comments_frees_its_place(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine)) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)])
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            body = json.dumps({**CHAT, "stream": True, "user": "left"}).encode()
            writer.write(raw_chat(body, extra=b"x-llmgw-progress: sse\r\n"))
            async with asyncio.timeout(20):
                await reader.readuntil(b": llmgw ")
            writer.close()
            await eventually(lambda: admission(gateway).waiting == 0)
        gate.open()
        await task
        assert gate.users == ["first"]
        await at_rest(gateway)


async def test_openais_own_client_digests_the_comments(start: Start, engine: MockEngine, gate: Gate) -> None:
    async with start(one(engine)) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)])
        http = openai_client.AsyncOpenAI(
            api_key=KEY,
            base_url=f"http://127.0.0.1:{gateway.port}/v1",
            max_retries=0,
        )
        async with http as client:
            asked = asyncio.create_task(
                client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    extra_headers=PROGRESS,
                )
            )
            stream = await asked  # there is a head before there is any room
            assert admission(gateway).waiting == 1
            gate.open()
            texts = [event.choices[0].delta.content async for event in stream]
            assert texts == [" hello"]
        await task


async def test_openais_own_client_raises_a_refusal_that_follows_comments(
    start: Start, engine: MockEngine, gate: Gate
) -> None:
    async with start(one(engine), queue_wait_s=0.2) as gateway:
        (task,) = await queue_up(gateway, [("first", KEY)])
        http = openai_client.AsyncOpenAI(
            api_key=KEY,
            base_url=f"http://127.0.0.1:{gateway.port}/v1",
            max_retries=0,
        )
        async with http as client:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True, extra_headers=PROGRESS
            )
            with pytest.raises(openai_client.APIError, match="had no room"):
                await anext(aiter(stream))
        gate.open()
        await task


async def test_the_headers_of_a_waiting_request_do_not_name_a_model_before_it_is_known(
    start: Start, gateway: Running
) -> None:
    response = await gateway.chat({"stream": True, "max_tokens": 1}, headers=PROGRESS)
    assert response.headers["x-llmgw-model"] == "m"
    assert response.headers["x-llmgw-queue-ms"] == "0"
