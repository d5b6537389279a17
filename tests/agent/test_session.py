"""The stream, against a real websocket server that refuses, closes, cuts, blocks and floods (ND-1..3, ND-5)."""

from __future__ import annotations

import asyncio
import http
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

import agent.stream
from agent import protocol
from agent.config import AgentSettings
from agent.protocol import Ack, Command, Heartbeat, Inventory, NodeLoad, Refused, Register, ShardState, ShardStatus
from agent.session import Session
from tests import hardware
from tests.agent.conftest import ControlPlane, eventually, settings_for


class Speaker:
    """A node with nothing on it."""

    def __init__(self, padding: str = "") -> None:
        self.addresses: list[str] = []
        self.padding = padding

    async def register(self, address: str) -> Register:
        self.addresses.append(address)
        inventory = Inventory(hostname="h", os=self.padding)
        return Register(node="n", agent_version="1", machine_id="m", address=address, inventory=inventory)

    async def heartbeat(self, told: Inventory) -> Heartbeat:
        return Heartbeat(load=NodeLoad())

    def failures(self) -> tuple[ShardStatus, ...]:
        return ()

    def answer(self, command: Command) -> Ack:
        return Ack(id=command.id)


@asynccontextmanager
async def speaking(
    settings: AgentSettings,
    *,
    node: Speaker | None = None,
    base_s: float = 0.05,
    healthy_s: float = 60.0,
    uniform: Callable[[float, float], float] = lambda low, high: high,
) -> AsyncIterator[Session]:
    session = Session(settings, node or Speaker(), base_s=base_s, healthy_s=healthy_s, uniform=uniform)
    task = asyncio.create_task(session.run())
    try:
        yield session
    finally:
        task.cancel()
        await asyncio.wait((task,), timeout=30)
        assert task.done(), "it did not stop"


class Waits(list[float]):
    """The longest waits, which the session then waits."""

    def __call__(self, low: float, high: float) -> float:
        self.append(high)
        return high


def status(text: str = "") -> ShardStatus:
    return ShardStatus(status=ShardState(replica="r", state="failed", reason="x"), tail=text)


