"""The agents' stream over the real ASGI application: who gets in, what arrives, what is sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from channels.db import database_sync_to_async
from channels.testing import WebsocketCommunicator
from django.db import OperationalError
from django.test import Client

from agent import protocol
from llmgw.asgi import application
from llmgw.core.models import Secret
from nodes import actions, commands, consumers
from nodes.engine_keys import SECRET_NAME, seal
from nodes.models import Command, Event, Node, Replica, Shard
from tenants.audit import SYSTEM
from tests import hardware
from tests.factories import inventory, make_user
from tests.nodes.fleets import NOW

pytestmark = pytest.mark.django_db(transaction=True)
LIMIT_S = 30
SECRET = bytes(32)
"""What the store of these tests seals shards with."""


async def in_db(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await database_sync_to_async(function)(*args, **kwargs)


def stream(token: str | None) -> WebsocketCommunicator:
    headers = [(b"authorization", f"Bearer {token}".encode())] if token is not None else []
    return WebsocketCommunicator(application, protocol.PATH, headers=headers)


@asynccontextmanager
async def connected(token: str | None) -> AsyncIterator[WebsocketCommunicator]:
    link = stream(token)
    accepted, _ = await link.connect(timeout=LIMIT_S)
    assert accepted
    try:
        yield link
    finally:
        await link.disconnect(timeout=LIMIT_S)


async def heard(link: WebsocketCommunicator) -> protocol.Down:
    return protocol.decode_down(await link.receive_from(timeout=LIMIT_S))


async def tell(link: WebsocketCommunicator, message: protocol.Up) -> None:
    await link.send_to(text_data=protocol.encode(message).decode())


async def refusal(link: WebsocketCommunicator) -> str:
    message = await heard(link)
    assert isinstance(message, protocol.Refused)
    closed = await link.receive_output(timeout=LIMIT_S)
    assert closed["code"] == consumers.REFUSED
    return message.reason


def a_register(node: str = "one", **fields: Any) -> protocol.Register:
    return protocol.Register(
        **{
            "node": node,
            "agent_version": "0.1",
            "machine_id": "machine",
            "address": "127.0.0.1",
            "inventory": inventory(),
            **fields,
        }
    )


def full_register() -> protocol.Register:
    """Every field of every part set to something of its own."""
    spec = protocol.ShardSpec(
        replica="r",
        rank=0,
        model="m",
        profile="cpu",
        profile_digest="d" * 64,
        engine="llamacpp",
        source="/x.gguf",
        adapters=(protocol.Adapter(name="a", source="/a.gguf"),),
        max_loaded_adapters=4,
        args=("--a",),
        env={"A": "1"},
        gpus=("GPU-1",),
        fabric="ib0",
        cores=4,
        slots=3,
        tp=1,
        pp=1,
        nodes=1,
        startup_timeout_s=77,
        made_at=NOW,
    )
    spec = msgspec.structs.replace(spec, seal=seal(SECRET, "one", spec))
    status = protocol.ShardState(
        replica="r",
        state="loading",
        port=9001,
        pid=77,
        reason="so",
        progress=protocol.Progress(note="half"),
        adopted=True,
    )
    return a_register(
        labels={"rack": "7"},
        inventory=hardware.INVENTORY,
        shards=(protocol.Running(spec=spec, status=status),),
    )


@pytest.fixture
def token() -> str:
    Secret.objects.create(name=SECRET_NAME, value=SECRET.hex())
    return actions.make_node(name="one", actor=SYSTEM)[1]


@pytest.mark.parametrize("wrong", [None, "", "nt-wrong"])
async def test_a_wrong_token_is_refused_with_what_to_do(wrong: str | None) -> None:
    async with connected(wrong) as link:
        assert "the join token is not known here; make one with `llmgw ctl node-token NAME`" in await refusal(link)
        await tell(link, a_register())
        assert await link.receive_nothing(timeout=0.1)


async def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers.AgentStream, "strangers", consumers._Seldom())
    for _ in range(consumers.UNPROVEN_LINES + 5):
        async with connected("nt-wrong") as link:
            await refusal(link)
    assert len([line for line in caplog.messages if line.startswith("Refused an agent")]) == consumers.UNPROVEN_LINES


@pytest.mark.parametrize("path", ["/agent/stream/", "/", "/v1/chat/completions", "/agent/../agent/stream"])
async def test_no_other_address_opens_a_stream(path: str, token: str) -> None:
    link = WebsocketCommunicator(application, path, headers=[(b"authorization", f"Bearer {token}".encode())])
    assert (await link.connect(timeout=LIMIT_S))[0] is False


async def test_a_browsers_session_is_no_token(token: str) -> None:
    def session() -> str:
        client = Client()
        client.force_login(make_user("root", is_superuser=True))
        return client.cookies["llmgw_session"].value

    cookie = f"llmgw_session={await in_db(session)}".encode()
    headers = [(b"cookie", cookie), (b"origin", b"https://evil.example")]
    link = WebsocketCommunicator(application, protocol.PATH, headers=headers)
    assert (await link.connect(timeout=LIMIT_S))[0]
    assert "join token is not known" in await refusal(link)
    await link.disconnect(timeout=LIMIT_S)


async def test_a_register_through_the_wire_finds_every_field_again(token: str) -> None:
    sent = full_register()
    async with connected(token) as link:
        await tell(link, sent)
        assert await heard(link) == protocol.Welcome(node="one", heartbeat_s=5)
        row = await Node.objects.aget(pk="one")
        assert msgspec.convert(row.inventory, protocol.Inventory) == sent.inventory
        assert (row.labels, row.machine_id, row.address) == ({"rack": "7"}, "machine", "127.0.0.1")
        assert (row.agent_version, row.state) == ("0.1", "ready")
        assert row.registered_at
        replica = await Replica.objects.aget(pk="r")
        [running] = sent.shards
        spec = running.spec
        assert (replica.model, replica.profile, replica.profile_digest) == (
            spec.model,
            spec.profile,
            spec.profile_digest,
        )
        assert (replica.engine, replica.weight, replica.state) == (spec.engine, spec.slots, "loading")
        assert (replica.adapters, replica.max_loaded_adapters) == ([{"name": "a", "source": "/a.gguf"}], 4)
        shard = await replica.shards.aget()
        assert (shard.node_id, shard.rank, shard.gpus, shard.cores) == ("one", 0, ["GPU-1"], 4)
        assert (shard.state, shard.port, shard.pid, shard.reason) == ("loading", 9001, 77, "so")
        assert shard.progress == {"note": "half"}


async def test_a_full_inventory_stays_far_below_the_bound() -> None:
    files = tuple(protocol.File(path="/models/" + "x" * 200 + str(i), size_bytes=i) for i in range(protocol.MAX_FILES))
    sent = a_register(inventory=inventory(files=files))
    assert len(protocol.encode(sent)) < protocol.MAX_MESSAGE_BYTES / 4


async def test_another_name_than_the_tokens_is_refused_naming_both(token: str) -> None:
    async with connected(token) as link:
        await tell(link, a_register("two"))
        reason = await refusal(link)
        assert "this token is node one's" in reason
        assert "says it is two" in reason


async def test_another_protocol_version_is_refused_naming_both(token: str) -> None:
    async with connected(token) as link:
        await link.send_to(text_data='{"type": "register", "protocol": 99, "something": "new"}')
        assert "protocol version 99 and the control plane version 1; upgrade the control plane" in await refusal(link)
    async with connected(token) as link:
        await link.send_to(text_data='{"type": "register", "protocol": 0}')
        assert "upgrade the agent" in await refusal(link)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ("{", "a message could not be read"),
        ("[]", "a message could not be read"),
        ('{"type": "nonsense"}', "a message could not be read"),
        ('{"type": "register", "node": 7}', "a message could not be read"),
        ('{"type": "heartbeat", "load": {}}', "the first message of a stream must be a register"),
        (" " * (protocol.MAX_MESSAGE_BYTES + 1), "is over the limit of 4194304"),
    ],
)
async def test_what_cannot_be_understood_is_refused_with_its_reason(token: str, sent: str, reason: str) -> None:
    async with connected(token) as link:
        await link.send_to(text_data=sent)
        assert reason in await refusal(link)


async def test_commands_are_sent_when_rung_for_and_their_answers_kept(token: str) -> None:
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        row = await in_db(commands.store, node="one", body=protocol.StopShard(replica="r", grace_s=3), now=NOW)
        message = await heard(link)
        assert isinstance(message, protocol.Command)
        assert (message.id, message.body) == (row.pk, protocol.StopShard(replica="r", grace_s=3))
        await tell(link, protocol.ShardStatus(status=protocol.ShardState(replica="r", state="stopped"), tail="bye"))
        await tell(link, protocol.Ack(id=row.pk))
        await until(Command.objects.filter(pk=row.pk, ok=True).aexists)
        assert (await Replica.objects.aget(pk="r")).tail == "bye"


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            if await true():
                return
            await asyncio.sleep(0.02)


async def test_binary_frames_are_read_too(token: str) -> None:
    async with connected(token) as link:
        await link.send_to(bytes_data=protocol.encode(a_register()))
        assert isinstance(await heard(link), protocol.Welcome)


async def test_files_that_have_come_since_the_register_are_known_at_once(token: str) -> None:
    has = protocol.Inventory(hostname="box", files=(protocol.File(path="/w/a.gguf", size_bytes=5),))
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(), inventory=has))
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(load_1m=9.0)))
        await until(Node.objects.filter(inventory__hostname="box").aexists)
    node = await Node.objects.aget()
    assert node.inventory["files"] == [{"path": "/w/a.gguf", "size_bytes": 5}]


async def test_heartbeats_are_written_when_they_tell_something_new(token: str) -> None:
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        same = full_register().shards[0].status
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(load_1m=1.0), shards=(same,)))
        ready = protocol.ShardState(replica="r", state="ready", port=9001)
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(load_1m=2.0), shards=(ready,)))
        await until(Replica.objects.filter(state="ready").aexists)
        assert (await Node.objects.aget()).load == {"load_1m": 2.0}
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(load_1m=3.0), shards=(ready,)))
        await tell(link, protocol.ShardStatus(status=protocol.ShardState(replica="r", state="failed", reason="no")))
        await until(Replica.objects.filter(state="failed").aexists)
        assert (await Node.objects.aget()).load == {"load_1m": 2.0}


async def test_a_heartbeat_tells_of_sensors_disk_fetches_and_errands(token: str) -> None:
    load = protocol.NodeLoad(
        load_1m=1.5,
        cpu_percent=7.0,
        memory_used_bytes=3,
        disk_free_bytes=4,
        sensors=(protocol.Sensor(name="cpu", value=50.0, unit="C"),),
        gpus=(hardware.READING,),
        gpus_age_s=0.5,
    )
    progress = protocol.Progress(done_bytes=1, total_bytes=4, rate_bytes_s=2.0, note="from the mirror")
    fetching = protocol.ShardState(replica="r", state="fetching", progress=progress)
    errand = protocol.Errand(command=7, what="/x", progress=progress)
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        await tell(link, protocol.Heartbeat(load=load, shards=(fetching,), errands=(errand,)))
        await until(Replica.objects.filter(state="fetching").aexists)
    row = await Node.objects.aget()
    assert msgspec.convert(row.load, protocol.NodeLoad) == load
    assert msgspec.convert(row.errands, tuple[protocol.Errand, ...]) == (errand,)
    shard = await Shard.objects.aget()
    assert msgspec.convert(shard.progress, protocol.Progress) == progress


async def test_an_errand_that_moved_on_is_written_at_once_and_one_that_did_not_is_not(token: str) -> None:
    async with connected(token) as link:
        await tell(link, a_register())
        await heard(link)
        running = protocol.Errand(command=7, what="/x")
        done = msgspec.structs.replace(running, state="done")
        for errands in ((running,), (running,), (done,)):
            await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(), errands=errands))
        await until(Event.objects.filter(kind="errand done", node="one").aexists)
    assert (await Event.objects.aget(kind="errand done")).text == "Node one has /x now"


async def test_an_agent_that_left_while_it_was_answered_is_no_fault(
    token: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(*_: object) -> None:
        raise ConnectionResetError

    caplog.set_level("INFO")
    async with connected(token) as link:
        monkeypatch.setattr(consumers.AgentStream, "_say", gone)
        await tell(link, a_register())
        await until(lambda: in_db(lambda: "ended while it was spoken to" in caplog.text))
        monkeypatch.undo()
    assert "Traceback" not in caplog.text


async def test_a_second_stream_takes_over_and_the_first_is_told(token: str) -> None:
    async with connected(token) as first, connected(token) as second:
        await tell(first, a_register())
        await heard(first)
        await tell(second, a_register())
        assert await heard(second) == protocol.Welcome(node="one", heartbeat_s=5)
        assert await refusal(first) == "another stream speaks for this node now"


async def test_another_machine_is_refused_and_told_to_wait(token: str) -> None:
    async with connected(token) as first, connected(token) as second:
        await tell(first, a_register())
        await heard(first)
        await tell(second, a_register(machine_id="copy"))
        assert "machine copy uses its token" in await refusal(second)
        assert await first.receive_nothing(timeout=0.1)


async def test_a_shard_that_nobody_knows_closes_the_stream_for_a_register(token: str) -> None:
    async with connected(token) as link:
        await tell(link, a_register())
        await heard(link)
        unknown = protocol.ShardState(replica="unknown", state="ready")
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(), shards=(unknown,)))
        closed = await link.receive_output(timeout=LIMIT_S)
        assert closed["code"] == consumers.REGISTER_AGAIN


async def test_a_removed_node_is_cut_off_at_once(token: str) -> None:
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        node = await Node.objects.aget()
        await in_db(actions.remove_node, node=node, actor=SYSTEM, force=True)
        assert await refusal(link) == "node one was removed; make it anew before its agent joins again"
    async with connected(token) as link:
        assert "the join token is not known here" in await refusal(link)


async def test_a_node_that_another_process_removed_is_cut_off_at_its_next_heartbeat(token: str) -> None:
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        await Node.objects.all().adelete()
        status = protocol.ShardState(replica="r", state="ready")
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(), shards=(status,)))
        assert "node one was removed" in await refusal(link)


async def test_a_stream_that_ends_leaves_the_node_to_the_clock(token: str) -> None:
    async with connected(token) as link:
        await tell(link, a_register())
        await heard(link)
    node = await Node.objects.aget()
    assert (node.state, node.connection) == ("ready", "")


@pytest.mark.parametrize("broken", [(actions, "heartbeat"), (commands, "take_due")])
async def test_what_breaks_closes_the_stream_and_is_logged(
    token: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: tuple[Any, str]
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("the store is away")

    monkeypatch.setattr(*broken, fail)
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad()))
        ready = protocol.ShardState(replica="r", state="ready")
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(), shards=(ready,)))
        closed = await link.receive_output(timeout=LIMIT_S)
        assert closed["code"] == consumers.BROKEN
    assert "the store is away" in caplog.text


async def test_a_store_that_is_full_is_said_in_one_line_and_in_one_when_it_is_over(
    token: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> None:
        raise OperationalError("database or disk is full")

    caplog.set_level(logging.INFO)
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        monkeypatch.setattr(actions, "heartbeat", fail)
        monkeypatch.setattr(actions, "register_node", fail)
        ready = protocol.ShardState(replica="r", state="ready")
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(), shards=(ready,)))
        closed = await link.receive_output(timeout=LIMIT_S)
        assert closed["code"] == consumers.BROKEN
    for _ in range(3):  # which it does until it is heard
        async with connected(token) as link:
            await tell(link, full_register())
            closed = await link.receive_output(timeout=LIMIT_S)
            assert closed["code"] == consumers.BROKEN
    monkeypatch.undo()
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
    assert [line for line in caplog.messages if "store" in line] == [
        "node one: the store cannot be used (database or disk is full); streams of agents end, and they connect again",
        "Streams of agents can use the store again",
    ]
    assert "Traceback" not in caplog.text


async def test_a_store_that_is_away_when_a_stream_ends_is_said_and_nothing_is_sent_any_more(
    token: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> None:
        raise OperationalError("the server closed the connection")

    monkeypatch.setattr(actions, "leave", fail)
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        await link.send_input({"type": "websocket.disconnect", "code": 1006})
        await link.wait(LIMIT_S)  # the consumer has ended by itself
        assert link.output_queue.empty()
    assert "the store cannot be used (the server closed the connection)" in caplog.text


async def test_a_register_that_never_comes_is_not_waited_for(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "REGISTER_WITHIN_S", 0.05)
    async with connected(token) as link:
        assert await refusal(link) == "nothing was registered within 0.05 s"
