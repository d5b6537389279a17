"""Replicas that span nodes, for real: agents and engines as processes, streams over a port, passes over real rows.

Only cards and the fabric are played. Each agent has an address of its own on the loopback interface, so that a rank
that looks for the leader on its own machine finds nobody.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
import uvicorn
from channels.db import database_sync_to_async
from django.utils import timezone

from agent import process
from catalog import models as catalog
from llmgw.asgi import application
from llmgw.core.models import Secret
from nodes import actions, passes
from nodes.engine_keys import SECRET_NAME, engine_key
from nodes.models import Backoff, Event, Replica, Shard
from tenants.audit import SYSTEM
from tests.factories import make_model
from tests.stubs.played_node import GPU_CLASS

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
STUBS = ROOT / "tests" / "stubs"
LIMIT_S = 200
PROGRAMS = {"vllm": "stub_vllm.py", "ray": "stub_ray.py", "python": "stub_sglang.py"}


async def in_db(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await database_sync_to_async(function)(*args, **kwargs)


@dataclass
class Machine:
    """One node: its agent's process, and what it was set up with."""

    name: str
    address: str
    folder: Path
    agent: subprocess.Popen[bytes] | None = None

    @property
    def mark(self) -> str:
        return f"{self.name}|{self.folder / 'work'}"

    def start(self) -> None:
        with (self.folder / "agent.log").open("ab") as log:
            command = [sys.executable, "-m", "tests.stubs.played_node", str(self.folder / "agent.yaml"), "2"]
            self.agent = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def kill_agent(self) -> None:
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait(60)

    def engines(self) -> list[int]:
        """Processes of engines on this machine, sidecars included."""
        return sorted(process.marked(self.mark))

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()


@dataclass
class Site:
    """A control plane, and machines that join it."""

    folder: Path
    port: int
    machines: dict[str, Machine] = field(default_factory=dict)

    async def add(self, name: str) -> Machine:
        number = len(self.machines) + 1
        _, token = await in_db(actions.make_node, name=name, actor=SYSTEM)
        folder = self.folder / name
        folder.mkdir()
        (folder / "token").write_text(token)
        (folder / "token").chmod(0o600)
        programs = self.folder / "programs"
        first = 20000 + (os.getpid() % 30) * 300 + number * 100  # below the ports that the system gives to clients
        settings = {
            "control_plane": [f"http://127.0.0.1:{self.port}"],
            "node": name,
            "token_file": str(folder / "token"),
            "address": f"127.0.0.{10 + number}",
            "work_dir": str(folder / "work"),
            "fabrics": {"ib0": ["mlx5_0"]},
            "ports": {"first": first, "last": first + 99},
            "vllm": {"binary": str(programs / "vllm")},
            "sglang": {"python": str(programs / "python")},
        }
        (folder / "agent.yaml").write_text(json.dumps(settings))
        machine = self.machines[name] = Machine(name, str(settings["address"]), folder)
        machine.start()
        return machine

    async def until(self, what: str, holds: Callable[[], Any]) -> Any:
        """Let passes run until `holds` gives something, which is asked of the rows."""
        end = monotonic() + LIMIT_S
        while True:
            await in_db(passes.run_pass, timezone.now())
            if found := await in_db(holds):
                return found
            assert monotonic() < end, f"not within {LIMIT_S} s: {what}\n{await in_db(self._story)}"
            await asyncio.sleep(0.1)

    def _story(self) -> str:
        logs = [f"--- {name}\n{machine.log()}" for name, machine in self.machines.items()]
        rows = [str(row) for row in Shard.objects.values()]
        return "\n".join([*Event.objects.order_by("pk").values_list("text", flat=True), *rows, *logs])

    def events(self) -> list[dict[str, Any]]:
        """What engines noted."""
        path = self.folder / "events"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def engines(self) -> list[int]:
        return [pid for machine in self.machines.values() for pid in machine.engines()]

    def end(self) -> None:
        for machine in self.machines.values():
            if machine.agent is not None and machine.agent.poll() is None:
                machine.kill_agent()
            for pid in machine.engines():
                process.send(pid, signal.SIGKILL)


