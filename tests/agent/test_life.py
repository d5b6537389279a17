"""The agent as a real process, a control plane on a real socket, a real program as the engine (AG-15, AG-20..24)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from agent import probe, process, shards
from agent.config import AgentSettings
from agent.protocol import Refused, StartShard, StopShard
from tests.agent.conftest import AgentProcess, AgentTask, ControlPlane, end_engines, engines_of, eventually, spec, told

KEY = "k" * 64


async def _ready(
    agent: AgentTask | AgentProcess, plane: ControlPlane, gguf: Path, replica: str = "r1", **changes: object
) -> int:
    """Start agent and shard as needed; the engine's pid when it is ready."""
    await told(plane, agent, spec(gguf, replica, **changes), key=KEY)
    await eventually(lambda: plane.states(replica)[-1:] == ["ready"], what=f"ready\n{agent.log}")
    pid = plane.last(replica).status.pid
    assert pid is not None
    return pid


async def test_a_shard_goes_from_fetching_to_ready_and_stops_without_a_trace(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    loaded = gguf.with_name("loaded")
    agent.start()
    await eventually(lambda: control_plane.registers)
    loads = {"STUB_FAIL": "loads", "STUB_SWITCH": str(loaded)}
    await control_plane.send(StartShard(spec=spec(gguf, env=loads), engine_key=KEY))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["loading"])
    loaded.touch()
    await eventually(lambda: control_plane.states("r1")[-1] == "ready")
    pid = control_plane.last("r1").status.pid
    assert pid is not None
    assert control_plane.states("r1") == ["fetching", "starting", "loading", "ready"]  # nothing to install
    status = control_plane.last("r1").status
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        url = f"http://127.0.0.1:{status.port}/v1/models"
        assert (await http.get(url)).status_code == 401
        models = (await http.get(url, headers={"Authorization": f"Bearer {KEY}"})).json()
    assert models["data"][0]["id"] == "tiny"

    await control_plane.send(StopShard(replica="r1"))
    await eventually(lambda: control_plane.states("r1")[-1] == "stopped", what="stopped")
    assert process.identify(pid) is None
    assert not engines_of(agent.settings)
    assert not list((agent.settings.work_dir / "shards").glob("*.json"))
    assert [ack.ok for ack in control_plane.acks] == [True, True]


