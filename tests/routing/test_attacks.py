"""What engines and clients send that could pass for something else, and what could hold a gateway up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from catalog import spec
from routing.explain import Attempt, Explained
from routing.store import DjangoStore
from tenants.models import Usage
from tests.routing.conftest import Start
from tests.routing.gateways import CHAT, MemoryStore, Running, code, contents, endpoint, eventually, key_of, raw_chat
from tests.routing.test_journal import record
from tests.services import free_port
from tests.stubs import mock_engine
from tests.stubs.mock_engine import ANSWER, DONE, LAST, STREAM_HEAD, TOKEN, EngineConnection, MockEngine, Seen, chunk

CHAT_BODY = json.dumps(CHAT).encode()
FIRST = b'{"id":"first"}'
UNFRAMED = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n\r\n"


# --- engines that send more, or less, than their answer ---------------------------------------------------------------
@pytest.mark.parametrize(
    "more",
    [mock_engine.plain(b'{"id":"second"}'), mock_engine.plain(b'{"id":"second"}')[:-4], b"garbage", STREAM_HEAD],
    ids=["whole", "half", "garbage", "head"],
)
async def test_what_stands_behind_an_answer_in_the_same_write_is_nobodys(
    gateway: Running, engine: MockEngine, more: bytes
) -> None:
    for _ in range(2):
        engine.script.append(mock_engine.says(mock_engine.plain(FIRST) + more))
        assert (await gateway.chat()).content == FIRST
        next_one = await gateway.chat()
        assert next_one.status_code == 200
        assert next_one.json()["id"] == "chatcmpl-1"
        engine.script.append(mock_engine.says(STREAM_HEAD, chunk(TOKEN), chunk(DONE) + LAST + more))
        assert (await gateway.chat({"stream": True})).content == TOKEN + DONE
        assert (await gateway.chat()).json()["id"] == "chatcmpl-1"


async def test_an_answer_before_its_request_was_read_leaves_the_rest_of_that_to_nobody(start: Start) -> None:
    accepted: list[asyncio.StreamWriter] = []

    async def answers_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        accepted.append(writer)
        refusal = mock_engine.plain(b'{"error":{"message":"too long"}}', status=b"413 Content Too Large")
        writer.write(refusal if len(accepted) == 1 else ANSWER)

    server = await asyncio.start_server(answers_early, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, start(contents(endpoint(port)), scrape_s=100, first_byte_timeout_s=20) as gateway:
        assert (await gateway.chat({"user": "x" * 20_000_000})).status_code == 413
        assert (await gateway.chat()).status_code == 200
        for writer in accepted:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    assert len(accepted) == 2


@pytest.mark.parametrize("kind", [b"application/json", b"text/plain"])
async def test_an_answer_without_a_body_leaves_the_connection_whole(
    gateway: Running, engine: MockEngine, kind: bytes
) -> None:
    engine.script.append(mock_engine.says(b"HTTP/1.1 204 No Content\r\nContent-Type: %b\r\n\r\n" % kind))
    got = await gateway.raw(raw_chat(CHAT_BODY) + raw_chat(CHAT_BODY, extra=b"Connection: close\r\n"))
    head, _, rest = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 204")
    assert b"transfer-encoding" not in head
    assert rest.startswith(b"HTTP/1.1 200")


async def test_a_json_answer_of_no_said_length_that_was_cut_is_tried_elsewhere_and_never_whole(
    gateway: Running, engine: MockEngine
) -> None:
    half = mock_engine.says(UNFRAMED % b"application/json", b'{"id":"x","choices":[{"mess', then_close=True)
    engine.script += [half]
    answer = await gateway.chat()
    assert (answer.status_code, code(answer)) == (502, "engine_failed")
    engine.script.append(mock_engine.says(UNFRAMED % b"application/json", FIRST, then_close=True))
    assert (await gateway.chat()).content == FIRST


@pytest.mark.parametrize("rest", [(), (TOKEN[:30],), (TOKEN, b"data:")])
async def test_a_stream_of_no_said_length_that_was_cut_ends_with_an_error(
    gateway: Running, engine: MockEngine, rest: tuple[bytes, ...]
) -> None:
    engine.script.append(mock_engine.says(UNFRAMED % b"text/event-stream", TOKEN, *rest, then_close=True))
    assert b"event: error\n" in await gateway.raw(raw_chat(b'{"stream":true,' + CHAT_BODY[1:]), until=b"event: error\n")
    engine.script.append(mock_engine.says(UNFRAMED % b"text/event-stream", TOKEN, DONE, then_close=True))
    assert (await gateway.chat({"stream": True})).content == TOKEN + DONE


# --- requests that come together --------------------------------------------------------------------------------------
@pytest.mark.parametrize("slow", [False, True])
async def test_a_request_that_began_behind_another_gets_its_own_body(
    gateway: Running, engine: MockEngine, slow: bool
) -> None:
    async def behave(connection: EngineConnection, _: Seen) -> None:
        await asyncio.sleep(0.2 if slow else 0)
        connection.transport.write(ANSWER)

    engine.behaviour = behave
    second = raw_chat(json.dumps({**CHAT, "user": "second"}).encode(), extra=b"Connection: close\r\n")
    for cut in (20, len(second) - 10):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_chat(CHAT_BODY) + second[:cut])
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.write(second[cut:])
        async with asyncio.timeout(20):
            got = await reader.read()
        writer.close()
        assert got.count(b"HTTP/1.1 200") == 2
        assert [seen.json.get("user") for seen in engine.requests[-2:]] == [None, "second"]


# --- bodies -----------------------------------------------------------------------------------------------------------
BEYOND = (b"9" * 5000, b"1e400", b"[1e400]", b"[" * 900 + b"]" * 900, b"1" * 20_000)
NAMES = ("model", "stream", "stream_options", "max_tokens", "n", "lora", "messages", "input", "image_url")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_numbers_beyond_all_range_are_the_clients_mistake(
    gateway: Running, engine: MockEngine, path: str
) -> None:
    for name, value in itertools.product(NAMES, BEYOND):
        members = {"model": b'"m"', "stream": b"true", "messages": b"[]", "input": b'"x"', name: value}
        body = b"{" + b",".join(b'"%b":%b' % (key.encode(), each) for key, each in members.items()) + b"}"
        engine.behaviour = mock_engine.says(ANSWER, pause_s=0)
        assert (await gateway.chat(body, path=path)).status_code in (200, 400)
    engine.behaviour = mock_engine.fails(b"404 Not Found")  # asked for chat completions instead
    assert (await gateway.chat(b'{"model":"m","messages":[1e400],"input":1e400}', path=path)).status_code in (404, 400)


# --- waits ------------------------------------------------------------------------------------------------------------
async def test_the_limit_of_one_wait_never_ends_another(start: Start) -> None:
    async def slow(connection: EngineConnection, _: Seen) -> None:
        await asyncio.sleep(1.5)
        connection.transport.write(ANSWER)

    models = (spec.Model(name="m", fallbacks=("other",)), spec.Model(name="other"))
    async with MockEngine(key=key_of("o-1")) as engine:
        ends = (endpoint(free_port()), endpoint(engine.port, "o-1", "other", slots=1))
        async with start(contents(*ends, models=models), connect_timeout_s=0.3, queue_wait_s=20) as gateway:
            engine.script.append(slow)
            holds = asyncio.create_task(gateway.chat({"model": "other"}))
            await engine.next_request()
            assert (await gateway.chat()).status_code == 200  # it waited longer than it may connect
            assert (await holds).status_code == 200


async def test_connecting_ends_when_nobody_waits_for_it_any_more(start: Start) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        crowd = [socket.socket() for _ in range(3)]  # after which the kernel answers nobody there
        for each in crowd:
            each.setblocking(False)
            each.connect_ex(address)
        try:
            async with start(contents(endpoint(address[1])), connect_timeout_s=0.3, scrape_s=100) as gateway:
                assert code(await gateway.chat()) == "engine_down"
                pool = gateway.gateway.plane.pools.of(gateway.gateway.plane.table.targets[0])
                await eventually(lambda: not pool.opening)
        finally:
            for each in crowd:
                each.close()


async def test_no_connection_stays_to_an_endpoint_that_is_gone(start: Start) -> None:
    async with MockEngine(key=key_of("m-1")) as old, MockEngine(key=key_of("m-2")) as new:
        store = MemoryStore(contents(endpoint(old.port)))
        async with start(store, scrape_s=100) as gateway:
            last = asyncio.create_task(gateway.chat({"stream": True, "max_tokens": 20, "delay": 0.05}))
            await old.next_request()
            store.change(endpoints=(endpoint(new.port, "m-2"),))
            await eventually(lambda: gateway.gateway.plane.table.targets[0].replica == "m-2")
            assert (await last).content.endswith(DONE)
            await eventually(lambda: not old.connections)
            assert (await gateway.chat()).status_code == 200


# --- what engines say -------------------------------------------------------------------------------------------------
async def test_what_an_engine_says_of_its_failure_can_be_shown_and_stored_anywhere(
    gateway: Running, engine: MockEngine
) -> None:
    engine.behaviour = mock_engine.fails(b"500 No", b'{"error":{"message":"a\\u0000b\\u001b[2Jc\\nd"}}')
    answer = await gateway.chat()
    assert answer.json()["error"]["message"].startswith("The engine of model m failed: it answered 500: a b [2Jc d.")
    (record,) = await gateway.records()
    assert record.explained is not None
    assert record.explained.attempts[0].failed == "it answered 500: a b [2Jc d"


@pytest.mark.django_db
def test_what_no_database_holds_of_a_story_is_left_out_of_it_at_once(caplog: pytest.LogCaptureFixture) -> None:
    told = Explained(asked=f"a{chr(0)}b", attempts=(Attempt("m-1", 1.0, f"\\u0000{chr(0)}{chr(0)}"),))
    with CaptureQueriesContext(connection) as seen:
        DjangoStore().save_usage([record(1), record(2, explained=told)])
    assert sum("tenants_usage " in each["sql"] and "INSERT" in each["sql"] for each in seen) == 1
    story = Usage.objects.get(request_id="req-2").explained
    assert story == {
        "asked": "a\ufffdb",
        "attempts": [{"replica": "m-1", "at_ms": 1.0, "failed": "\\ufffd\ufffd\ufffd"}],
    }
    DjangoStore().save_usage([record(3, explained=told, cost=1 << 64)])
    assert Usage.objects.count() == 2
    assert caplog.text.count("is left out") == 1
