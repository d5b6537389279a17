"""A worker as a real process: what it says while its queue is away."""

from __future__ import annotations

import re
import signal
import socketserver
import subprocess
import threading
from pathlib import Path

from tests.e2e.product import LLMGW, clean_environment
from tests.services import free_port, redis_server, wait_until

TRIES = 2
AWAY, BACK = "The queue does not answer", "The queue answers again"


class Silent(socketserver.BaseRequestHandler):
    """Takes connections and ends them."""

    def handle(self) -> None:
        self.server.tried()  # type: ignore[attr-defined]


class NoQueue(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Silent)
        self.count = 0

    def tried(self) -> None:
        self.count += 1


def test_a_queue_that_is_away_is_said_once_and_once_when_it_is_back(tmp_path: Path) -> None:
    port, written = free_port(), tmp_path / "log"
    own = {"LLMGW_DATA_DIR": str(tmp_path / "data"), "LLMGW_REDIS__URL": f"redis://127.0.0.1:{port}/0"}

    def log() -> str:
        return written.read_text()

    with redis_server(port), written.open("wb") as out:
        process = subprocess.Popen(
            [*LLMGW, "server", "run", "worker"],
            cwd=tmp_path,
            env={**clean_environment(), **own},
            stdout=out,
            stderr=out,
        )
        wait_until("the worker takes jobs", lambda: "Takes jobs from" in log() or process.poll() is not None)
    try:
        with NoQueue(port) as absent:
            threading.Thread(target=absent.serve_forever, daemon=True).start()
            wait_until("it has tried again and again", lambda: absent.count >= TRIES)
            absent.shutdown()
        with redis_server(port):
            wait_until("it takes jobs again", lambda: BACK in log())
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    finally:
        process.kill()
        process.wait()
    said = [re.sub(r"^\S+ worker +", "", line) for line in log().splitlines() if "arm shutdown" not in line and line]
    assert [line.partition(" (")[0] for line in said] == [
        f"Takes jobs from redis://127.0.0.1:{port}/0",
        f"warning: {AWAY}",
        f"{BACK}; jobs are taken",
    ], log()