@pytest.fixture
async def site(settings: Any) -> AsyncIterator[Site]:
    # No gateway is there to say that nothing is in flight any more.
    nodes = settings.LLMGW.nodes.model_copy(update={"drain_s": 1.0})
    settings.LLMGW = settings.LLMGW.model_copy(update={"nodes": nodes})
    server = uvicorn.Server(uvicorn.Config(application, lifespan="off", ws="websockets-sansio", log_config=None))
    place = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[place]))
    folder = Path(tempfile.mkdtemp(prefix="llmgw-site-"))
    (folder / "programs").mkdir()
    for name, stub in PROGRAMS.items():
        path = folder / "programs" / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {STUBS / stub} "$@"\n')
        path.chmod(0o755)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    one = Site(folder, place.getsockname()[1])
    try:
        yield one
    finally:
        one.end()
        server.should_exit = True
        await serving
        shutil.rmtree(folder, ignore_errors=True)


def publish(site: Site, *, nodes: int, **profile: Any) -> None:
    told = {
        "name": "wide",
        "gpu_class": GPU_CLASS,
        "tp": 2 * nodes,
        "nodes": nodes,
        "gpus_per_node": 2,
        "env": {"STUB_EVENTS": str(site.folder / "events")},
        **profile,
    }
    make_model("wide", source=str(site.folder / "model"), profiles=(told,))


def ready() -> Replica | None:
    found = [each.replica for each in Replica.objects.endpoints() if each.usable]
    return Replica.objects.get(name=found[0]) if found else None


def ready_but(other: Replica) -> Replica | None:
    found = ready()
    return found if found and found.name != other.name else None


def by_rank(replica: Replica) -> list[Shard]:
    return list(replica.shards.order_by("rank"))


async def ask(replica: Replica, path: str, *, key: bool = True) -> httpx.Response:
    leader = (await in_db(by_rank, replica))[0]
    address = await in_db(lambda: leader.node.address)
    secret = engine_key(await in_db(Secret.named, SECRET_NAME), replica.name)
    headers = {"Authorization": f"Bearer {secret}"} if key else {}
    async with httpx.AsyncClient(base_url=f"http://{address}:{leader.port}", trust_env=False) as http:
        return await http.get(path, headers=headers)


async def test_vllm_ranks_start_in_order_serve_fall_together_come_back_and_drain(site: Site) -> None:
    for name in ("one", "two"):
        await site.add(name)
    await in_db(publish, site, nodes=2, engine="vllm")
    replica: Replica = await site.until("the replica is ready", ready)
    leader, worker = await in_db(by_rank, replica)

    # The leader came first, and the worker was told where it listens.
    starts = [event for event in site.events() if event["event"] == "start"]
    assert [("--headless" in event["argv"], event["host_ip"]) for event in starts] == [
        (False, site.machines[leader.node_id].address),
        (True, site.machines[worker.node_id].address),
    ]
    told = " ".join(starts[1]["argv"])
    assert f"--master-addr {site.machines[leader.node_id].address} --master-port {leader.rendezvous}" in told
    assert leader.rendezvous != leader.port
    assert (worker.state, worker.port) == ("ready", None)
    assert [each["id"] for each in (await ask(replica, "/v1/models")).json()["data"]] == ["wide"]
    assert (await ask(replica, "/v1/models", key=False)).status_code == 401

    # One rank is killed: the whole replica is over, nothing of it is left, and it comes back as another.
    old = site.engines()
    os.kill(site.machines[worker.node_id].engines()[0], signal.SIGKILL)
    await site.until("the failure is known", lambda: Backoff.objects.filter(model="wide").exists())
    again: Replica = await site.until("it is ready again", lambda: ready_but(replica))
    await site.until("the first one is gone", lambda: not Replica.objects.filter(name=replica.name).exists())
    assert not set(old) & set(site.engines())
    texts = await in_db(lambda: list(Event.objects.filter(kind="backoff").values_list("text", flat=True)))
    assert any("killed by signal 9" in text or "worker rank is gone" in text or "exited" in text for text in texts)

    # Agents that are killed find their ranks again, and nothing starts anew.
    before = site.engines()
    for machine in site.machines.values():
        machine.kill_agent()
        machine.start()
    await site.until(
        "both agents are back", lambda: all("Adopted wide" in machine.log() for machine in site.machines.values())
    )
    assert (await in_db(ready)).name == again.name
    assert site.engines() == before

    # Switched off, it drains, ends in order, and leaves nothing.
    await in_db(catalog.Model.objects.update, scaling_min=0, scaling_max=0)
    await site.until("it is gone", lambda: not Replica.objects.exists())
    assert site.engines() == []
    assert [event["running"] for event in site.events() if event["event"] == "end"] == [0]


