"""Several whole control planes on one PostgreSQL and one Redis, with gateways and agents, as docs/operate.md has it.

Everything is a real process; the engines that the agents supervise are stand-ins, so that many fit on a small machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg

from tests.e2e.product import LLMGW, _alive, _processes, clean_environment, client
from tests.services import free_port, postgres_server, redis_server, wait_until

ENGINE = Path(__file__).resolve().parents[1] / "stubs" / "talking_engine.py"
PARTS = ("web", "worker", "beat")
"""The processes of a control plane; its gateway is one more, which outlives them here."""
WITHIN_S = 120


class Process:
    """One process of ours, started again under the same name and log."""

    def __init__(self, log: Path, command: list[str], environment: dict[str, str]) -> None:
        self.log, self.command, self.environment = log, command, environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.send(signal.SIGCONT)
        self.send(number)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class ControlPlane:
    """One host's worth: web, worker and beat, and a gateway beside them."""

    name: str
    data: Path
    config: Path
    web_port: int = field(default_factory=free_port)
    gateway_port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.environment = {**clean_environment(), "LLMGW_DATA_DIR": str(self.data)}
        ports = {"web": self.web_port, "gateway": self.gateway_port}
        self.parts = {
            role: Process(
                self.data.parent / f"{self.name}-{role}.log",
                [*LLMGW, "server", "run", role, "--config", str(self.config)]
                + (["--port", str(ports[role])] if role in ports else []),
                self.environment,
            )
            for role in (*PARTS, "gateway")
        }

    @property
    def web(self) -> str:
        return f"http://127.0.0.1:{self.web_port}"

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    def start(self, *roles: str) -> None:
        for role in roles or PARTS:
            self.parts[role].start()

    def send(self, number: signal.Signals) -> None:
        """To all of the control plane, but not to its gateway."""
        for role in PARTS:
            self.parts[role].send(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        for role in PARTS:
            self.parts[role].end(number)

    def stands_by(self) -> bool:
        """Whether its schedule has said so last."""
        told = [line for line in self.parts["beat"].said().splitlines() if "control plane" in line]
        return bool(told) and "stands by" in told[-1]


class Fleet:
    """Two control planes, each with a gateway, and two nodes whose agents know both."""

    def __init__(self, folder: Path, postgres: str, broker: str) -> None:
        self.folder, self.postgres = folder, postgres
        config = folder / "server.yaml"
        config.write_text(f"store:\n  url: {postgres}\nredis:\n  url: {broker}\n")
        self.planes = [ControlPlane(name, folder / name / "data", config) for name in ("a", "b")]
        for plane in self.planes:
            plane.data.mkdir(parents=True)
        self.weights = folder / "tiny.gguf"
        self.weights.write_bytes(b"GGUF" + b"\0" * 64)
        self.key = self.token = ""
        self.agents: list[Process] = []
        self.http = client()

    # --- life ----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        first, second = self.planes
        made = self._llmgw(first, "server", "migrate", "--config", str(first.config))
        self.key = made.partition("First project key, shown once: ")[2].split()[0]
        # What docs/operate.md says to copy: who is signed in at one control plane is so at the other.
        second_secrets = second.data / "secrets"
        second_secrets.mkdir(mode=0o700)
        shutil.copy(first.data / "secrets" / "django-key", second_secrets)
        self.token = json.loads((first.data / "secrets" / "ctl.json").read_text())["token"]
        for plane in self.planes:
            plane.start(*PARTS, "gateway")
        for plane in self.planes:
            wait_until(f"{plane.name} answers", lambda plane=plane: self._healthy(plane), WITHIN_S)
        self.serve("first", count=2)
        self.agents = [self._agent(number) for number in range(2)]
        for agent in self.agents:
            agent.start()

    def end(self) -> None:
        self.http.close()
        for plane in self.planes:
            for process in plane.parts.values():
                process.end()
        for agent in self.agents:
            agent.end()
        for pid in self.all_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def restore(self) -> None:
        """Everything runs, whatever a test did before."""
        for plane in self.planes:
            for process in plane.parts.values():
                if process.process is None or process.process.poll() is not None:
                    process.start()
            wait_until(f"{plane.name} answers", lambda plane=plane: self._healthy(plane), WITHIN_S)
        wait_until("one leads, and the other stands by", self._has_standby, WITHIN_S)
        wait_until("the first model answers everywhere", lambda: self.answers("first"), WITHIN_S)

    def _healthy(self, plane: ControlPlane) -> bool:
        for process in plane.parts.values():
            assert process.process is not None
            assert process.process.poll() is None, process.said()[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            asked = (f"{plane.web}/health", f"{plane.gateway}/health")
            return all(self.http.get(url, timeout=10).status_code == 200 for url in asked)
        return False

    def _has_standby(self) -> bool:
        leader = self.leader()
        return leader is not None and all(plane is leader or plane.stands_by() for plane in self.planes)

    def _llmgw(self, plane: ControlPlane, *arguments: str) -> str:
        done = subprocess.run(
            [*LLMGW, *arguments], env=plane.environment, capture_output=True, text=True, timeout=WITHIN_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _agent(self, number: int) -> Process:
        name = f"node{number}"
        folder = self.folder / name
        folder.mkdir()
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(self.join_token(name))
        binary = folder / "llama-server"
        binary.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
        binary.chmod(0o755)
        first = 20000 + os.getpid() % 60 * 200 + number * 100
        settings = {
            # Each begins with another one, so that every test takes some agent's control plane away.
            "control_plane": [self.planes[number].web, self.planes[1 - number].web],
            "node": name,
            "token_file": str(token),
            "address": "127.0.0.1",
            "work_dir": str(folder / "work"),
            "ports": {"first": first, "last": first + 99},
            "llamacpp": {"binary": str(binary), "threads": 1},
        }
        (folder / "agent.yaml").write_text(json.dumps(settings))
        command = [*LLMGW, "agent", "--config", str(folder / "agent.yaml")]
        return Process(self.folder / f"{name}.log", command, clean_environment())

    # --- what a person does --------------------------------------------------------------------------------------
    def api(self, plane: ControlPlane, method: str, path: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = self.http.request(method, f"{plane.web}/api/v1{path}", headers=headers, timeout=60, **body)
        assert answer.is_success, answer.text
        return answer.json()

    def join_token(self, name: str) -> str:
        made = self.api(self.planes[0], "POST", "/nodes", json={"name": name})
        return str(made["join_token"])

    def serve(self, *models: str, count: int = 1, plane: ControlPlane | None = None) -> None:
        """Make these the whole catalog; the first one with `count` replicas."""
        profile = {"name": "cpu", "engine": "llamacpp", "weight": 8}
        catalog = [
            {
                "name": name,
                "source": str(self.weights),
                "scaling": {"min": 1 if place else count, "max": 1 if place else count},
                "profiles": [profile],
            }
            for place, name in enumerate(models)
        ]
        file = self.folder / "catalog.yaml"
        file.write_text(json.dumps({"models": catalog}))
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(self.token)
        chosen = plane or self.planes[0]
        ctl = ("ctl", "--url", chosen.web, "--token-file", str(token))
        self._llmgw(chosen, *ctl, "models", "apply", "-f", str(file))

    # --- what is there -------------------------------------------------------------------------------------------
    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.postgres) as connection:
            return connection.execute(query, parameters or None).fetchall()  # type: ignore[arg-type]

    def leader(self) -> ControlPlane | None:
        found = self.rows("SELECT holder FROM core_lease WHERE name = 'leader' AND expires_at > now()")
        pids = [int(holder.split(":")[1]) for (holder,) in found]
        return next((plane for plane in self.planes if plane.parts["beat"].pid in pids), None)

    def led(self) -> tuple[ControlPlane, ControlPlane]:
        """The leader and the other one."""
        leader = self.leader()
        assert leader is not None
        return leader, next(plane for plane in self.planes if plane is not leader)

    def replicas(self) -> list[str]:
        """The model of each replica row, in order."""
        return sorted(model for (model,) in self.rows("SELECT model FROM nodes_replica"))

    def starts(self) -> int:
        """The highest number of a command to start something so far."""
        found = self.rows("SELECT max(id) FROM nodes_command WHERE body->>'type' = 'start_shard'")
        return found[0][0] or 0

    def engines(self) -> list[int]:
        found = _processes()
        return sorted(pid for pid, line in found if ENGINE.name in line and str(self.folder) in line and _alive(pid))

    def all_pids(self) -> list[int]:
        return [pid for pid, command in _processes() if str(self.folder) in command and _alive(pid)]

    def chat(self, plane: ControlPlane, model: str, **more: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}
        headers = {"Authorization": f"Bearer {self.key}"}
        return self.http.post(f"{plane.gateway}/v1/chat/completions", json=body, headers=headers)

    def answers(self, model: str) -> bool:
        """Whether both gateways serve it."""
        with contextlib.suppress(httpx.HTTPError):
            return all(self.chat(plane, model).status_code == 200 for plane in self.planes)
        return False

    @contextlib.contextmanager
    def traffic(self) -> Iterator[Traffic]:
        """Constant requests through both gateways for the length of the block; none of them may fail."""
        one = Traffic(self)
        one.start()
        try:
            yield one
        finally:
            one.stop()
        assert one.lost == []
        assert all(count > 5 for count in one.answered.values()), one.answered


class Traffic:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.lost: list[str] = []
        self.answered = {plane.name: 0 for plane in fleet.planes}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=ask, args=(plane,), daemon=True)
            for plane in fleet.planes
            for ask in (self._ask, self._stream)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(WITHIN_S)
            assert not thread.is_alive()

    def _ask(self, plane: ControlPlane) -> None:
        while not self._over.wait(0.05):
            try:
                answer = self.fleet.chat(plane, "first")
                if answer.status_code == 200:
                    self.answered[plane.name] += 1
                else:
                    self.lost.append(f"{plane.name}: {answer.status_code} {answer.text[:200]}")
            except httpx.HTTPError as error:
                self.lost.append(f"{plane.name}: {error!r}")

    def _stream(self, plane: ControlPlane) -> None:
        """Long streams, one after the other."""
        while not self._over.is_set():
            try:
                answer = self.fleet.chat(plane, "first", stream=True, max_tokens=30)
                if answer.status_code != 200 or not answer.text.endswith("data: [DONE]\n\n"):
                    self.lost.append(f"{plane.name}: a stream ended as {answer.text[-200:]}")
            except httpx.HTTPError as error:
                self.lost.append(f"{plane.name}: {error!r}")


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(postgres_server())
        broker = stack.enter_context(redis_server())
        one = Fleet(folder, postgres, broker)
        stack.callback(one.end)
        one.begin()
        yield one
