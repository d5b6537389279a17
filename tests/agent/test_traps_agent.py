"""What other agents fell into: short losses of the network, storms of reconnects, answers of proxies (facts: traps)."""

from __future__ import annotations

import asyncio
import http
from pathlib import Path

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

import agent.session
import agent.stream
from agent import process
from agent.protocol import StartShard, StopShard
from tests.agent.conftest import AgentTask, ControlPlane, engines_of, eventually, free_port, settings_for, spec
from tests.agent.test_session import Waits, speaking


async def test_an_engine_serves_on_while_the_control_plane_is_gone_and_is_told_of_whole_afterwards(
    tmp_path: Path, stub: Path, gguf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port, before, after = free_port(), ControlPlane(), ControlPlane()
    one = AgentTask(settings_for(f"http://127.0.0.1:{port}", tmp_path, stub), caplog)
    try:
        async with before.listening(port):
            one.start()
            await eventually(lambda: before.registers)
            await before.send(StartShard(spec=spec(gguf), engine_key="k" * 64))
            await eventually(lambda: before.states("r1")[-1:] == ["ready"])
            before.cut()
        pid = before.last("r1").status.pid
        assert pid is not None
        await eventually(lambda: "cannot connect" in caplog.text)
        assert process.identify(pid) is not None
        async with after.listening(port):
            await eventually(lambda: after.registers)
            [told] = after.registers[0].shards
            assert (told.spec, told.status.state, told.status.pid) == (spec(gguf), "ready", pid)
            await after.send(StopShard(replica="r1"))  # what was forgotten during the cut is still to be had
            await eventually(lambda: not engines_of(one.settings))
    finally:
        await one.end()


async def test_a_network_that_swallows_everything_is_noticed_and_left(
    control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Dropped packets close nothing: the agent asks whether anybody is there."""
    monkeypatch.setattr(agent.session, "ALONE_PING_S", 0.2)
    monkeypatch.setattr(agent.stream, "QUIET_S", 0.1)
    monkeypatch.setattr(agent.stream, "SILENT_S", 0.5)
    dropping = asyncio.Event()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not dropping.is_set():
                writer.write(data)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection("127.0.0.1", control_plane.port)
        ways = {asyncio.create_task(pipe(reader, to)), asyncio.create_task(pipe(there, writer))}
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for each in ways:
            each.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.close()
        to.close()

    network = await asyncio.start_server(carry, "127.0.0.1", 0)
    port = network.sockets[0].getsockname()[1]
    async with speaking(settings_for(f"http://127.0.0.1:{port}", tmp_path, None)):
        await eventually(lambda: control_plane.heartbeats)
        dropping.set()
        await asyncio.sleep(0)
        await eventually(lambda: "no answer to a ping" in caplog.text)
        count = len(control_plane.registers)
        dropping.clear()
        await eventually(lambda: len(control_plane.registers) > count)
    network.close()
    await network.wait_closed()


@pytest.mark.parametrize(
    ("status", "grows"), [(401, True), (403, True), (426, True), (429, True), (502, False), (503, False), (504, False)]
)
async def test_a_refusal_makes_waits_grow_and_a_proxy_whose_control_plane_is_away_does_not(
    status: int, grows: bool, tmp_path: Path
) -> None:
    def refuse(_: ServerConnection, __: Request) -> Response:
        return Response(status, http.HTTPStatus(status).phrase, Headers(), b"no")

    async def never(_: ServerConnection) -> None:
        raise AssertionError

    waits = Waits()
    async with serve(never, "127.0.0.1", 0, process_request=refuse) as server:
        port = server.sockets[0].getsockname()[1]
        async with speaking(settings_for(f"http://127.0.0.1:{port}", tmp_path, None), base_s=0.02, uniform=waits):
            await eventually(lambda: len(waits) >= 3)
    assert (waits[:3] == [0.02, 0.04, 0.08]) is grows
