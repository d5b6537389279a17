"""`llmgw up`: everything one machine needs, in the foreground, each part a process of its own that is started again
when it dies. Ctrl-C (or SIGTERM) stops them all, engines too; nothing else does."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmgw.config import ConfigError, Settings, current
from llmgw.core import secret_file
from llmgw.ops import announce, prepare, serve
from llmgw.ops.announce import say

NODE = "local"
LOCK_FILE = "up.lock"
FREE_BYTES = 1024**3
"""What the engine, the small model and the database need at first, with room to work."""
READY_WITHIN_S = 600
STOP_WITHIN_S = 20
LONGEST_PAUSE_S = 30.0
STEADY_AFTER_S = 60.0
PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Part:
    """One process of the product and when it may be started again."""

    name: str
    command: list[str]
    env: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0
    next_start_at: float = 0.0
    waits_for: Callable[[], bool] = field(default=lambda: True)
    """Asked before its first start."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None


@dataclass(slots=True)
class Parts:
    """The processes of this `up`, started, watched and stopped together."""

    all: list[Part]
    changed: Callable[[], None] = field(default=lambda: None)

    def start(self, part: Part) -> None:
        part.started_at = time.monotonic()
        part.process = subprocess.Popen(
            part.command,
            env=part.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # parts log to stderr; what their libraries print is noise
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def watch(self) -> None:
        """Start what is due and notice what ended. A part that keeps dying is started ever more slowly."""
        now = time.monotonic()
        for part in self.all:
            if part.process is None:
                if now >= part.next_start_at and (part.failures or part.waits_for()):
                    self.start(part)
                    self.changed()
            elif part.process.poll() is not None:
                # Children of a killed process would go on without it.
                _kill_group(part.process.pid, signal.SIGKILL)
                part.failures = 1 if now - part.started_at > STEADY_AFTER_S else part.failures + 1
                pause = min(LONGEST_PAUSE_S, 0.25 * 2 ** (part.failures - 1))
                say(f"{part.name} ended ({_how(part.process.returncode)}); starting it again in {pause:g} s")
                part.process, part.next_start_at = None, now + pause

    def stop(self) -> None:
        """The agent with its engines first, while its control plane still listens; then the rest."""
        for wave in ([p for p in self.all if p.name == "agent"], [p for p in self.all if p.name != "agent"]):
            self._stop(wave)

    def _stop(self, parts: list[Part]) -> None:
        """SIGTERM, wait, then SIGKILL whatever is left."""
        for part in parts:
            if part.process and part.process.poll() is None:
                part.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_WITHIN_S
        for part in parts:
            if part.process is None:
                continue
            try:
                part.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"{part.name} did not stop in {STOP_WITHIN_S} s and is killed")
            _kill_group(part.process.pid, signal.SIGKILL)
            part.process.wait()


@dataclass(slots=True)
class Bootstrap:
    """The file for scripts. While the disk takes none everything else goes on, and it is written once there is room."""

    path: Path | None
    content: Callable[[], str]
    due: bool = True
    told: bool = False

    def changed(self) -> None:
        self.due = True

    def write(self) -> None:
        if self.path is None or not self.due:
            return
        try:
            secret_file.write(self.path, self.content())
        except OSError as error:
            if not self.told:
                say(f"--bootstrap-file {self.path} cannot be written ({error.strerror}) and tells old pids until it is")
            self.told = True
        else:
            self.due = self.told = False


def up(environment: dict[str, str], bootstrap_file: Path | None) -> int:
    """Run until stopped; returns the exit code. Raises ConfigError, before anything is made, for what cannot work."""
    os.environ.update(environment)
    os.environ.setdefault("LLMGW_PROCESS", "up")
    settings = current()
    refuse_second(settings.data_dir)
    serve.check_port(settings.listen.host, settings.listen.port)
    prepare.check_data_dir(settings.data_dir)
    if settings.agents.port is not None:
        from llmgw.ops import pki

        pki.make_server_ready(settings.authority_dir)
    if not (settings.data_dir / "agent").exists():
        need_space(settings.data_dir, shutil.disk_usage(settings.data_dir).free)
    if bootstrap_file is not None:
        bootstrap_file = bootstrap_file.absolute()
        if not os.access(bootstrap_file.parent, os.W_OK):
            raise ConfigError(
                f"--bootstrap-file {bootstrap_file}: its directory cannot be written. Name another place."
            )
    with _only_one(settings.data_dir):
        if bootstrap_file:
            # A file from a run that was killed would tell a waiting script that this one serves already.
            bootstrap_file.unlink(missing_ok=True)
        say(f"llmgw starts on {settings.base_url}, data in {settings.data_dir}; Ctrl-C stops it, its engines too")
        first = _prepared(scripted=bootstrap_file is not None)
        parts = Parts(_parts(_write_agent_file(settings), settings))
        return _run(settings, parts, first, bootstrap_file)


