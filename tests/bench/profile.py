"""Where a gateway's CPU goes: py-spy beside a load, as microseconds a request (or a chunk, or a second of idling).

LLMGW_BENCH_SYSTEMS names the systems (llmgw, llmgw-large); LLMGW_BENCH_PROFILE what is asked (requests, chunks, idle).
Samples of the process's running threads are shared out over the CPU time that it took, native code and the kernel with
their caller. A thread that was pushed off its core counts as running, so this is worth something on a quiet machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import uvloop

from tests.bench.load import Load, run, user_and_system_us
from tests.bench.rig import ROOT, Rig, System, until_answers

SYSTEMS = os.environ.get("LLMGW_BENCH_SYSTEMS", "llmgw").split(",")
WHAT = os.environ.get("LLMGW_BENCH_PROFILE", "requests,chunks").split(",")
SECONDS, RATE, SHOWN = 10, 400, 25
CLIENTS, STREAMS, DELAY_S = 32, 100, 0.02


def record(pid: int, out: Path) -> None:
    spy = str(Path(sys.executable).with_name("py-spy"))
    command = [spy, "record", "--nonblocking", "--pid", str(pid), "--duration", str(SECONDS), "--rate", str(RATE)]
    subprocess.run(
        [*command, "--threads", "--full-filenames", "--format", "raw", "--output", str(out)],
        check=True,
        capture_output=True,
    )


def asked(system: System, done: threading.Event, what: str) -> tuple[int, str]:
    """Keep asking until `done`; how much that was, and of what."""
    if what == "idle":
        done.wait()
        return SECONDS, "second of idling"
    total = Load()
    while not done.is_set():
        if what == "requests":
            uvloop.run(run(system.url, system.callers, CLIENTS, 50, total))
        else:
            extra = {"stream": True, "max_tokens": 50, "delay": DELAY_S}
            uvloop.run(run(system.url, system.callers, STREAMS, 1, total, **extra))
    if total.bad:
        raise SystemExit(f"{system.name}: {total.bad} requests went wrong")
    return (len(total.took), "request") if what == "requests" else (total.chunks, "chunk")


def shares(stacks: Path) -> tuple[dict[str, Counter[str]], int]:
    """Samples by function, and of all: where they were, and, of our own code, with all that it called."""
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    total = 0
    for line in stacks.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        names = [_name(frame) for frame in frames]
        total += int(count)
        own[names[-1][0] if names else thread] += int(count)
        for name in {thread.partition(" (")[0], *(name for name, ours in names if ours)}:
            within[name] += int(count)
    return {"itself": own, "with all it calls": within}, total


def _name(frame: str) -> tuple[str, bool]:
    """Of `function (path/file.py:12)`, without the line; whether it is our own code."""
    function, _, place = frame.partition(" (")
    path = Path(place.rpartition(":")[0])
    ours = path.is_relative_to(ROOT) and ".venv" not in path.parts
    return f"{function} ({'/'.join(path.parts[-2:])})", ours


def show(each: Callable[[int], float], found: dict[str, Counter[str]]) -> None:
    for how, counts in found.items():
        print(f"\n  {how}")
        for name, count in counts.most_common(SHOWN):
            print(f"{each(count):10.2f} µs  {name}")


def main() -> None:
    with contextlib.ExitStack() as stack:
        rig = Rig(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmgw-bench-"))), stack)
        for name in SYSTEMS:
            system = rig.start(name)
            system.answered = None
            asyncio.run(until_answers(system))
            for what in WHAT:
                out, done = rig.folder / f"{name}-{what}", threading.Event()

                def spy(pid: int = system.process.pid, out: Path = out, done: threading.Event = done) -> None:
                    try:
                        record(pid, out)
                    finally:
                        done.set()

                thread = threading.Thread(target=spy)
                before = user_and_system_us(system.process.pid)
                thread.start()
                count, unit = asked(system, done, what)
                user, kernel = (
                    (now - was) / count for now, was in zip(user_and_system_us(system.process.pid), before, strict=True)
                )
                thread.join()
                found, total = shares(out)
                print(
                    f"\n{name}: {user + kernel:.1f} µs a {unit}, {kernel:.1f} of them in the kernel ({total:,} samples)"
                )
                show(lambda samples, part=(user + kernel) / total: samples * part, found)  # type: ignore[misc]


if __name__ == "__main__":
    main()
