"""Processes that run alone say once that they serve, and where."""

from __future__ import annotations

import logging
import signal
import subprocess
from pathlib import Path

import pytest

from llmgw import config
from llmgw.ops import serve
from tests.e2e.product import LLMGW, clean_environment
from tests.services import free_port, wait_until


@pytest.mark.parametrize(
    ("role", "says"),
    [
        ("serve", "Serves pages at http://127.0.0.1:{port}/ and the OpenAI API at http://127.0.0.1:{port}/v1"),
        ("gateway", "Serves the OpenAI API at http://127.0.0.1:{port}/v1"),
        ("web", "Serves pages, API and agents at http://127.0.0.1:{port}/"),
        ("worker", "Takes jobs from {data}/queue"),
    ],
)
def test_a_part_that_runs_alone_says_once_that_it_is_ready_and_where(tmp_path: Path, role: str, says: str) -> None:
    port, data, log = free_port(), tmp_path / "data", tmp_path / "log"
    line = f" {role:7} {says.format(port=port, data=data)}\n"
    command = [*LLMGW, "server", "run", role, *([] if role == "worker" else ["--port", str(port)])]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**clean_environment(), "LLMGW_DATA_DIR": str(data)}, stdout=out, stderr=out
        )
    try:
        wait_until(f"{role} says {line!r}", lambda: line in log.read_text() or process.poll() is not None)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert log.read_text().count(line) == 1, log.read_text()
    assert "Traceback" not in log.read_text()


async def test_it_is_said_once_however_often_uvicorn_asks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    once = serve.Once(serve.where("agents", "::", 8444))
    await once()
    await once()
    assert caplog.messages == ["Serves agents with certificates at https://[::]:8444"]


def test_where_jobs_wait_is_told_without_its_password() -> None:
    url = "rediss://:secret@redis.example:6379/0?password=secret"
    assert serve.queue(config.Settings(redis=config.Redis(url=url))) == "rediss://redis.example:6379/0"
