"""What a gateway costs per request and per streamed chunk, side by side with peers, in front of one mock engine each.

CPU is user plus system time of the gateway's whole process tree, from /proc, so that other load on the machine
matters little. Rounds are interleaved (one of each system, then again); medians of them are printed, and medians of
each round's ratios, since a machine that others share grows slower and faster by the minute. Compare only figures of
one run on one machine. LLMGW_BENCH_ROUNDS and LLMGW_BENCH_SYSTEMS (comma list) narrow a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from tests.bench.load import Load, cpu_us, quantile_ms, rss_kib, run
from tests.bench.rig import Rig, System, until_answers

ROUNDS = int(os.environ.get("LLMGW_BENCH_ROUNDS", "5"))
EVERY = "llmgw-plain,llmgw,llmgw-limited,llmgw-tables,llmgw-large,vllm-router,nginx"
WANTED = os.environ.get("LLMGW_BENCH_SYSTEMS", EVERY).split(",")
REQUESTS, CLIENTS = 19_200, 32
STREAMS, TOKENS, DELAY_S = 100, 120, 0.02
IDLE_S, WRITE_S = 5.0, 1.5
"""How long nothing is asked to see what a system costs by itself; how long it gets to write down what was asked."""
PAIRS = (
    ("llmgw-plain", "vllm-router"),
    ("llmgw", "vllm-router"),
    ("llmgw-limited", "vllm-router"),
    ("llmgw", "nginx"),
    ("llmgw-tables", "llmgw"),
    ("llmgw-large", "llmgw"),
)
CPU = ("cpu_us_per_request", "cpu_us_per_chunk")


def ask(system: System, connections: int, count: int, **extra: Any) -> Load:
    done = uvloop.run(run(system.url, system.callers, connections, count, **extra))
    if done.bad:
        raise SystemExit(f"{system.name}: {done.bad} requests went wrong; its figures would mean nothing")
    if system.answered is not None:
        system.answered += len(done.took)
    return done


def idle_percent(systems: list[System]) -> dict[str, float]:
    """What each costs while nobody asks anything, in percent of a core."""
    before = [cpu_us(system.process.pid) for system in systems]
    asyncio.run(asyncio.sleep(IDLE_S))
    spent = [cpu_us(system.process.pid) - was for system, was in zip(systems, before, strict=True)]
    return {system.name: round(us / IDLE_S / 1e4, 2) for system, us in zip(systems, spent, strict=True)}


def measure(system: System, idle: float) -> dict[str, float | None]:
    """`idle`: percent of a core. What it costs anyway counts while requests run, and not while they are written."""
    ask(system, CLIENTS, 20)
    ask(system, 4, 2, stream=True, max_tokens=5)
    pid = system.process.pid
    before = cpu_us(pid)
    plain = ask(system, CLIENTS, REQUESTS // CLIENTS)
    if system.answered is not None:
        asyncio.run(asyncio.sleep(WRITE_S))
        before += round(WRITE_S * idle * 1e4)
    between, rss = cpu_us(pid), rss_kib(pid)
    flow = ask(system, STREAMS, 1, stream=True, max_tokens=TOKENS, delay=DELAY_S)
    after = cpu_us(pid)
    requests, chunks = between - before, after - between
    return {
        "cpu_us_per_request": round(requests / len(plain.took), 1),
        "cpu_us_per_chunk": round(chunks / flow.chunks, 1),
        "asked_us_per_request": round((requests - plain.seconds * idle * 1e4) / len(plain.took), 1),
        "asked_us_per_chunk": round((chunks - flow.seconds * idle * 1e4) / flow.chunks, 1),
        "requests_per_s": round(len(plain.took) / plain.seconds),
        "p99_ms": quantile_ms(plain.took, 0.99),
        "gap_p99_ms": quantile_ms(flow.gaps, 0.99),
        "rss_kib": rss,
    }


def main() -> None:
    rounds: dict[str, list[dict[str, float | None]]] = {name: [] for name in WANTED}
    with contextlib.ExitStack() as stack:
        rig = Rig(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmgw-bench-"))), stack)
        systems = [rig.start(name) for name in WANTED]
        for system in systems:
            asyncio.run(until_answers(system))
        idle = idle_percent(systems)
        for _ in range(ROUNDS):
            for system in systems:
                rounds[system.name].append(measure(system, idle[system.name]))
    medians = {name: {**_medians(seen), "cpu_percent_idle": idle[name]} for name, seen in rounds.items()}
    for name, figures in medians.items():
        say(name, figures)
    for one, other in PAIRS:
        if one in medians and other in medians:
            names = CPU if other != "llmgw" else (*CPU, "asked_us_per_request", "asked_us_per_chunk")
            say(f"{one}/{other}", {name.replace("_us_", "_ratio_"): ratio(rounds, one, other, name) for name in names})


def say(name: str, figures: dict[str, float]) -> None:
    print(json.dumps({"bench": "gateway", "name": name, **figures}), flush=True)


def ratio(rounds: dict[str, list[dict[str, float | None]]], one: str, other: str, figure: str) -> float:
    """The median of what it was in each round."""
    pairs = ((this[figure], that[figure]) for this, that in zip(rounds[one], rounds[other], strict=True))
    return round(statistics.median(this / that for this, that in pairs if this is not None and that), 2)


def _medians(rounds: list[dict[str, float | None]]) -> dict[str, float]:
    return {
        figure: round(statistics.median(value for each in rounds if (value := each[figure]) is not None), 2)
        for figure in rounds[0]
    }


if __name__ == "__main__":
    main()
