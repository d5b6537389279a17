"""Traps of routing: a port that another process got, and never another model's answer under this one's name."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from catalog import spec
from tests.routing.conftest import Start
from tests.routing.gateways import MemoryStore, Running, code, contents, endpoint, eventually, key_of
from tests.routing.pressure import at_rest
from tests.services import free_port
from tests.stubs import mock_engine
from tests.stubs.mock_engine import MockEngine, plain

MODELS = (spec.Model(name="a"), spec.Model(name="b"))


def named(replica: str) -> MockEngine:
    """An engine that tells its own name in each answer."""
    engine = MockEngine(key=key_of(replica))
    engine.behaviour = mock_engine.says(plain(json.dumps({"model": replica, "choices": [], "usage": {}}).encode()))
    return engine


async def answer(gateway: Running, model: str) -> tuple[int, str]:
    """The status, and who answered or the error's code."""
    response = await gateway.chat({"model": model})
    return response.status_code, response.json()["model"] if response.status_code == 200 else code(response)


async def test_another_replica_on_the_port_never_answers_for_the_one_that_died(start: Start) -> None:
    first, other = await named("a-1").start(), named("b-1")
    port = first.port
    store = MemoryStore(contents(endpoint(port, "a-1", "a"), models=MODELS))
    async with start(store) as gateway:
        assert await answer(gateway, "a") == (200, "a-1")  # and its connection is kept
        await first.stop()
        await other.start(port)
        try:
            found = {await answer(gateway, "a") for _ in range(20)}
            assert found <= {(502, "engine_failed"), (503, "engine_down")}
            assert (503, "engine_down") in found  # it is left alone before long
            assert other.requests == []
            # The rows say so at last: a moved, and b is where a was.
            moved = await named("a-1").start()
            store.change(endpoints=(endpoint(moved.port, "a-1", "a"), endpoint(port, "b-1", "b")))
            await eventually(lambda: len(gateway.gateway.plane.table.targets) == 2)
            try:
                for _ in range(3):
                    assert await answer(gateway, "a") == (200, "a-1")
                    assert await answer(gateway, "b") == (200, "b-1")
            finally:
                await moved.stop()
        finally:
            await other.stop()
        await at_rest(gateway)


async def test_a_kept_connection_of_the_replica_before_is_not_used_for_the_one_after(start: Start) -> None:
    """The same port, named for another replica while the old process still lives there."""
    old = await named("a-1").start()
    store = MemoryStore(contents(endpoint(old.port, "a-1", "a"), models=MODELS))
    async with start(store) as gateway:
        assert await answer(gateway, "a") == (200, "a-1")
        store.change(endpoints=(endpoint(old.port, "b-1", "b"),))
        await eventually(lambda: [each.replica for each in gateway.gateway.plane.table.targets] == ["b-1"])
        before = len(old.requests)
        assert await answer(gateway, "b") == (502, "engine_failed")
        assert await answer(gateway, "a") == (503, "no_endpoint")
        assert len(old.requests) == before
        await old.stop()


async def test_another_replica_of_the_same_model_takes_over_and_the_stranger_is_left_alone(start: Start) -> None:
    async with named("b-1") as stranger, named("a-2") as second:
        replicas = endpoint(stranger.port, "a-1", "a"), endpoint(second.port, "a-2", "a")
        async with start(contents(*replicas, models=MODELS)) as gateway:
            assert {await answer(gateway, "a") for _ in range(20)} == {(200, "a-2")}
            health = {target.replica: target.health for target in gateway.gateway.plane.table.targets}
            assert health["a-1"].until is not None
            assert health["a-2"].until is None
            assert stranger.requests == []


@asynccontextmanager
async def file_server(folder: Path, port: int) -> AsyncIterator[None]:
    """A process that was there before: Python's own file server."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "http.server", f"{port}", "--bind", "127.0.0.1"),
        cwd=folder,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    try:
        for _ in range(200):
            if await listens():
                break
            await asyncio.sleep(0.1)
        yield
    finally:
        child.terminate()
        await child.wait()


async def test_a_foreign_server_on_the_port_is_no_engine(start: Start, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "site").mkdir()
    async with (
        file_server(tmp_path / "site", port),
        start(contents(endpoint(port, "a-1", "a"), models=MODELS)) as gateway,
    ):
        for stream in (False, True):
            response = await gateway.chat({"model": "a", "stream": stream})
            assert response.status_code >= 400
            assert response.headers["content-type"] == "application/json"
            assert "error" in response.json()
        (target,) = gateway.gateway.plane.table.targets
        await eventually(lambda: target.scraped_at is None and target.running is None)


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x16\x03\x01\x00\x05hello", b"220 mail ready\r\n"])
async def test_what_speaks_no_http_on_the_port_is_a_failed_engine(start: Start, says: bytes) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        with suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with start(contents(endpoint(port, "a-1", "a"), models=MODELS)) as gateway:
        assert await answer(gateway, "a") == (502, "engine_failed")
        await at_rest(gateway)
    server.close()
    await server.wait_closed()