async def test_the_engine_key_is_in_no_argument_no_log_and_only_in_private_files(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    pid = await _ready(agent, control_plane, gguf)
    assert KEY not in Path(f"/proc/{pid}/cmdline").read_text()
    assert KEY not in agent.log
    holders = [path for path in agent.settings.work_dir.rglob("*") if path.is_file() and KEY in path.read_text()]
    assert holders == [agent.settings.work_dir / "shards" / "r1.0.json"]
    assert holders[0].stat().st_mode & 0o777 == 0o600


async def test_an_engine_killed_from_outside_is_failed_with_the_signal_and_its_last_lines(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    pid = await _ready(agent, control_plane, gguf)
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: control_plane.states("r1")[-1] == "failed", what="failed")
    failed = control_plane.last("r1")
    assert failed.status.reason == "killed by signal 9"
    assert "stub engine for tiny" in failed.tail


async def test_an_engine_that_exits_while_starting_says_why(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    await told(control_plane, agent, spec(gguf, env={"STUB_FAIL": "exit"}))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["failed"], what="failed")
    failed = control_plane.last("r1")
    assert failed.status.reason == "exited with status 3"
    assert "the weights are the wrong shape" in failed.tail


async def test_an_unknown_flag_of_a_profile_fails_with_the_flag_in_the_tail(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    await told(control_plane, agent, spec(gguf, args=("--no-such-flag",)))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["failed"], what="failed")
    assert "--no-such-flag" in control_plane.last("r1").tail


async def test_an_engine_that_lists_another_name_is_not_ready_but_failed(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    await told(control_plane, agent, spec(gguf, env={"STUB_FAIL": "unnamed"}))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["failed"], what="failed")
    assert "does not list 'tiny'" in control_plane.last("r1").status.reason


async def test_an_engine_that_never_serves_fails_at_its_startup_timeout(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    await told(control_plane, agent, spec(gguf, startup_timeout_s=1, env={"STUB_FAIL": "never"}))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["failed"], what="failed")
    assert "startup_timeout" in control_plane.last("r1").status.reason
    assert not engines_of(agent.settings)


async def test_what_cannot_run_is_refused_with_the_field_before_anything_starts(
    agent: AgentTask, control_plane: ControlPlane, tmp_path: Path
) -> None:
    agent.start()
    await eventually(lambda: control_plane.registers)
    text = tmp_path / "readme.gguf"
    text.write_text("not weights")
    wrong = {
        "tp": spec(text, "tp", tp=2),
        "source": spec(text, "source"),
        "missing": spec(tmp_path / "nothing.gguf", "missing"),
        "engine": spec(text, "engine", engine="vllm"),
    }
    for one in wrong.values():
        await control_plane.send(StartShard(spec=one))
    await eventually(lambda: all(control_plane.states(name)[-1:] == ["failed"] for name in wrong))
    reasons = {name: control_plane.last(name).status.reason for name in wrong}
    assert reasons["tp"].startswith("tp: ")
    assert "is not a GGUF file" in reasons["source"]
    assert "nothing.gguf is not on this node" in reasons["missing"]
    assert reasons["engine"].startswith("engine: ")
    await eventually(lambda: len(control_plane.acks) == 4)
    assert [ack.ok for ack in control_plane.acks] == [False, True, True, False]
    assert not engines_of(agent.settings)


async def test_a_killed_agent_finds_its_engine_again_with_the_same_pid(
    agent_process: AgentProcess, control_plane: ControlPlane, gguf: Path
) -> None:
    pid = await _ready(agent_process, control_plane, gguf)
    agent_process.kill()
    assert process.identify(pid) is not None
    agent_process.start()
    await eventually(lambda: len(control_plane.registers) == 2, what="second register")
    (shard,) = control_plane.registers[1].shards
    assert (shard.status.pid, shard.status.state, shard.status.adopted) == (pid, "ready", True)
    assert shard.spec == spec(gguf)

    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: control_plane.states("r1")[-1] == "failed", what="failed")
    assert "stub engine for tiny" in control_plane.last("r1").tail


async def test_an_agent_killed_while_its_engine_loads_waits_on_for_the_same_one(
    agent_process: AgentProcess, control_plane: ControlPlane, gguf: Path
) -> None:
    loaded = gguf.with_name("loaded")
    agent_process.start()
    await eventually(lambda: control_plane.registers)
    loads = {"STUB_FAIL": "loads", "STUB_SWITCH": str(loaded)}
    await control_plane.send(StartShard(spec=spec(gguf, env=loads)))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["loading"])
    pid = control_plane.last("r1").status.pid
    agent_process.kill()
    agent_process.start()
    await eventually(lambda: len(control_plane.registers) == 2)
    assert [shard.status.state for shard in control_plane.registers[1].shards] == ["loading"]
    loaded.touch()
    await eventually(lambda: control_plane.states("r1")[-1] == "ready")
    assert control_plane.last("r1").status.pid == pid
    assert list(engines_of(agent_process.settings)) == [pid]


async def test_an_agent_leaves_the_engines_of_another_agent_on_the_same_machine_alone(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path, tmp_path: Path
) -> None:
    pid = await _ready(agent, control_plane, gguf)
    (tmp_path / "other").mkdir()
    other = AgentProcess(tmp_path / "other", agent.settings.model_copy(update={"work_dir": tmp_path / "other/work"}))
    try:
        other.start()
        await eventually(lambda: len(control_plane.registers) == 2)
        assert control_plane.registers[1].shards == ()
        # The same replica's name on both: stopping one must not reach for the other.
        await control_plane.send(StartShard(spec=spec(gguf)))
        await eventually(lambda: len(engines_of(other.settings)) == 1)
        await control_plane.send(StopShard(replica="r1", grace_s=0))
        await eventually(lambda: control_plane.states("r1")[-1] == "stopped")
        assert not engines_of(other.settings)
    finally:
        other.end()
    assert process.identify(pid) is not None