def _prepared(*, scripted: bool) -> prepare.First:
    """In a process of its own, so that Django and the store stay out of this one, which lives as long as the rest.
    Raises ConfigError."""
    with ProcessPoolExecutor(1, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            return pool.submit(prepare.everything, NODE, scripted=scripted).result()
        except BrokenProcessPool:
            raise ConfigError(
                "the process that prepares the store was killed before it was done, perhaps because memory ran out. "
                "Start again: what is done already is not done twice."
            ) from None


def _parts(agent_file: Path, settings: Settings) -> list[Part]:
    def part(name: str, *arguments: str, **extra: str) -> Part:
        return Part(name, [sys.executable, "-m", "llmgw", *arguments], {**os.environ, "LLMGW_PROCESS": name, **extra})

    agent = part("agent", "agent", "--config", str(agent_file))
    agent.waits_for = lambda: _answers(settings, "/health")
    certified = [part("agents", "server", "run", "agents")] if settings.agents.port is not None else []
    return [
        part("serve", "server", "run", "serve"),
        *certified,
        part("worker", "server", "run", "worker", LLMGW_WORKER_BEAT="1"),
        agent,
    ]


def _run(settings: Settings, parts: Parts, first: prepare.First, bootstrap_file: Path | None) -> int:
    stop_asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: stop_asked.append(number))
    wake, wake_write = os.pipe()
    for end in (wake, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    serving = told = False
    progress = announce.Progress(settings, NODE)
    give_up_at = time.monotonic() + READY_WITHIN_S

    bootstrap = Bootstrap(bootstrap_file, lambda: _bootstrap(settings, first, parts))
    parts.changed = bootstrap.changed
    try:
        while not stop_asked:
            parts.watch()
            if serving:
                bootstrap.write()
            if not serving and _answers(settings, "/ready"):
                serving = True
                bootstrap.write()
                if told:
                    say(f"ready: the OpenAI API answers at {settings.base_url}/v1")
                else:
                    announce.tell(settings, first, model=progress.ready_model())
            elif not serving and (why_not := progress.look()) and not told:
                told = True
                announce.tell(settings, first, why_not=why_not)
            elif not serving and time.monotonic() > give_up_at:
                say(f"still not ready. See why: {announce.command()} ctl status")
                give_up_at += READY_WITHIN_S
            _pause(wake, 1.0 if serving else 0.2)
    finally:
        say("stopping: agent with its engines, pages and API, worker")
        if bootstrap_file:
            bootstrap_file.unlink(missing_ok=True)
        parts.stop()
        say("stopped")
    return 0


def _write_agent_file(settings: Settings) -> Path:
    """The local agent's agent.yaml; written again at each start, since port and paths may have changed."""
    path = settings.data_dir / "agent.yaml"
    work = settings.data_dir / "agent"
    # JSON is YAML, and quotes paths with odd characters right.
    secret_file.write(
        path,
        "# Written by `llmgw up` at each start.\n"
        + json.dumps(
            {
                "control_plane": [settings.base_url_here],
                "node": NODE,
                "token_file": str(settings.secrets_dir / f"node-{NODE}"),
                "address": "127.0.0.1",
                "work_dir": str(work),
                "stop_engines_on_exit": True,
            },
            indent=2,
        )
        + "\n",
    )
    return path


def _bootstrap(settings: Settings, first: prepare.First, parts: Parts) -> str:
    held = {
        "base_url": settings.base_url_here,
        "admin_username": first.admin,
        "admin_password": first.password,
        "project_key": first.project_key,
        "pids": {part.name: part.pid for part in parts.all},
    }
    return json.dumps(held, indent=2) + "\n"


def need_space(data_dir: Path, free_bytes: int) -> None:
    """Raises ConfigError when a first start would not fit."""
    if free_bytes < FREE_BYTES:
        raise ConfigError(
            f"{data_dir} has {free_bytes // 1024**2} MiB free; a first start needs {FREE_BYTES // 1024**2} MiB. "
            "Free some space, or name another place: --data DIR"
        )


def refuse_second(data_dir: Path) -> None:
    """Raises ConfigError when another `up` has this directory: told before its taken port, which would mislead."""
    with contextlib.suppress(OSError), open(data_dir / LOCK_FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _second(data_dir, file.read()) from None


def _second(data_dir: Path, pid: str) -> ConfigError:
    return ConfigError(
        f"another llmgw up (pid {pid.strip() or '?'}) runs on {data_dir}. Stop it, or name another: --data DIR"
    )


@contextlib.contextmanager
def _only_one(data_dir: Path) -> Any:
    """Hold the data directory for this `up`; raises ConfigError naming the pid of another that has it."""
    with open(data_dir / LOCK_FILE, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise _second(data_dir, file.read()) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _answers(settings: Settings, path: str) -> bool:
    try:
        with urllib.request.urlopen(settings.base_url_here + path, timeout=1) as answer:  # noqa: S310 - our own address
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _pause(wake: int, limit_s: float) -> None:
    """Wait, but no longer than a signal takes to arrive (a child that ended is one)."""
    import select

    select.select([wake], [], [], limit_s)
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)


def _end_with_parent() -> None:
    """In the child: be told to stop when this `up` is killed, so that nothing is left behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _how(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
