"""Real Redis and PostgreSQL servers for tests: started on free ports in scratch directories, ended by pid."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event

STARTS_WITHIN_S = 100


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


def wait_until(question: str, answer: object, within_s: float = STARTS_WITHIN_S, every_s: float = 0.1) -> object:
    """Call `answer` until it gives something true and hand that back; fails naming the question."""
    assert callable(answer)
    end = time.monotonic() + within_s
    pause = Event()
    while True:
        found = answer()
        if found:
            return found
        assert time.monotonic() < end, f"not within {within_s} s: {question}"
        pause.wait(every_s)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def _child(command: Sequence[str], log: Path, stop: signal.Signals) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(stop)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def redis_server(port: int | None = None) -> Iterator[str]:
    """Yields the URL of an empty Redis; with `port`, of one that is started again where an earlier one was."""
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="llmgw-redis-") as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        with _child(command, Path(folder) / "log", signal.SIGTERM):
            wait_until("Redis listens", lambda: _listens(port))
            yield f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Yields the URL of an empty PostgreSQL database. As root, the server runs as Debian's user `postgres`."""
    programs = Path(max(map(str, Path("/usr/lib/postgresql").glob("*/bin"))))
    folder = Path(tempfile.mkdtemp(prefix="llmgw-postgres-"))
    as_user: list[str] = []
    user = pwd.getpwuid(os.getuid()).pw_name
    if os.getuid() == 0:
        user = "postgres"
        shutil.chown(folder, user)
        as_user = ["setpriv", "--reuid", user, "--regid", user, "--init-groups"]
    port = free_port()
    store = folder / "store"
    try:
        subprocess.run(
            [*as_user, programs / "initdb", "-D", store, "-U", "llmgw", "--auth", "trust", "--no-sync"],
            check=True,
            capture_output=True,
        )
        options = f"-p {port} -k {folder} -h 127.0.0.1 -c fsync=off -c full_page_writes=off"
        command = [*as_user, str(programs / "postgres"), "-D", str(store), *options.split()]
        with _child(command, Path(f"{folder}.log"), signal.SIGINT):
            wait_until("PostgreSQL listens", lambda: _listens(port))
            subprocess.run(
                [programs / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "llmgw", "llmgw"],
                check=True,
                capture_output=True,
            )
            yield f"postgresql://llmgw@127.0.0.1:{port}/llmgw"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        Path(f"{folder}.log").unlink(missing_ok=True)