async def test_over_ray_the_head_waits_for_three_nodes_and_a_lost_one_takes_all_along(site: Site) -> None:
    for name in ("one", "two", "three"):
        await site.add(name)
    await in_db(publish, site, nodes=3, engine="vllm", launch_mode="ray")
    replica: Replica = await site.until("the replica is ready", ready)
    ranks = await in_db(by_rank, replica)
    homes = [site.machines[shard.node_id] for shard in ranks]
    assert [len(home.engines()) for home in homes] == [2, 1, 1]  # the head is a sidecar of the server
    events = site.events()
    head = next(event for event in events if event["event"] == "head")
    assert (head["node"], head["port"]) == (homes[0].address, ranks[0].rendezvous)
    joins = [event["node"] for event in events if event["event"] == "joined" and "node" in event]
    assert sorted(joins) == sorted(home.address for home in homes[1:])
    assert {"event": "joined", "cards": 6} in events

    # The sidecar is as much a part of the replica as any rank.
    old = site.engines()
    os.kill(head_of(homes[0]), signal.SIGKILL)
    await site.until("the failure is known", lambda: Backoff.objects.filter(model="wide").exists())
    await site.until("it is ready again", lambda: ready_but(replica))
    await site.until("the first one is gone", lambda: not Replica.objects.filter(name=replica.name).exists())
    assert not set(old) & set(site.engines())

    await in_db(catalog.Model.objects.update, scaling_min=0, scaling_max=0)
    await site.until("it is gone", lambda: not Replica.objects.exists())
    assert site.engines() == []


def head_of(machine: Machine) -> int:
    return next(pid for pid in machine.engines() if b"--head" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))


async def test_sglang_ranks_meet_keep_their_key_to_themselves_and_end_with_the_first(site: Site) -> None:
    for name in ("one", "two"):
        await site.add(name)
    await in_db(publish, site, nodes=2, engine="sglang")
    replica: Replica = await site.until("the replica is ready", ready)
    _, worker = await in_db(by_rank, replica)
    secret = engine_key(await in_db(Secret.named, SECRET_NAME), replica.name)
    assert (await ask(replica, "/v1/models")).status_code == 200
    assert (await ask(replica, "/v1/models", key=False)).status_code == 401
    for pid in site.engines():
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    kept = [path for path in site.folder.rglob("*") if path.is_file() and secret in path.read_text(errors="replace")]
    assert len(kept) == 4  # a record and a settings file of each rank
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in kept)

    os.kill(site.machines[worker.node_id].engines()[0], signal.SIGKILL)
    await site.until("it is ready again", lambda: ready_but(replica))
    await in_db(catalog.Model.objects.update, scaling_min=0, scaling_max=0)
    await site.until("it is gone", lambda: not Replica.objects.exists())
    assert site.engines() == []
    ends = [event["rank"] for event in site.events() if event["event"] == "end"]
    assert ends == [0, 1]
    kept = [list(shards.iterdir()) for shards in site.folder.rglob("shards")]
    assert kept == [[], []]  # one folder an agent
