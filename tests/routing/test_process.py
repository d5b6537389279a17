"""The gateway as a process of its own, with a real database: what survives its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.bench.rig import ROOT, SEED, free_port
from tests.routing.gateways import CHAT, eventually
from tests.stubs.mock_engine import MockEngine

COMMAND = [sys.executable, "-m", "uvicorn", "llmgw.asgi:application", "--http", "routing.edge:GatewayProtocol"]


def environment(data: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("LLMGW_")}
    return {**own, "LLMGW_DATA_DIR": str(data), "LLMGW_ROLES": "gateway"}


@asynccontextmanager
async def process(data: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    with (data / "log").open("ab") as log:
        child = await asyncio.create_subprocess_exec(
            *COMMAND,
            *("--port", str(port), "--timeout-graceful-shutdown", "30"),
            cwd=ROOT,
            env=environment(data),
            stdout=log,
            stderr=log,
        )
    try:
        await ready(data, port, lambda: child.returncode is None)
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        async with asyncio.timeout(60):
            await child.wait()


async def ready(data: Path, port: int, alive: Callable[[], object]) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
        for _ in range(2400):
            assert alive(), (data / "log").read_text()
            with suppress(httpx.TransportError):
                if (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
    raise AssertionError("the gateway did not become ready")


async def ask(port: int, key: str, count: int, answered: list[str]) -> None:
    """`count` requests over a few connections; the ids of those that were answered whole."""

    async def some(http: httpx.AsyncClient) -> None:
        for _ in range(count // 4):
            try:
                response = await http.post("/v1/chat/completions", json=CHAT)
            except httpx.TransportError:
                return
            assert response.status_code == 200, response.text
            answered.append(response.headers["x-request-id"])

    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=60
    ) as http:
        await asyncio.gather(*(some(http) for _ in range(4)))


def stored(data: Path) -> list[str]:
    with sqlite3.connect(data / "llmgw.sqlite3", timeout=10) as database:
        rows = database.execute("SELECT request_id FROM tenants_usage").fetchall()
    database.close()
    return [row[0] for row in rows]


async def seed(engine: MockEngine, folder: Path) -> str:
    """A store with one model that `engine` serves; returns a project's key."""
    seeded = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", SEED, str(engine.port)],
        cwd=ROOT,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    key, engine.key = seeded.stdout.split()
    return key


@pytest.mark.timeout(600)
async def test_no_finished_request_is_lost_or_counted_twice_by_sigterm_or_kill_9(tmp_path: Path) -> None:
    async with MockEngine() as engine:
        key = await seed(engine, tmp_path)
        answered: list[str] = []
        port = free_port()
        async with process(tmp_path, port) as child:
            await ask(port, key, 200, answered)
            child.terminate()
        assert len(answered) == 200
        assert sorted(stored(tmp_path)) == sorted(answered)
        for _ in range(2):
            async with process(tmp_path, port) as child:
                asking = asyncio.create_task(ask(port, key, 4000, answered))
                enough = len(answered) + 150
                await eventually(lambda enough=enough: len(answered) > enough, timeout_s=60)  # type: ignore[misc]
                child.send_signal(signal.SIGKILL)
                await asking
        async with process(tmp_path, port):
            await eventually(lambda: set(answered) <= set(stored(tmp_path)), timeout_s=60)
        ids = stored(tmp_path)
        assert len(ids) == len(set(ids))
        assert len(ids) - len(answered) <= 8  # finished, while their clients never saw the end
        assert not list((tmp_path / "journal").glob("*.jsonl"))
