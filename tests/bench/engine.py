"""The benches' engine: the tests' mock engine with metrics as long as vLLM's, of which it gives what is asked for.

`python -m tests.bench.engine PORT [KEY]`.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from tests.stubs.mock_engine import MockEngine

LABELS = 'engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"'
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
HISTOGRAMS, BUCKETS = 25, 22


def page() -> bytes:
    """Some 600 samples in 65 kB."""
    lines: list[str] = []
    for name in GAUGES:
        lines += [f"# HELP vllm:{name} What it says.", f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{LABELS}}} 0.0"]
    for number in range(HISTOGRAMS):
        name = f"vllm:histogram_{number}_seconds"
        lines += [f"# HELP {name} Histogram of something in seconds.", f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{{LABELS},le="{edge * 0.25}"}} {edge * 100}.0' for edge in range(BUCKETS)]
        lines += [f"{name}_count{{{LABELS}}} 2200.0", f"{name}_sum{{{LABELS}}} 121.5"]
    return "\n".join([*lines, ""]).encode()


async def serve(port: int, key: str) -> None:
    engine = await MockEngine(key=key, keep=False).start(port)
    engine.metrics, engine.gives_by_name = page(), True
    print(engine.port, flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
