"""Shards of several commands, and leaders that others wait for: on one node, against a played control plane (AG-12)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from agent import launching, process
from agent.config import AgentSettings
from agent.host import Host
from agent.installer import Installer
from agent.main import Agent
from agent.protocol import Adapter, ShardSpec, ShardStatus, StartShard, StopShard
from agent.supervisor import Supervisor
from agent.weights import Weights
from routing import lora
from tests.agent.conftest import (
    ROOT,
    AgentProcess,
    AgentTask,
    ControlPlane,
    engines_of,
    eventually,
    free_port,
    settings_for,
    spec,
    told,
)
from tests.agent.test_lora import write_peft
from tests.stubs import played_node

STUBS = ROOT / "tests" / "stubs"


class PlayedTask(AgentTask):
    def agent(self) -> Agent:
        return Agent(self.settings, played_node.hardware(self.settings, 2))


class PlayedProcess(AgentProcess):
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.stubs.played_node", str(self.config), "2"]


@pytest.fixture
def agent_settings(control_plane: ControlPlane, tmp_path: Path) -> AgentSettings:
    for name in ("vllm", "ray"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {STUBS / f"stub_{name}.py"} "$@"\n')
        path.chmod(0o755)
    told = settings_for(control_plane.url, tmp_path, None).model_dump()
    return AgentSettings.model_validate(
        told | {"fabrics": {"ib0": ["mlx5_0"]}, "vllm": {"binary": tmp_path / "vllm"}, "address": "127.0.0.9"}
    )


@pytest.fixture
def agents() -> tuple[type[AgentTask], type[AgentProcess]]:
    return PlayedTask, PlayedProcess


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def rank(number: int, model: Path, **changes: object) -> ShardSpec:
    """Of a replica on two nodes with one card each."""
    told = {"engine": "vllm", "gpus": ("GPU-n-0",), "tp": 2, "nodes": 2, "rank": number, "fabric": "ib0"}
    return spec(model, **(told | changes))


async def listening(agent: AgentTask | AgentProcess, control_plane: ControlPlane, shard: ShardSpec) -> int:
    """Start a leader; where it awaits the others."""
    await told(control_plane, agent, shard)

    def place() -> int | None:
        return control_plane.last("r1").status.rendezvous if control_plane.states("r1") else None

    await eventually(place, what=f"listening\n{agent.log}")
    found = place()
    assert found is not None
    return found


def join_ray(port: int) -> socket.socket:
    link = socket.create_connection(("127.0.0.9", port))
    link.sendall(json.dumps({"node": "127.0.0.8", "cards": 1}).encode() + b"\n")
    return link


async def ready(control_plane: ControlPlane, log: str) -> None:
    await eventually(lambda: control_plane.states("r1")[-1:] == ["ready"], what=f"ready\n{log}")


def process_of(settings: AgentSettings, word: str) -> int:
    return next(pid for pid in engines_of(settings) if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))


async def test_a_leader_says_where_it_listens_before_it_serves_and_ends_whole(
    agent: AgentTask, control_plane: ControlPlane, model: Path
) -> None:
    port = await listening(agent, control_plane, rank(0, model, launch_mode="ray"))
    assert control_plane.states("r1") == ["fetching", "starting"]
    assert len(engines_of(agent.settings)) == 2
    with join_ray(port):
        await ready(control_plane, agent.log)
        serving = control_plane.last("r1").status
        assert (serving.rendezvous, serving.pid) == (port, process_of(agent.settings, "serve"))
        assert serving.port != port
        await control_plane.send(StopShard(replica="r1"))
        await eventually(lambda: control_plane.states("r1")[-1] == "stopped", what="stopped")
    assert not engines_of(agent.settings)
    assert not list((agent.settings.work_dir / "shards").iterdir())


async def test_a_sidecar_that_dies_fails_the_shard_with_its_last_lines(
    agent: AgentTask, control_plane: ControlPlane, model: Path
) -> None:
    port = await listening(agent, control_plane, rank(0, model, launch_mode="ray", env={"STUB_EVENTS": "/dev/null"}))
    with join_ray(port):
        await ready(control_plane, agent.log)
        server = process_of(agent.settings, "serve")
        os.kill(server, signal.SIGSTOP)  # so that it is the sidecar's end that is seen
        os.kill(process_of(agent.settings, "--head"), signal.SIGKILL)
        await eventually(lambda: control_plane.states("r1")[-1] == "failed", what="failed")
    failed = control_plane.last("r1")
    assert failed.status.reason == "its sidecar 1 killed by signal 9"
    assert "Ray runtime started on 127.0.0.9" in failed.tail
    assert not engines_of(agent.settings)


async def test_an_agent_that_is_killed_finds_sidecar_server_and_meeting_place_again(
    agent_process: AgentProcess, control_plane: ControlPlane, model: Path
) -> None:
    port = await listening(agent_process, control_plane, rank(0, model, launch_mode="ray"))
    before = engines_of(agent_process.settings)
    agent_process.kill()
    agent_process.start()
    await eventually(lambda: len(control_plane.registers) == 2, what="second register")
    (shard,) = control_plane.registers[1].shards
    assert (shard.status.state, shard.status.rendezvous, shard.status.adopted) == ("starting", port, True)
    with join_ray(port):
        await ready(control_plane, agent_process.log)
        assert engines_of(agent_process.settings) == before
        os.kill(process_of(agent_process.settings, "--head"), signal.SIGKILL)
        await eventually(lambda: control_plane.states("r1")[-1] == "failed", what="failed")
    assert not engines_of(agent_process.settings)


async def test_a_start_that_its_agents_end_cut_off_is_undone_and_said(
    agent_process: AgentProcess, control_plane: ControlPlane, model: Path
) -> None:
    await told(control_plane, agent_process, rank(0, model, launch_mode="ray", env={"STUB_HEAD_S": "100"}))
    await eventually(lambda: engines_of(agent_process.settings), what="the head")
    records = agent_process.settings.work_dir / "shards"
    await eventually(lambda: list(records.glob("*.json")), what="its record")
    agent_process.kill()
    agent_process.start()
    await eventually(lambda: control_plane.states("r1")[-1:] == ["failed"], what=f"failed\n{agent_process.log}")
    assert control_plane.last("r1").status.reason == "its start was cut off by its agent's end"
    assert not engines_of(agent_process.settings)
    assert not list(records.iterdir())


async def test_a_worker_over_ray_waits_for_the_head_and_can_be_stopped_meanwhile(
    agent: AgentTask, control_plane: ControlPlane, model: Path
) -> None:
    agent.start()
    await eventually(lambda: control_plane.registers)
    nobody = f"127.0.0.1:{free_port()}"
    for name in ("r1", "late"):
        shard = rank(1, model, launch_mode="ray", rendezvous=nobody, replica=name, startup_timeout_s=1)
        await control_plane.send(StartShard(spec=shard))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["starting"])
    await control_plane.send(StopShard(replica="r1", rank=1))
    await eventually(lambda: control_plane.states("r1")[-1] == "stopped", what="stopped")
    await eventually(lambda: control_plane.states("late")[-1] == "failed", what="failed")
    assert "startup_timeout" in control_plane.last("late").status.reason
    assert not engines_of(agent.settings)


async def test_a_headless_worker_is_ready_while_it_lives_and_has_no_port(
    agent: AgentTask, control_plane: ControlPlane, model: Path
) -> None:
    agent.start()
    await eventually(lambda: control_plane.registers)
    with socket.create_server(("127.0.0.1", 0)) as leader:
        place = f"127.0.0.1:{leader.getsockname()[1]}"
        await control_plane.send(StartShard(spec=rank(1, model, rendezvous=place)))
        await ready(control_plane, agent.log)
        link, _ = leader.accept()
        assert link.recv(16) == b"1"
        assert control_plane.last("r1").status.port is None
        link.close()
        await eventually(lambda: control_plane.states("r1")[-1] == "failed", what="failed")
    assert "rank 0 is gone" in control_plane.last("r1").tail


async def test_a_repository_is_the_engines_to_fetch_and_its_adapters_are_there_under_gateways_names(
    agent: AgentTask, control_plane: ControlPlane, tmp_path: Path
) -> None:
    adapter = Adapter(name="law", source=str(write_peft(tmp_path / "law")))
    agent.start()
    await eventually(lambda: control_plane.registers)
    shard = rank(0, Path("org/model"), nodes=1, tp=1, fabric="", adapters=(adapter,))
    await control_plane.send(StartShard(spec=shard))
    await ready(control_plane, agent.log)
    url = f"http://127.0.0.9:{control_plane.last('r1').status.port}/v1/models"
    async with httpx.AsyncClient(trust_env=False) as http:
        served = (await http.get(url)).json()["data"]
    name = lora.adapter(adapter.name, adapter.source).engine_name
    assert [(each["id"], each["root"]) for each in served] == [("tiny", "org/model"), (name, adapter.source)]


async def test_adapters_that_are_loaded_when_asked_for_are_not_looked_at_before(
    agent: AgentTask, control_plane: ControlPlane, model: Path
) -> None:
    agent.start()
    await eventually(lambda: control_plane.registers)
    adapters = (Adapter(name="law", source="/not/here"), Adapter(name="sql", source="org/sql"))
    shard = rank(0, model, nodes=1, tp=1, fabric="", adapters=adapters, max_loaded_adapters=2)
    await control_plane.send(StartShard(spec=shard))
    await ready(control_plane, agent.log)


async def test_waiting_for_a_listener_is_bounded_and_says_where_nobody_was() -> None:
    port = free_port()
    with pytest.raises(launching.NotStarted, match=f"nothing listened on 127.0.0.1:{port} within 0.5 s"):
        await launching.wait_for_listener("127.0.0.1", port, limit_s=0.5)


async def test_a_flag_that_vllm_does_not_have_is_in_the_tail_of_the_failure(
    agent: AgentTask, control_plane: ControlPlane, model: Path
) -> None:
    agent.start()
    await eventually(lambda: control_plane.registers)
    shard = rank(0, model, nodes=1, tp=1, fabric="", args=("--no-such-flag",))
    await control_plane.send(StartShard(spec=shard))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["failed"], what="failed")
    assert "unrecognized arguments: --no-such-flag" in control_plane.last("r1").tail


async def test_vllms_processes_that_outlive_it_are_ended_with_it(
    agent: AgentTask, control_plane: ControlPlane, model: Path
) -> None:
    await told(control_plane, agent, rank(0, model, nodes=1, tp=1, fabric="", env={"STUB_FAIL": "orphans"}))
    await ready(control_plane, agent.log)
    assert len(engines_of(agent.settings)) == 2
    os.kill(process_of(agent.settings, "serve"), signal.SIGKILL)
    await eventually(lambda: control_plane.states("r1")[-1] == "failed", what="failed")
    assert not engines_of(agent.settings)


async def test_a_shard_that_is_told_to_stop_while_it_fails_says_both(
    agent_settings: AgentSettings, model: Path
) -> None:
    said: list[ShardStatus] = []
    settings, hardware = agent_settings, played_node.hardware(agent_settings, 1)
    hardware.wait(60)
    found = hardware.look(given=(), ours=dict)
    host = Host("127.0.0.9", "x86_64", gpus=1, cards=found.gpus, fabrics=found.fabrics, interface="lo")
    installer = Installer(settings.work_dir / "engines", binaries=settings.programs)
    one = Supervisor(settings, host, weights=Weights(settings.work_dir), installer=installer, publish=said.append)

    async def watched(state: str) -> None:
        while said[-1].status.state != state:
            one.watch()
            await asyncio.sleep(0.05)

    try:
        one.start_shard(StartShard(spec=rank(0, model, nodes=1, tp=1, fabric="")))
        await watched("ready")
        pid = said[-1].status.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await watched("stopping")
        one.stop_shard(StopShard(replica="r1"))
        await watched("stopped")
        states = [(each.status.state, each.status.reason) for each in said[-3:]]
        why = "killed by signal 9"
        assert states == [("stopping", why), ("failed", why), ("stopped", "")]
        assert one.running() == ()
    finally:
        await one.close(stop_engines=True)


async def test_a_program_that_is_not_there_is_named(
    agent: AgentTask, control_plane: ControlPlane, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "ray").unlink()
    await told(control_plane, agent, rank(0, model, launch_mode="ray"))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["failed"], what="failed")
    says = f"{tmp_path / 'ray'} is not there. Install it, or correct agent.yaml."
    assert control_plane.last("r1").status.reason == says


async def test_a_fabric_that_the_node_has_not_is_refused_before_anything_starts(
    agent: AgentTask, control_plane: ControlPlane, model: Path
) -> None:
    await told(control_plane, agent, rank(0, model, fabric="ib7"))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["failed"], what="failed")
    assert control_plane.last("r1").status.reason.startswith("fabric: ib7 is not declared on this node.")
    assert process.marked(f"n|{agent.settings.work_dir}") == {}
