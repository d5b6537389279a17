"""Processes known again, found wherever they hide, and never mistaken; sidecars and waiting (AG-12, AG-20..22)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent import adopt, output, process, shards
from agent.config import AgentSettings
from agent.engines import ENGINES
from agent.engines.base import Command, Launch
from agent.engines.llamacpp import LlamaCpp
from agent.host import Host
from agent.installer import Installer
from agent.process import Identity
from agent.protocol import ShardSpec, ShardStatus, StartShard, StopShard
from agent.supervisor import Supervisor
from agent.weights import Weights
from tests.agent.conftest import AgentTask, ControlPlane, end_engines, engines_of, eventually, free_port, spec, told

PATH = {"PATH": os.environ["PATH"]}


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Processes that a test starts; ended afterwards."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def run(started: list[int], output_file: Path, *argv: str, mark: str = "") -> Identity:
    environment = PATH | ({process.SHARD_MARK: mark, process.AGENT_MARK: "test"} if mark else {})
    pid = process.spawn(argv, environment, output_file)
    started.append(pid)
    # A process has no command line for an instant after its start.
    while (identity := process.identify(pid)) is not None and not identity.command:
        os.sched_yield()
    assert identity is not None
    return identity


async def test_a_process_leads_its_own_session_with_its_output_in_a_file(started: list[int], tmp_path: Path) -> None:
    out = tmp_path / "out"
    identity = run(started, out, "sh", "-c", "echo here; echo there >&2; sleep 60")
    found = process.stat(identity.pid)
    assert found is not None
    assert (found.session, found.group) == (identity.pid, identity.pid)
    await eventually(lambda: out.read_text() == "here\nthere\n")
    assert out.stat().st_mode & 0o777 == 0o600


async def test_a_program_that_does_not_exist_cannot_be_started(tmp_path: Path) -> None:
    for argv in (["no-such-program-here"], [str(tmp_path / "nothing")]):
        with pytest.raises(FileNotFoundError):
            process.spawn(argv, PATH, tmp_path / "out")


async def test_a_dead_process_that_nobody_reaped_counts_as_dead(started: list[int], tmp_path: Path) -> None:
    identity = run(started, tmp_path / "out", "sleep", "60")
    os.kill(identity.pid, signal.SIGKILL)
    await eventually(lambda: (found := process.stat(identity.pid)) is not None and found.dead)
    assert not process.alive(identity)
    assert process.identify(identity.pid) is None
    assert process.members([identity], "x") == set()
    assert process.reap(identity.pid) == -signal.SIGKILL
    assert process.reap(identity.pid) is None


async def test_a_reused_number_is_another_process(started: list[int], tmp_path: Path) -> None:
    identity = run(started, tmp_path / "out", "sleep", "60", mark="mine")
    assert process.alive(identity)
    later = msgspec.structs.replace(identity, started=identity.started + 1)
    other_boot = msgspec.structs.replace(identity, boot="another")
    assert not process.alive(later)
    assert not process.alive(other_boot)
    process.send_group(later, signal.SIGKILL)
    assert process.alive(identity)
    renamed = msgspec.structs.replace(identity, command="a wrapper")
    assert not process.alive(renamed)
    assert not process.alive(renamed, shard_mark="another")
    assert process.alive(renamed, shard_mark="mine")


async def test_every_process_of_a_shard_is_found_wherever_it_went(started: list[int], tmp_path: Path) -> None:
    script = (
        "sleep 61 & "
        "setsid sleep 62 & "
        "setsid env -i sleep 63 & "  # its parent gone, its environment gone: only its ancestry tells, while it lasts
        "wait"
    )
    leader = run(started, tmp_path / "out", "sh", "-c", script, mark="shard-1")
    stranger = run(started, tmp_path / "out2", "sleep", "64", mark="shard-2")
    await eventually(lambda: len(process.members([leader], "shard-1")) == 4)
    assert stranger.pid not in process.members([leader], "shard-1")
    os.kill(leader.pid, signal.SIGKILL)
    await eventually(lambda: leader.pid not in process.members([leader], "shard-1"))
    left = process.members([leader], "shard-1")
    assert len(left) >= 2
    for pid in (*left, *(pid for pid, one in process.table().items() if one.parent == 1 and _is_sleep(pid, "63"))):
        process.send(pid, signal.SIGKILL)
    await eventually(lambda: not process.members([leader], "shard-1"))


def _is_sleep(pid: int, seconds: str) -> bool:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode()
    except OSError:
        return False


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_the_owner_of_a_port_is_known(started: list[int], tmp_path: Path, address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
        one.bind((address, 0))
        port = one.getsockname()[1]
        assert process.listens(address, port, [os.getpid()]) is None
        one.listen()
        stranger = run(started, tmp_path / "out", "sleep", "60")
        assert process.listens(address, port, [stranger.pid]) is False
        assert process.listens(address, port, [stranger.pid, os.getpid()]) is True
        assert process.listens("127.0.0.2", port, [stranger.pid]) is None


def test_an_exit_status_is_told_in_words() -> None:
    assert process.ending(3) == "exited with status 3"
    assert process.ending(-9) == "killed by signal 9"
    assert "unknown" in process.ending(None)


# --- output ----------------------------------------------------------------------------------------------------------
def test_a_tail_is_bounded_whole_lined_and_without_the_key(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number} key-of-engine ä\n" for number in range(5000)))
    tail = output.tail(path, 1000, secret="key-of-engine")
    assert len(tail.encode()) <= 1000
    assert tail.startswith("line 4")
    assert tail.endswith("line 4999 … ä\n")
    path.write_bytes(b"\xff\xfe" * 600)
    assert len(output.tail(path, 1000).encode()) <= 1000


def test_a_tail_says_when_there_is_nothing_to_show(tmp_path: Path) -> None:
    assert "not there" in output.tail(tmp_path / "log")
    (tmp_path / "log").touch()
    assert output.tail(tmp_path / "log") == "The engine wrote nothing."


def test_output_that_has_grown_is_cut_and_its_end_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("0123456789\n" * 30_000 + "first\n")
    assert output.bound(path, 100_000)
    assert path.stat().st_size == 0
    assert output.tail(path).endswith("first\n")
    assert not output.bound(path, 100_000)
    assert not output.bound(tmp_path / "nothing")
    output.begin(path)
    assert not path.exists()


async def test_an_engine_writes_on_at_the_front_of_a_cut_file(started: list[int], tmp_path: Path) -> None:
    path, go = tmp_path / "log", tmp_path / "go"
    os.mkfifo(go)
    run(started, path, "sh", "-c", f"yes 0123456789 | head -c 300000; echo; read x < {go}; echo second; sleep 60")
    await eventually(lambda: path.exists() and path.stat().st_size > 300_000)
    output.bound(path, 100_000)
    await asyncio.to_thread(go.write_text, "\n")
    await eventually(lambda: path.read_text() == "second\n")


# --- records ---------------------------------------------------------------------------------------------------------
def _record(replica: str, *processes: Identity) -> adopt.Record:
    return adopt.Record(
        spec=spec("/m", replica), processes=processes, port=1, state="ready", output="/o", address="a", key="k"
    )


async def test_records_are_private_and_a_broken_one_is_set_aside(
    started: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = adopt.Records(tmp_path / "shards")
    alive = run(started, tmp_path / "out", "sleep", "60")
    running = _record("org/model:1 ü", alive)
    gone = _record("gone", msgspec.structs.replace(alive, started=1))
    partly = _record("partly", alive, msgspec.structs.replace(alive, started=1))
    for record in (running, gone, partly, _record("empty")):
        records.write(record)
    (tmp_path / "shards" / "torn.json").write_text('{"spec":')
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "shards").glob("r*.json")} <= {0o600}
    found = adopt.look(records, "n|/w")
    assert found.running == (running,)
    assert {record.spec.replica for record in found.ended} == {"gone", "partly", "empty"}
    assert "torn.json is no record" in caplog.text
    records.forget(running.spec)
    records.forget(running.spec)
    assert adopt.look(records, "n|/w").running == ()


# --- sequences of commands -------------------------------------------------------------------------------------------
class WithSidecar(LlamaCpp):
    """A sidecar that listens after a while, then an engine that waits for it."""

    name = "with-sidecar"

    def __init__(self, rendezvous: int, sidecar: str, wait_s: float = 60.0) -> None:
        self._rendezvous = rendezvous
        self._sidecar = sidecar
        self._wait_s = wait_s

    def commands(self, spec: ShardSpec, host: Host, launch: Launch) -> tuple[Command, ...]:
        (engine,) = super().commands(spec, host, launch)
        sidecar = Command(argv=(sys.executable, "-c", self._sidecar, str(self._rendezvous)), env=spec_env(spec))
        waiting = Command(
            engine.argv, engine.env, engine.secrets, wait_for=("127.0.0.1", self._rendezvous), wait_s=self._wait_s
        )
        return sidecar, waiting


def spec_env(spec: ShardSpec) -> tuple[tuple[str, str], ...]:
    return tuple(spec.env.items())


LISTENS = (
    "import socket,sys,time;s=socket.socket();s.setsockopt(1,2,1);s.bind(('127.0.0.1',int(sys.argv[1])));s.listen();"
    "print('sidecar here',flush=True)\nwhile True: s.accept()[0].close()"
)


@pytest.fixture
def rendezvous() -> int:
    return free_port()


async def test_a_sidecar_starts_first_and_goes_with_the_shard(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path, rendezvous: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "llamacpp", WithSidecar(rendezvous, LISTENS))
    await told(control_plane, agent, spec(gguf))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["ready"])
    assert len(engines_of(agent.settings)) == 2
    sidecar = next(pid for pid in engines_of(agent.settings) if pid != control_plane.last("r1").status.pid)
    os.kill(sidecar, signal.SIGKILL)
    await eventually(lambda: control_plane.states("r1")[-1] == "failed")
    assert control_plane.last("r1").status.reason == "its sidecar 1 killed by signal 9"
    assert not engines_of(agent.settings)

    await control_plane.send(StartShard(spec=spec(gguf)))
    await eventually(lambda: control_plane.states("r1")[-1] == "ready")
    await control_plane.send(StopShard(replica="r1"))
    await eventually(lambda: control_plane.states("r1")[-1] == "stopped")
    assert not engines_of(agent.settings)


async def test_a_rendezvous_that_never_listens_fails_the_shard_in_time(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path, rendezvous: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "llamacpp", WithSidecar(rendezvous, "import time; time.sleep(60)", wait_s=0.5))
    await told(control_plane, agent, spec(gguf))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["failed"])
    assert f"nothing listened on 127.0.0.1:{rendezvous} within 0.5 s" in control_plane.last("r1").status.reason
    assert not engines_of(agent.settings)


class Bequeathing(LlamaCpp):
    """Leaves its listening socket to a child in a session of its own: a stranger, once the engine itself is gone."""

    def commands(self, spec: ShardSpec, host: Host, launch: Launch) -> tuple[Command, ...]:
        code = (
            "import os,socket,sys,time;s=socket.create_server(('127.0.0.1',int(sys.argv[1])));child=os.fork()\n"
            "if not child: os.setsid()\n"
            "time.sleep(60)"
        )
        return (Command(argv=(sys.executable, "-c", code, str(launch.port)), env=launch.build.env),)


async def test_an_engine_killed_while_loading_is_said_to_be_killed_even_when_the_probe_is_first(
    agent_settings: AgentSettings, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "llamacpp", Bequeathing())
    agent_settings.work_dir.mkdir(mode=0o700)
    told: list[ShardStatus] = []
    host = Host("127.0.0.1", "x86_64", cores=1)
    installer = Installer(agent_settings.work_dir, binaries={"llamacpp": gguf})
    weights = Weights(agent_settings.work_dir)
    supervisor = Supervisor(agent_settings, host, weights=weights, installer=installer, publish=told.append)
    try:
        supervisor.start_shard(StartShard(spec=spec(gguf)))
        await eventually(lambda: told and told[-1].status.port)
        port, pid = told[-1].status.port, told[-1].status.pid
        assert port is not None
        assert pid is not None
        await eventually(lambda: process.listens("127.0.0.1", port, [pid]) and len(engines_of(agent_settings)) == 2)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: process.identify(pid) is None)
        assert process.listens("127.0.0.1", port, [pid]) is False
        supervisor._feed(("r1", 0), shards.Tick())  # a probe is due, and nobody has looked for exits
        await eventually(lambda: told[-1].status.state == "stopping")
        assert told[-1].status.reason == "killed by signal 9"
    finally:
        await supervisor.close(stop_engines=True)
        end_engines(agent_settings)


async def test_a_strangers_server_on_the_port_is_never_taken_for_the_engine(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path, rendezvous: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(LlamaCpp):
        """Starts the engine on another port than the one that is watched."""

        def commands(self, spec: ShardSpec, host: Host, launch: Launch) -> tuple[Command, ...]:
            other = Launch(launch.build, launch.weights, port=rendezvous, key=launch.key)
            return super().commands(spec, host, other)

    monkeypatch.setitem(ENGINES, "llamacpp", Elsewhere())
    agent.start()
    await eventually(lambda: control_plane.registers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    await control_plane.send(StartShard(spec=spec(gguf)))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["starting"])
    await eventually(lambda: control_plane.last("r1").status.port)
    port = control_plane.last("r1").status.port
    stranger = await asyncio.start_server(answer, "127.0.0.1", port)
    await eventually(lambda: control_plane.states("r1")[-1] == "failed")
    assert f"port {port} is held by a process that is not this engine" in control_plane.last("r1").status.reason
    stranger.close()
    await stranger.wait_closed()
