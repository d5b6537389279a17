"""Many streams at once: memory for each, whether it grows, and how much later than the engine's the events come.

The load, the engine and the gateway share the machine's cores, so the streams are slower than people's would be: as
many events a second in all as leave the cores half idle. LLMGW_BENCH_STREAMS, LLMGW_BENCH_SYSTEMS and
LLMGW_BENCH_EVENTS_PER_S (of all streams) change what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path

import uvloop

from tests.bench.load import Load, cpu_us, quantile_ms, rss_kib, run
from tests.bench.rig import Rig, System, until_answers

STREAMS = int(os.environ.get("LLMGW_BENCH_STREAMS", "1000"))
EVENTS_PER_S = float(os.environ.get("LLMGW_BENCH_EVENTS_PER_S", "5000"))
WANTED = os.environ.get("LLMGW_BENCH_SYSTEMS", "direct,nginx,vllm-router,llmgw").split(",")
OPENING_S, SECONDS = 4.0, 34.0
LOOKS_S = (24.0, 28.0, 32.0)
"""When memory is read, counted from when the first stream was opened: once what is kept of each is full."""


async def flow(system: System) -> tuple[Load, list[int], float]:
    """What came, memory at each look, and the CPU that the system took meanwhile, as part of a core."""
    delay, load, pid = STREAMS / EVENTS_PER_S, Load(), system.process.pid
    extra = {"stream": True, "max_tokens": round(SECONDS / delay), "delay": delay}
    began, spent, rss = time.monotonic(), cpu_us(pid), []
    asking = asyncio.ensure_future(run(system.url, system.callers, STREAMS, 1, load, over_s=OPENING_S, **extra))
    for at in LOOKS_S:
        await asyncio.sleep(began + at - time.monotonic())
        rss.append(rss_kib(pid))
    load.gaps.clear()  # until here streams were still being opened, or memory looked at
    await asking
    return load, rss, (cpu_us(pid) - spent) / (time.monotonic() - began) / 1e6


def measure(system: System) -> dict[str, object]:
    uvloop.run(run(system.url, system.callers, 50, 2, stream=True, max_tokens=5, delay=0.01))
    before = rss_kib(system.process.pid)
    load, rss, cores = uvloop.run(flow(system))
    if load.bad:
        raise SystemExit(f"{system.name}: {load.bad} streams went wrong; its figures would mean nothing")
    return {
        "streams": STREAMS,
        "events_per_s": EVENTS_PER_S,
        "kib_per_stream": round((rss[-1] - before) / STREAMS, 1),
        "rss_kib_before": before,
        "rss_kib_at": rss,
        "gap_p50_ms": quantile_ms(load.gaps, 0.5),
        "gap_p99_ms": quantile_ms(load.gaps, 0.99),
        "cpu_us_per_chunk": round(cores * 1e6 * load.seconds / load.chunks, 1),
    }


def main() -> None:
    direct: object = None
    with contextlib.ExitStack() as stack:
        rig = Rig(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmgw-bench-"))), stack)
        for name in WANTED:
            system = rig.start(name)
            system.answered = None
            asyncio.run(until_answers(system))
            figures = measure(system)
            if name == "direct":
                direct = figures["gap_p99_ms"]
            row = {"bench": "gateway", "name": f"{name}-streams", **figures, "gap_p99_ms_direct": direct}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
