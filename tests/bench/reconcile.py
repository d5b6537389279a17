"""What a control plane costs at 10, 100 and 1,000 nodes of 8 cards and 2 replicas each (ND-60).

A pass and a placement are measured in a process of their own, in the fleet as it is and again with hundreds of models
that it has no place for (`crowded_…`; `tests.bench.fleet` says which). Heartbeats are measured at a real server, which
as many simulated agents speak to over real websockets, with the agent's own session. CPU is user plus system time, from
/proc, so that other load on the machine matters little. The last line says with which power of the nodes each cost
grows, between the smallest and the largest fleet: 1 is linear. LLMGW_BENCH_NODES (comma list) narrows a run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from agent import protocol
from agent.config import AgentSettings
from agent.session import Session
from tests.bench import fleet
from tests.bench.load import cpu_us
from tests.bench.rig import ROOT, child, free_port

NODES = [int(each) for each in os.environ.get("LLMGW_BENCH_NODES", "10,100,1000").split(",")]
STORM_S, SETTLE_S, WINDOW_S = 60.0, 6.0, 15.0
"""How long all may take to register, how long the server then gets, and how long it is watched."""
COSTS = ("pass_cpu_ms", "placement_cpu_ms", "heartbeat_cpu_percent", "crowded_cpu_ms", "rss_mib")
SERVE = ("-m", "uvicorn", "llmgw.asgi:application", "--host", "127.0.0.1", "--loop", "uvloop")


class Played:
    """A node that says what it is, and that nothing changes."""

    def __init__(self, number: int, digest: str) -> None:
        self.name = fleet.node_name(number)
        self.number, self.digest = number, digest
        self.registers = self.beats = 0

    async def register(self, address: str) -> protocol.Register:
        self.registers += 1
        return protocol.Register(
            node=self.name,
            agent_version="1",
            machine_id=f"machine-{self.name}",
            address=address,
            inventory=fleet.machine(self.number),
            shards=fleet.shards(self.number, self.digest),
        )

    async def heartbeat(self, _: protocol.Inventory) -> protocol.Heartbeat:
        self.beats += 1
        readings = tuple(
            protocol.GpuReading(
                uuid=fleet.card(self.number, index),
                memory_used_bytes=70 * 2**30 + self.beats,
                utilisation_percent=float(self.beats % 100),
                temperature_c=60.0,
                power_w=500.0,
            )
            for index in range(fleet.CARDS)
        )
        load = protocol.NodeLoad(load_1m=1.0 + self.beats, memory_used_bytes=10**11, gpus=readings)
        states = tuple(running.status for running in fleet.shards(self.number, self.digest))
        return protocol.Heartbeat(load=load, shards=states)

    def failures(self) -> tuple[protocol.ShardStatus, ...]:
        return ()

    def answer(self, command: protocol.Command) -> protocol.Ack:
        raise SystemExit(f"{self.name} was sent {command}, though nothing changed: the figures would mean nothing")


async def beat(port: int, pid: int, count: int, tokens: Path) -> tuple[float, float]:
    """How long until all had registered, and the percent of a core that their heartbeats cost the server."""
    digest = (tokens / "digest").read_text()
    played = [Played(number, digest) for number in range(count)]
    async with asyncio.TaskGroup() as tasks:
        began = time.monotonic()
        running = []
        for each in played:
            address = f"http://127.0.0.1:{port}"
            settings = AgentSettings(control_plane=[address], node=each.name, token_file=tokens / each.name)
            running.append(tasks.create_task(Session(settings, each).run()))
        while not all(each.beats for each in played):
            if time.monotonic() - began > STORM_S:
                missing = sum(not each.beats for each in played)
                raise SystemExit(f"{missing} of {count} agents were not welcome within {STORM_S:g} s")
            await asyncio.sleep(0.1)
        storm_s = time.monotonic() - began
        await asyncio.sleep(SETTLE_S)
        before, started = cpu_us(pid), time.monotonic()
        await asyncio.sleep(WINDOW_S)
        spent, lasted = cpu_us(pid) - before, time.monotonic() - started
        for task in running:
            task.cancel()
    again = sum(each.registers - 1 for each in played)
    if again:
        print(f"{again} agents had to register again", file=sys.stderr)
    return storm_s, spent / lasted / 1e4


def row(count: int, folder: Path) -> dict[str, Any]:
    tokens = folder / "tokens"
    tokens.mkdir()
    env = {"LLMGW_DATA_DIR": str(folder / "data"), "LLMGW_ROLES": "web", "LLMGW_LOGGING__LEVEL": "warning"}
    _run(env, "seed", count, tokens)
    found = json.loads(_run(env, "measure"))
    port = free_port()
    with child(
        [sys.executable, *SERVE, "--port", str(port), "--log-level", "warning"], folder / "log", **env
    ) as server:
        storm_s, percent = uvloop.run(beat(port, server.pid, count, tokens))
    return {
        "bench": "reconcile",
        "nodes": count,
        "gpus": count * fleet.CARDS,
        "replicas": count * fleet.REPLICAS,
        **found,
        "heartbeat_cpu_percent": round(percent, 1),
        "registration_s": round(storm_s, 1),
    }


def _run(env: dict[str, str], *words: object) -> str:
    command = [sys.executable, "-m", "tests.bench.fleet", *map(str, words)]
    done = subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def growth(rows: list[dict[str, Any]]) -> dict[str, object]:
    """By cost, the power of the number of nodes that it grows with."""
    least, most = rows[0], rows[-1]
    times = math.log(most["nodes"] / least["nodes"])
    grown = {name: math.log(most[name] / least[name]) / times for name in COSTS if least[name] > 0}
    return {"bench": "reconcile", "grows_with_nodes_to_the_power_of": {name: round(n, 2) for name, n in grown.items()}}


def main() -> None:
    logging.disable(logging.WARNING)
    rows = []
    for count in NODES:
        with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as folder:
            rows.append(row(count, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    if len(rows) > 1:
        print(json.dumps(growth(rows)))


if __name__ == "__main__":
    main()