async def test_the_token_goes_in_a_header_and_the_address_is_the_one_that_faces_the_control_plane(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret-token\n")
    settings = settings_for(control_plane.url, tmp_path, None).model_copy(update={"token_file": tmp_path / "token"})
    node = Speaker()
    async with speaking(settings, node=node):
        await eventually(lambda: control_plane.heartbeats)
    assert control_plane.tokens == ["Bearer secret-token"]
    assert node.addresses == ["127.0.0.1"]
    assert control_plane.registers[0].address == "127.0.0.1"


async def test_a_cut_stream_is_opened_again_with_a_whole_register(
    control_plane: ControlPlane, agent_settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with speaking(agent_settings):
        for count in (1, 2, 3):
            await eventually(lambda: len(control_plane.registers) == count)  # noqa: B023 - awaited in the same turn
            control_plane.cut()
        await eventually(lambda: len(control_plane.registers) == 4)
    assert len(control_plane.opened_at) == 4
    assert "the connection was cut" in caplog.text


async def test_waits_grow_over_streams_that_are_closed_at_once(
    control_plane: ControlPlane, agent_settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    control_plane.close_at_once = 1011
    waits = Waits()
    async with speaking(agent_settings, base_s=0.05, uniform=waits):
        await eventually(lambda: len(control_plane.opened_at) == 4)
    assert waits[:3] == [0.05, 0.1, 0.2]
    assert "1011 go away" in caplog.text


async def test_a_try_that_follows_at_once_is_called_so_and_others_say_when(
    control_plane: ControlPlane, agent_settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    control_plane.close_at_once = 1011
    waits = iter((0.0, 0.04, 0.06))
    async with speaking(agent_settings, uniform=lambda _low, _high: next(waits, 100.0)):
        await eventually(lambda: len(control_plane.opened_at) == 4 and "in 100.0 s" in caplog.text)
    whens = [message.rpartition("Trying again ")[2] for message in caplog.messages if "Trying again" in message]
    assert whens == ["at once", "at once", "in 0.1 s", "in 100.0 s"]


async def test_waits_start_anew_after_a_healthy_stream(
    control_plane: ControlPlane, agent_settings: AgentSettings
) -> None:
    waits = Waits()
    async with speaking(agent_settings, base_s=0.1, healthy_s=0.05, uniform=waits):
        for count in range(1, 6):
            beats = len(control_plane.heartbeats)
            await eventually(lambda: len(control_plane.heartbeats) > beats)  # noqa: B023 - awaited in the same turn
            await asyncio.sleep(0.1)
            control_plane.cut()
            await eventually(lambda: len(control_plane.registers) > count)  # noqa: B023
    assert len(control_plane.registers) == 6
    assert waits == [0.05] * 5


async def test_a_clean_close_is_told_apart_from_an_error(
    control_plane: ControlPlane, agent_settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    control_plane.close_at_once = 1000
    async with speaking(agent_settings):
        await eventually(lambda: len(control_plane.opened_at) == 2)
    lines = [record for record in caplog.records if record.name == "agent.session"]
    assert lines
    assert {record.levelname for record in lines} == {"INFO"}
    assert "closed by the other side (1000 go away)" in lines[0].getMessage()


async def test_a_refusal_is_logged_with_its_reason_and_its_wish_is_obeyed(
    control_plane: ControlPlane, agent_settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    control_plane.first = lambda: Refused(reason="node n is not known", retry_after_s=0.6)
    async with speaking(agent_settings, base_s=0.01):
        await eventually(lambda: len(control_plane.opened_at) == 2)
    assert control_plane.opened_at[1] - control_plane.opened_at[0] > 0.6
    assert "refused: node n is not known" in caplog.text


@pytest.mark.parametrize(("code", "says"), [(401, "join token"), (403, "may not join"), (503, "refused with 503")])
async def test_an_http_refusal_names_the_next_step_and_retry_after_is_obeyed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int, says: str
) -> None:
    asked: list[float] = []

    def refuse(_: ServerConnection, __: Request) -> Response:
        asked.append(monotonic())
        return Response(code, http.HTTPStatus(code).phrase, Headers({"Retry-After": "1"}), b"no")

    async def never(_: ServerConnection) -> None:
        raise AssertionError

    async with serve(never, "127.0.0.1", 0, process_request=refuse) as server:
        port = server.sockets[0].getsockname()[1]
        async with speaking(settings_for(f"http://127.0.0.1:{port}", tmp_path, None), base_s=0.01):
            await eventually(lambda: len(asked) == 2)
    assert asked[1] - asked[0] > 0.95
    assert says in caplog.text


async def test_another_control_plane_is_found_when_the_first_is_gone(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    settings = settings_for(control_plane.url, tmp_path, None)
    gone = "http://127.0.0.1:1"
    async with speaking(settings.model_copy(update={"control_plane": [gone, control_plane.url]})):
        await eventually(lambda: control_plane.registers)


async def test_stopping_waits_for_no_read(
    control_plane: ControlPlane, agent_settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.stream, "WELCOME_S", 3600.0)
    control_plane.first = lambda: None
    async with speaking(agent_settings):
        await eventually(lambda: control_plane.registers)
    await eventually(lambda: control_plane.closes)
    assert control_plane.closes == ["the agent stops"]


async def test_stopping_waits_for_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.stream, "OPEN_S", 3600.0)
    opened = asyncio.Event()
    writers = []

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        opened.set()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with speaking(settings_for(f"http://127.0.0.1:{port}", tmp_path, None)):
        await asyncio.wait_for(opened.wait(), 30)
    for writer in writers:
        writer.close()
    server.close()
    await server.wait_closed()


async def test_a_control_plane_that_does_not_read_is_left_and_registered_with_anew(tmp_path: Path) -> None:
    registers = 0
    over = asyncio.Event()

    async def never_reads(socket: ServerConnection) -> None:
        nonlocal registers
        registers += 1
        await socket.recv()
        await socket.send(protocol.encode(protocol.Welcome(node="n")), text=True)
        await over.wait()

    async with serve(never_reads, "127.0.0.1", 0, max_queue=1, close_timeout=0.1) as server:
        port = server.sockets[0].getsockname()[1]
        async with speaking(settings_for(f"http://127.0.0.1:{port}", tmp_path, None)) as session:
            await eventually(lambda: registers == 1)

            def flood() -> bool:
                for _ in range(100):
                    session.publish(status("x" * 15_000))
                return registers >= 2

            await eventually(flood)
        over.set()


async def test_messages_that_this_version_does_not_know_do_no_harm(
    control_plane: ControlPlane, agent_settings: AgentSettings
) -> None:
    async with speaking(agent_settings):
        await eventually(lambda: control_plane.heartbeats)
        deep = '{"type":"command","id":6,"body":{"type":"fetch","source":"s","x":' + "[" * 50_000 + "]" * 50_000 + "}}"
        for raw in ("not json", '{"type":"song"}', deep, '{"type":"command","id":7,"body":{"type":"dance"}}'):
            await control_plane.send_raw(raw)
        await eventually(lambda: control_plane.acks)
        count = len(control_plane.heartbeats)
        await eventually(lambda: len(control_plane.heartbeats) > count)
    assert (control_plane.acks[0].id, control_plane.acks[0].ok) == (7, False)
    assert len(control_plane.registers) == 1


async def test_an_inventory_of_3_mib_passes(control_plane: ControlPlane, agent_settings: AgentSettings) -> None:
    async with speaking(agent_settings, node=Speaker(padding="x" * 3 * 2**20)):
        await eventually(lambda: control_plane.heartbeats)
    assert len(control_plane.registers) == 1


async def test_a_missing_token_file_is_said_and_tried_again(
    control_plane: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    settings = settings_for(control_plane.url, tmp_path, None).model_copy(update={"token_file": token})
    async with speaking(settings):
        await eventually(lambda: f"token_file {token} cannot be read" in caplog.text)
        assert (
            "Make a token on the control plane with `llmgw ctl node-token n`, and put it into this file" in caplog.text
        )
        token.write_text("t")
        await eventually(lambda: control_plane.tokens)
    assert control_plane.tokens[0] == "Bearer t"


@pytest.mark.parametrize("content", ["", " \n", "a b", "nt-a\nnt-b", "nt-ä"])
async def test_a_token_file_that_holds_no_token_is_said(
    control_plane: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    (tmp_path / "token").write_text(content)
    settings = settings_for(control_plane.url, tmp_path, None).model_copy(update={"token_file": tmp_path / "token"})
    async with speaking(settings):
        await eventually(lambda: "does not hold one join token. Make a token on the control plane" in caplog.text)
    assert control_plane.tokens == []


@pytest.mark.parametrize(("mode", "warned"), [(0o600, 0), (0o400, 0), (0o640, 1), (0o604, 1)])
async def test_a_token_file_that_others_can_read_is_warned_about_once(
    control_plane: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: int
) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    token.chmod(mode)
    settings = settings_for(control_plane.url, tmp_path, None).model_copy(update={"token_file": token})
    async with speaking(settings):
        for count in (1, 2):
            await eventually(lambda: len(control_plane.registers) == count)  # noqa: B023 - awaited in the same turn
            control_plane.cut()
    assert caplog.text.count(f"token_file {token} can be read by others. Run: chmod 600 {token}") == warned


async def test_an_agent_waits_no_longer_for_a_control_plane_than_it_has_been_gone(tmp_path: Path) -> None:
    base_s, began = 0.2, 0.0
    waited: list[tuple[float, float]] = []

    def longest(low: float, high: float) -> float:
        waited.append((high, monotonic() - began))
        return high

    plane, over = ControlPlane(), ControlPlane()
    async with plane.listening():
        port, settings = plane.port, settings_for(plane.url, tmp_path, None)
        task = asyncio.create_task(Session(settings, Speaker(), base_s=base_s, healthy_s=0.2, uniform=longest).run())
        await eventually(lambda: plane.heartbeats)
        await asyncio.sleep(0.3)
        began = monotonic()
    await eventually(lambda: len(waited) >= 5)
    async with over.listening(port):
        await eventually(lambda: over.registers)
        task.cancel()
        await asyncio.wait((task,), timeout=30)
    assert all(wait_s <= max(base_s, gone_s) for wait_s, gone_s in waited), waited


def test_a_register_arrives_with_every_field_it_was_sent_with() -> None:
    shard = protocol.ShardSpec(
        replica="r", rank=1, model="m", profile="p", profile_digest="d", engine="llamacpp", source="/s", args=("-c",),
        env={"A": "b"}, gpus=("GPU-1",), fabric="ib0", cores=2.5, slots=3, tp=2, pp=2, nodes=2, startup_timeout_s=9,
        adapters=(protocol.Adapter(name="a", source="/a"),), max_loaded_adapters=4, rendezvous="h:29500",
        made_at=datetime(2026, 11, 29, tzinfo=UTC), launch_mode="ray", seal="s",
    )  # fmt: skip
    state = ShardState(
        replica="r", rank=1, state="fetching", port=1, pid=2, reason="x", adopted=True, rendezvous=29500,
        progress=protocol.Progress(done_bytes=1, total_bytes=2, rate_bytes_s=3.0, note="n"),
    )  # fmt: skip
    inventory = hardware.INVENTORY
    sent = Register(
        node="n", protocol=1, agent_version="1", machine_id="m", instance="i", address="a", inventory=inventory,
        labels={"l": "1"}, shards=(protocol.Running(spec=shard, status=state),),
    )  # fmt: skip
    assert protocol.decode_up(protocol.encode(sent)) == sent
    card, fabric, adapter = inventory.gpus[0], inventory.fabrics[0], inventory.adapters[0]
    for one in (sent, inventory, shard, state, card, fabric, adapter, adapter.ports[0], hardware.READING):
        plain = msgspec.structs.asdict(one)
        assert all(value not in (None, "", (), {}) for value in plain.values()), "the example leaves a field out"