async def test_a_stopped_agent_leaves_its_engine_and_the_next_one_stops_it(
    agent_process: AgentProcess, control_plane: ControlPlane, gguf: Path
) -> None:
    pid = await _ready(agent_process, control_plane, gguf)
    assert await agent_process.stop() == 0
    assert process.identify(pid) is not None
    agent_process.start()
    await eventually(lambda: len(control_plane.registers) == 2)
    await control_plane.send(StopShard(replica="r1"))
    await eventually(lambda: control_plane.states("r1")[-1] == "stopped")
    await eventually(lambda: process.identify(pid) is None)
    assert not engines_of(agent_process.settings)


async def test_an_engine_that_ended_while_no_agent_ran_is_reported_failed(
    agent_process: AgentProcess, control_plane: ControlPlane, gguf: Path
) -> None:
    pid = await _ready(agent_process, control_plane, gguf)
    agent_process.kill()
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: process.identify(pid) is None)
    agent_process.start()
    await eventually(lambda: control_plane.states("r1")[-1] == "failed", what=f"failed\n{agent_process.log}")
    assert "no agent watched" in control_plane.last("r1").status.reason


async def test_an_engine_that_no_record_describes_is_killed_and_said(
    agent_process: AgentProcess, control_plane: ControlPlane, gguf: Path
) -> None:
    pid = await _ready(agent_process, control_plane, gguf)
    agent_process.kill()
    for record in (agent_process.settings.work_dir / "shards").glob("*.json"):
        record.unlink()
    agent_process.start()
    await eventually(lambda: process.identify(pid) is None, what="killed")
    await eventually(lambda: "that no record describes" in agent_process.log)
    assert f"Killed process {pid}" in agent_process.log


async def test_the_record_of_a_number_that_another_process_has_now_harms_nobody(
    agent_process: AgentProcess, control_plane: ControlPlane, gguf: Path
) -> None:
    pid = await _ready(agent_process, control_plane, gguf)
    agent_process.kill()
    os.kill(pid, signal.SIGKILL)
    record = agent_process.settings.work_dir / "shards" / "r1.0.json"
    # This test's own process stands for whoever was given the number.
    record.write_text(record.read_text().replace(f'"pid":{pid}', f'"pid":{os.getpid()}'))
    agent_process.start()
    await eventually(lambda: len(control_plane.registers) == 2)
    await eventually(lambda: control_plane.states("r1")[-1] == "failed")
    assert not any(shard.status.state == "ready" for shard in control_plane.registers[1].shards)


