"""Many agents and one control plane: they come back spread out, each on one stream (ND-5)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.server import Server, ServerConnection, serve

from agent import protocol
from agent.backoff import Backoff
from agent.session import Session
from tests.agent.conftest import eventually, free_port, settings_for
from tests.agent.test_session import Speaker

AGENTS = 300
SOCKETS = 60


def _back_at(backoff: Backoff, outage_s: float) -> float:
    """When an agent is back after an outage that begins when its stream is closed."""
    now = backoff.wait_s(reached=True)
    while now < outage_s:
        now += backoff.wait_s(reached=False)
    return now


@given(st.integers(0, 2**32), st.floats(5, 600))
def test_a_fleet_comes_back_spread_over_as_long_as_the_outage_took(seed: int, outage_s: float) -> None:
    agents = random.Random(seed)
    back = [_back_at(Backoff(agents.uniform), outage_s) - outage_s for _ in range(AGENTS)]
    window_s = min(60.0, outage_s) / 10
    waves = Counter(int(at / window_s) for at in back)
    assert max(back) <= min(60.0, outage_s) + 1
    assert max(waves.values()) < AGENTS / 2, "most of them came at once"


@given(st.integers(0, 2**32))
def test_a_control_plane_that_accepts_and_closes_at_once_is_asked_ever_more_seldom(seed: int) -> None:
    agents = random.Random(seed)
    tries: Counter[int] = Counter()
    for backoff in [Backoff(agents.uniform) for _ in range(AGENTS)]:
        now = 0.0
        while now < 300:
            tries[int(now // 30)] += 1
            now += backoff.wait_s(reached=True, tried_s=0.1)
    assert max(tries[period] for period in range(4, 10)) < tries[0] / 2
    assert sum(tries.values()) < AGENTS * 30


class Plane:
    """Counts who speaks now and how often each came."""

    def __init__(self) -> None:
        self.open: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.came: Counter[str] = Counter()

    async def stream(self, socket: ServerConnection) -> None:
        register = protocol.decode_up(await socket.recv())
        assert isinstance(register, protocol.Register)
        name = register.node
        self.came[name] += 1
        self.open[name] += 1
        self.most[name] = max(self.most[name], self.open[name])
        try:
            await socket.send(protocol.encode(protocol.Welcome(node=name)), text=True)
            async for _ in socket:
                pass
        finally:
            self.open[name] -= 1

    def has_all(self) -> bool:
        return len(self.open) == SOCKETS and set(self.open.values()) == {1}

    async def listen(self, port: int) -> Server:
        return await serve(self.stream, "127.0.0.1", port, close_timeout=1)


class Named(Speaker):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    async def register(self, address: str) -> protocol.Register:
        told = await super().register(address)
        return protocol.Register(
            node=self.name, agent_version="1", machine_id="m", address=address, inventory=told.inventory
        )


async def test_every_agent_has_one_stream_before_and_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "agent.session")
    plane, port = Plane(), free_port()
    server = await plane.listen(port)
    settings = settings_for(f"http://127.0.0.1:{port}", tmp_path, None)
    names = [f"n{number}" for number in range(SOCKETS)]
    tasks = [asyncio.create_task(Session(settings, Named(name), base_s=0.2).run()) for name in names]
    try:
        for count in (1, 2):
            await eventually(plane.has_all, limit_s=120)
            assert min(plane.came.values()) >= count
            server.close()
            await server.wait_closed()
            await eventually(lambda: sum(plane.open.values()) == 0)
            server = await plane.listen(port)
        await eventually(plane.has_all, limit_s=120)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=60)
        server.close()
        await server.wait_closed()
    assert max(plane.most.values()) <= 2, "an agent opened streams without ending those before"
