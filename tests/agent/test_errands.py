"""Fetches and installations that commands ask for: begun at once, once, told in heartbeats (ND-3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from agent import errands
from agent.config import AgentSettings
from agent.errands import Errands
from agent.host import Host
from agent.installer import Installer
from agent.protocol import Errand, Fetch, InstallEngine, Progress
from agent.weights import Weights
from tests.agent.conftest import AgentTask, ControlPlane, eventually

HOST = Host(address="127.0.0.1", architecture="x86_64", cores=1, memory_bytes=1)


class Slow(Weights):
    """Fetches that end when they are told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.go_on = asyncio.Event()

    async def ensure(self, source: str, told: Callable[[Progress], None]) -> Path:
        told(Progress(done_bytes=1, total_bytes=2))
        await self.go_on.wait()
        if source == "broken":
            raise RuntimeError("a fault of ours")
        return await super().ensure(source, told)


@pytest.fixture
async def slow(tmp_path: Path) -> Slow:
    return Slow(tmp_path / "models")


def made(weights: Weights, tmp_path: Path, **binaries: Path) -> Errands:
    return Errands(weights, Installer(tmp_path / "engines", binaries=binaries), lambda: HOST)


async def test_an_errand_is_told_from_its_beginning_to_its_end(slow: Slow, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    found = made(slow, tmp_path, llamacpp=tmp_path / "there", vllm=tmp_path / "gone")
    there, gone = str(tmp_path / "there"), str(tmp_path / "gone")
    for number, body in enumerate((Fetch(source=there), Fetch(source=gone), Fetch(source="broken"))):
        assert found.begin(number, body) == ""
    await asyncio.sleep(0)
    assert found.told()[0] == Errand(command=0, what=there, progress=Progress(done_bytes=1, total_bytes=2))
    slow.go_on.set()
    await eventually(lambda: all(each.state != "running" for each in found.told()))
    assert [each.state for each in found.told()] == ["done", "failed", "failed"]
    assert f"{gone} is not on this node" in found.told()[1].reason
    assert found.told()[2].reason == "the agent itself failed: RuntimeError: a fault of ours"
    for number, engine in ((7, "llamacpp"), (8, "vllm")):
        assert found.begin(number, InstallEngine(engine=engine)) == ""
    await eventually(lambda: all(each.state != "running" for each in found.told()))
    assert [(each.what, each.state) for each in found.told()[3:]] == [("llamacpp", "done"), ("vllm", "failed")]


async def test_errands_are_few_at_once_and_few_are_remembered(slow: Slow, tmp_path: Path) -> None:
    found = made(slow, tmp_path)
    for number in range(errands.AT_ONCE):
        assert found.begin(number, Fetch(source="/x")) == ""
    refused = found.begin(99, Fetch(source="/x"))
    assert refused == "4 fetches and installations are under way on this node; ask again when one has ended."
    slow.go_on.set()
    for number in range(100, 130):
        await eventually(lambda: found.begin(number, Fetch(source="/x")) == "")  # noqa: B023 - awaited in the same turn
    assert len(found.told()) == errands.KEPT
    await found.close()


async def test_what_is_under_way_ends_with_the_agent(slow: Slow, tmp_path: Path) -> None:
    found = made(slow, tmp_path)
    found.begin(1, Fetch(source="/x"))
    await found.close()
    assert [each.state for each in found.told()] == ["running"]


async def test_a_repeated_errand_is_answered_the_same_begun_once_and_told_in_heartbeats(
    agent: AgentTask, control_plane: ControlPlane, agent_settings: AgentSettings, gguf: Path
) -> None:
    agent.start()
    await eventually(lambda: control_plane.registers)
    for _ in range(2):
        await control_plane.send(Fetch(source=str(gguf)), number=5)
    await eventually(lambda: len(control_plane.acks) == 2)
    assert {(ack.id, ack.ok) for ack in control_plane.acks} == {(5, True)}
    done = (Errand(command=5, what=str(gguf), state="done"),)
    await eventually(lambda: control_plane.heartbeats and control_plane.heartbeats[-1].errands == done)