async def test_children_that_changed_session_and_an_engine_deaf_to_sigterm_are_ended_too(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    await _ready(agent, control_plane, gguf, env={"STUB_FAIL": "deaf,children"})
    assert len(engines_of(agent.settings)) == 2
    await control_plane.send(StopShard(replica="r1", grace_s=0.5))
    await eventually(lambda: control_plane.states("r1")[-1] == "stopped", what="stopped")
    assert not engines_of(agent.settings)


async def test_a_killed_engines_children_are_ended_before_it_is_called_failed(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    pid = await _ready(agent, control_plane, gguf, env={"STUB_FAIL": "children"})
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: control_plane.states("r1")[-1] == "failed")
    assert not engines_of(agent.settings)


async def test_ten_shards_at_once_get_ten_ports_and_a_released_port_is_not_given_again(
    agent_process: AgentProcess, control_plane: ControlPlane, gguf: Path
) -> None:
    agent_process.start()
    await eventually(lambda: control_plane.registers)
    names = [f"r{number}" for number in range(10)]
    for name in names:
        await control_plane.send(StartShard(spec=spec(gguf, name)))
    await eventually(lambda: all(control_plane.states(name)[-1:] == ["ready"] for name in names))
    taken = {control_plane.last(name).status.port for name in names}
    assert len(taken) == 10
    await control_plane.send(StopShard(replica="r0", grace_s=1))
    await eventually(lambda: control_plane.states("r0")[-1] == "stopped")
    agent_process.kill()
    agent_process.start()
    await eventually(lambda: len(control_plane.registers) == 2)
    await control_plane.send(StartShard(spec=spec(gguf, "new")))
    await eventually(lambda: control_plane.states("new")[-1:] == ["ready"])
    assert control_plane.last("new").status.port not in taken


async def test_a_repeated_command_is_answered_the_same_and_done_once(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    pid = await _ready(agent, control_plane, gguf)
    start = StartShard(spec=spec(gguf), engine_key=KEY)
    await control_plane.send(start, number=1)
    await control_plane.send(start, number=77)
    await control_plane.send(StartShard(spec=spec(gguf, profile_digest="d2")), number=78)
    await control_plane.send_raw('{"type":"command","id":99,"body":{"type":"dance"}}')
    await eventually(lambda: len(control_plane.acks) == 5, what="acks")
    assert [(ack.id, ack.ok) for ack in control_plane.acks] == [
        (1, True),
        (1, True),
        (77, True),
        (78, False),
        (99, False),
    ]
    assert "another profile" in control_plane.acks[3].error
    assert list(engines_of(agent.settings)) == [pid]


async def test_a_failure_that_nobody_heard_is_told_after_the_next_register(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    pid = await _ready(agent, control_plane, gguf)
    control_plane.first = lambda: Refused(reason="starting up")
    control_plane.cut()
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: "killed by signal 9" in agent.log)
    welcome = ControlPlane().first
    control_plane.first = welcome
    await eventually(lambda: control_plane.states("r1")[-1] == "failed", what=agent.log)
    assert "stub engine" in control_plane.last("r1").tail


async def test_a_second_agent_in_the_same_work_directory_stops_with_one_sentence(
    agent_process: AgentProcess, control_plane: ControlPlane, tmp_path: Path
) -> None:
    agent_process.start()
    await eventually(lambda: control_plane.registers)
    (tmp_path / "second").mkdir()
    second = AgentProcess(tmp_path / "second", agent_process.settings)
    second.start()
    assert second.process is not None
    assert second.process.wait(60) == 1
    assert "Another agent already uses" in second.log
    second.end()


@pytest.mark.parametrize("stop_engines", [True, False])
async def test_stopping_the_agent_stops_engines_only_when_told_to(
    tmp_path: Path, agent_settings: AgentSettings, control_plane: ControlPlane, gguf: Path, stop_engines: bool
) -> None:
    agent = AgentProcess(tmp_path, agent_settings.model_copy(update={"stop_engines_on_exit": stop_engines}))
    try:
        pid = await _ready(agent, control_plane, gguf)
        assert await agent.stop() == 0
        assert (process.identify(pid) is None) is stop_engines
        assert control_plane.states("r1")[-1] == ("stopped" if stop_engines else "ready")
        assert control_plane.last("r1").status.reason == ("the agent of its node was stopped" if stop_engines else "")
    finally:
        agent.end()
        end_engines(agent_settings)


async def test_a_hung_engine_fails_while_idle(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "READY_PROBE_S", 0.2)
    monkeypatch.setattr(probe, "ANSWER_S", 0.5)
    switch = gguf.with_name("hang")
    await _ready(agent, control_plane, gguf, env={"STUB_FAIL": "silent", "STUB_SWITCH": str(switch)})
    switch.touch()
    await eventually(lambda: control_plane.states("r1")[-1] == "failed", what="failed")
    assert control_plane.last("r1").status.reason.startswith("hung")


async def test_heartbeats_carry_load_and_running_shards(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    await _ready(agent, control_plane, gguf)
    count = len(control_plane.heartbeats)
    await eventually(lambda: len(control_plane.heartbeats) > count + 2)
    beat = control_plane.heartbeats[-1]
    assert beat.load.load_1m is not None
    assert beat.load.cpu_percent is not None
    assert beat.load.memory_used_bytes
    assert beat.load.disk_free_bytes
    assert [shard.state for shard in beat.shards] == ["ready"]
