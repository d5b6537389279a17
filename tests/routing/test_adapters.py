"""Loading adapters into a real process that is as strict as vLLM: once, to a limit, never one in use (GW-44)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from routing import adapters, lora
from routing.adapters import Adapters, NoRoom, NotLoaded
from routing.failures import ConnectFailed, Silent
from routing.lora import Adapter, Attached, attach
from routing.pools import Pool
from tests.agent.conftest import free_port
from tests.routing.gateways import eventually

KEY = "k" * 32
STUB = Path(__file__).parents[1] / "stubs" / "stub_vllm.py"


def peft(folder: Path, name: str, **changes: Any) -> Adapter:
    """An adapter on disk, as PEFT writes it."""
    path = folder / name
    path.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", **changes}
    (path / "adapter_config.json").write_text(json.dumps(config))
    (path / "adapter_model.safetensors").write_bytes(b"\0")
    return lora.adapter(name, str(path))


@dataclass
class Vllm:
    """`vllm serve` as a process."""

    folder: Path
    port: int = field(default_factory=free_port)
    limit: int = 2
    process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def serving(self, *flags: str, **variables: str) -> Iterator[Vllm]:
        environment = {
            "PATH": os.environ["PATH"],
            "VLLM_API_KEY": KEY,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "STUB_EVENTS": str(self.folder / "events"),
            **variables,
        }
        lora_flags = ("--enable-lora", "--max-loras", str(self.limit), "--max-cpu-loras", str(self.limit))
        argv = [sys.executable, str(STUB), "serve", str(self.folder), "--served-model-name", "m"]
        argv += ["--host", "127.0.0.1", "--port", str(self.port), *lora_flags, *flags]
        with subprocess.Popen(argv, env=environment) as self.process:
            try:
                yield self
            finally:
                self.process.kill()

    async def ready(self) -> None:
        await healthy(self.port)

    @property
    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"authorization": f"Bearer {KEY}"},
            trust_env=False,
            timeout=30,
        )

    def lines(self) -> list[str]:
        path = self.folder / "events"
        return path.read_text().splitlines() if path.exists() else []

    def told(self, *kinds: str) -> list[str]:
        """What it did, in order: "load red", "unload red", …"""
        did = [json.loads(line) for line in self.lines()]
        return [f"{each['event']} {each['name'].partition('@')[0]}" for each in did if each["event"] in kinds]


async def healthy(port: int) -> None:
    """Until the engine at `port` serves."""
    async with httpx.AsyncClient(trust_env=False) as http:
        for _ in range(3000):
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.01)
    raise AssertionError("it did not get ready")


@dataclass
class Spot:
    """An endpoint, as routing.table has it."""

    port: int
    limit: int = 2
    engine: str = "vllm"
    key: str = KEY
    replica: str = "m-1"

    def __post_init__(self) -> None:
        self.attached: Attached | None = attach(self.engine, "m", (), (), self.limit)
        head = f" HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {self.key}\r\n"
        self.request_head = head.encode()

    def holds(self, wanted: Adapter) -> bool:
        assert self.attached is not None
        assert self.attached.holdings is not None
        return self.attached.holdings.has(wanted.engine_name)


class Pools:
    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}

    def of(self, target: Spot) -> Pool:
        return self.pools.setdefault(target.port, Pool("127.0.0.1", target.port))


@asynccontextmanager
async def gateway() -> AsyncIterator[Adapters[Spot]]:
    pools = Pools()
    one = Adapters(pools)
    try:
        yield one
    finally:
        await one.close()
        for pool in pools.pools.values():
            await pool.close()


@pytest.fixture
def vllm(tmp_path: Path) -> Vllm:
    return Vllm(tmp_path)


async def test_a_cold_adapter_is_loaded_once_for_all_who_wait_for_it(vllm: Vllm, tmp_path: Path) -> None:
    red = peft(tmp_path, "red")
    with vllm.serving(STUB_ADAPTER_S="0.2"):
        await vllm.ready()
        spot = Spot(vllm.port)
        async with gateway() as one:
            uses = await asyncio.gather(*(one.take(spot, red) for _ in range(20)))
            again = await one.take(spot, red)
        assert vllm.told("load") == ["load red"]
        assert {id(use) for use in uses} == {id(again)}
        assert again.requests == 21
        async with vllm.client as http:
            asked = {"model": red.engine_name, "messages": [{"role": "user", "content": "hi"}]}
            answer = (await http.post("/v1/chat/completions", json=asked)).json()
            assert answer["choices"][0]["message"]["content"].startswith(red.engine_name)


async def test_the_idle_one_used_longest_ago_makes_room_and_one_in_use_is_waited_for(
    vllm: Vllm, tmp_path: Path
) -> None:
    red, blue, green = (peft(tmp_path, name) for name in ("red", "blue", "green"))
    with vllm.serving():
        await vllm.ready()
        spot = Spot(vllm.port)
        async with gateway() as one:
            for wanted in (red, blue, red):
                one.give_back(spot, await one.take(spot, wanted))
            in_use = await one.take(spot, green)
            assert vllm.told("load", "unload") == ["load red", "load blue", "unload blue", "load green"]
            also = await one.take(spot, red)
            waits = asyncio.ensure_future(one.take(spot, blue))
            await asyncio.sleep(0.1)
            assert not waits.done()
            one.give_back(spot, also)
            await waits
            assert vllm.told("load", "unload")[4:] == ["unload red", "load blue"]
            assert in_use.requests == 1


async def test_without_room_in_time_it_is_said_and_nothing_is_unloaded(
    vllm: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "ROOM_S", 0.1)
    red, blue, green = (peft(tmp_path, name) for name in ("red", "blue", "green"))
    with vllm.serving():
        await vllm.ready()
        spot = Spot(vllm.port)
        async with gateway() as one:
            for wanted in (red, blue):
                await one.take(spot, wanted)
            with pytest.raises(NoRoom, match="all 2 adapters that replica m-1 may hold are in use"):
                await one.take(spot, green)
            assert not spot.holds(green)
        assert vllm.told("unload") == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (None, r"No adapter found for .*/red \(404\)"),
        ({"r": 64}, r"LoRA rank 64 is greater than max_lora_rank 16 \(500\)"),
        ({"bias": "all"}, r"`bias` is 'all' \(500\)"),
    ],
)
async def test_a_failed_load_is_told_to_all_names_the_adapter_and_is_not_tried_again_at_once(
    vllm: Vllm, tmp_path: Path, changes: dict[str, Any] | None, says: str
) -> None:
    red = lora.adapter("red", str(tmp_path / "red")) if changes is None else peft(tmp_path, "red", **changes)
    with vllm.serving():
        await vllm.ready()
        spot = Spot(vllm.port)
        async with gateway() as one:
            failed = await asyncio.gather(*(one.take(spot, red) for _ in range(5)), return_exceptions=True)
            assert [type(each) for each in failed] == [NotLoaded] * 5
            assert len({id(each) for each in failed}) == 5
            with pytest.raises(NotLoaded, match=f"{says}; it is tried again in "):
                await one.take(spot, red)


async def test_whoever_leaves_while_it_loads_does_not_hold_it(vllm: Vllm, tmp_path: Path) -> None:
    red = peft(tmp_path, "red")
    with vllm.serving(STUB_ADAPTER_S="0.2"):
        await vllm.ready()
        spot = Spot(vllm.port)
        async with gateway() as one:
            leaver, stayer = (asyncio.ensure_future(one.take(spot, red)) for _ in range(2))
            await asyncio.sleep(0.05)
            leaver.cancel()
            use = await stayer
            assert use.requests == 1
        assert vllm.told("load") == ["load red"]


async def test_two_gateways_find_each_others_adapters_and_leave_what_the_other_uses(vllm: Vllm, tmp_path: Path) -> None:
    red, blue, green = (peft(tmp_path, name) for name in ("red", "blue", "green"))
    with vllm.serving(STUB_TOKEN_S="0.05"):
        await vllm.ready()
        first, second = Spot(vllm.port), Spot(vllm.port)
        async with gateway() as one, gateway() as other, vllm.client as http:
            for wanted in (red, blue):
                one.give_back(first, await one.take(first, wanted))
            other.give_back(second, await other.take(second, red))
            assert vllm.told("load") == ["load red", "load blue"]
            asked = {"model": blue.engine_name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
            running = asyncio.ensure_future(http.post("/v1/chat/completions", json=asked))
            await eventually(lambda: any("begin" in line for line in vllm.lines()))
            await other.take(second, green)  # used longer ago than red, as far as this one knows; and still in use
            assert vllm.told("unload") == ["unload red"]
            running.cancel()
            assert await one.still_there(first, blue)
            assert not await one.still_there(first, red)
            assert not first.holds(red)


async def test_an_engine_that_was_started_anew_is_loaded_anew(vllm: Vllm, tmp_path: Path) -> None:
    red = peft(tmp_path, "red")
    spot = Spot(vllm.port)
    async with gateway() as one:
        with vllm.serving():
            await vllm.ready()
            before = await one.take(spot, red)
        with pytest.raises(ConnectFailed):
            await one.take(spot, peft(tmp_path, "blue"))
        with vllm.serving():
            await vllm.ready()
            assert spot.holds(red)
            assert not await one.still_there(spot, red)
            one.give_back(spot, before)
            await one.take(spot, red)
    assert vllm.told("load") == ["load red", "load red"]


async def test_what_is_in_the_way_of_a_load_is_said(
    vllm: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    red = peft(tmp_path, "red")
    with vllm.serving(VLLM_ALLOW_RUNTIME_LORA_UPDATING="", STUB_ADAPTER_S="0"):
        await vllm.ready()
        async with gateway() as one:
            with pytest.raises(NotLoaded, match=r"the engine does not load it: Not Found \(404\)"):
                await one.take(Spot(vllm.port), red)
            with pytest.raises(NotLoaded, match="the engine answered 401 when asked what it holds"):
                await one.take(Spot(vllm.port, key="another"), red)
    with vllm.serving(STUB_ADAPTER_S="30"):
        await vllm.ready()
        monkeypatch.setattr(adapters, "LOAD_S", 0.2)
        async with gateway() as one:
            with pytest.raises(Silent, match=r"it did not answer /v1/load_lora_adapter within 0\.2 s"):
                await one.take(Spot(vllm.port), red)


async def test_a_gateway_that_stops_leaves_nobody_waiting(vllm: Vllm, tmp_path: Path) -> None:
    red = peft(tmp_path, "red")
    with vllm.serving(STUB_ADAPTER_S="30"):
        await vllm.ready()
        async with gateway() as one:
            waits = asyncio.ensure_future(one.take(Spot(vllm.port), red))
            await asyncio.sleep(0.1)
            await one.close()
            with pytest.raises(NotLoaded, match="the gateway stops"):
                await waits


async def test_sglang_is_asked_at_its_own_addresses(tmp_path: Path) -> None:
    red = peft(tmp_path, "red")
    asked: list[str] = []
    held: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            method, path, _ = line.decode().split()
            length = 0
            while (header := await reader.readline()).strip():
                if header.lower().startswith(b"content-length:"):
                    length = int(header.partition(b":")[2])
            body = await reader.readexactly(length)
            asked.append(f"{method} {path}")
            if path == "/load_lora_adapter":
                held.append(json.loads(body)["lora_name"])
            told: dict[str, Any] = {"success": True}
            if path == "/v1/models":
                told = {"data": [{"id": "m", "parent": None}, *({"id": name, "parent": "m"} for name in held)]}
            answer = json.dumps(told).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
        writer.close()
        await writer.wait_closed()
        over.set()

    over = asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        async with gateway() as one:
            await one.take(Spot(server.sockets[0].getsockname()[1], engine="sglang"), red)
        await over.wait()
    assert asked == ["GET /v1/models", "POST /load_lora_adapter"]
    assert held == [red.engine_name]


async def test_two_ranks_of_one_replica_meet_before_the_port_opens(vllm: Vllm, tmp_path: Path) -> None:
    meeting = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-tp", "2")
    worker = Vllm(tmp_path)
    with vllm.serving(*meeting):
        await asyncio.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{vllm.port}/health", trust_env=False)
        with worker.serving(*meeting, "--node-rank", "1", "--headless"):
            await vllm.ready()
            assert vllm.process is not None
            vllm.process.kill()
            assert worker.process is not None
            await eventually(lambda: worker.process is not None and worker.process.poll() is not None, 20)
            assert worker.process.returncode == 1
