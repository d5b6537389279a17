"""What a gateway costs per request and per streamed chunk, side by side with peers, in front of one mock engine.

CPU is user plus system time of the gateway's whole process tree, from /proc, so that other load on the machine
matters little. Rounds are interleaved (one of each system, then again) and the medians are printed. Compare only
figures of one run on one machine. LLMGW_BENCH_ROUNDS and LLMGW_BENCH_SYSTEMS (comma list) narrow a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
import httpx
import uvloop

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = int(os.environ.get("LLMGW_BENCH_ROUNDS", "5"))
TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
REQUESTS, CLIENTS = 12_000, 32
STREAMS, TOKENS, DELAY_S = 100, 200, 0.02
FIGURES = ("cpu_us_per_request", "cpu_us_per_chunk", "requests_per_s", "p99_ms", "gap_p99_ms", "rss_kib")
KEY = "sk-bench"


@dataclass(frozen=True)
class System:
    name: str
    process: subprocess.Popen[bytes]
    url: str
    key: str


# --- load ------------------------------------------------------------------------------------------------------------
class Client(asyncio.Protocol):
    """One connection that sends the same request `count` times, one after the other."""

    def __init__(self, request: bytes, count: int, took: list[float], gaps: list[float]) -> None:
        self.request, self.left, self.took, self.gaps = request, count, took, gaps
        self.done = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)
        self.chunks = self.bad = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._send()

    def _send(self) -> None:
        self.started = time.perf_counter()
        self.last: float | None = None
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: ")
        if events:
            now = time.perf_counter()
            self.chunks += events
            if self.last is not None:
                self.gaps.append(now - self.last)
            self.last = now
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.bad += self.parser.get_status_code() != 200
        self.took.append(time.perf_counter() - self.started)
        self.left -= 1
        if self.left:
            self._send()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.bad += self.left
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True)
class Load:
    seconds: float
    took: list[float]
    gaps: list[float]
    chunks: int
    bad: int


async def load(system: System, connections: int, count: int, **extra: Any) -> Load:
    url = httpx.URL(system.url)
    payload = {"model": "m", "messages": [{"role": "user", "content": "hi " * 50}], **extra}
    body = json.dumps(payload).encode()
    request = (
        f"POST {url.path} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {system.key}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    took: list[float] = []
    gaps: list[float] = []
    loop, began, clients = asyncio.get_running_loop(), time.perf_counter(), []
    for _ in range(connections):
        _, client = await loop.create_connection(lambda: Client(request, count, took, gaps), url.host, url.port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    return Load(
        seconds=time.perf_counter() - began,
        took=took,
        gaps=gaps,
        chunks=sum(client.chunks for client in clients),
        bad=sum(client.bad for client in clients),
    )


def quantile_ms(values: list[float], q: float) -> float | None:
    return round(sorted(values)[min(len(values) - 1, int(len(values) * q))] * 1e3, 2) if values else None


# --- what a process tree costs ---------------------------------------------------------------------------------------
def tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def cpu_us(pid: int) -> int:
    ticks = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_US


def rss_kib(pid: int) -> int:
    pages = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * PAGE_KIB


def measure(system: System) -> dict[str, float | None]:
    def run(connections: int, count: int, **extra: Any) -> Load:
        done = uvloop.run(load(system, connections, count, **extra))
        if done.bad:
            raise SystemExit(f"{system.name}: {done.bad} requests went wrong; its figures would mean nothing")
        return done

    run(CLIENTS, 20)
    run(4, 2, stream=True, max_tokens=5)
    before = cpu_us(system.process.pid)
    plain = run(CLIENTS, REQUESTS // CLIENTS)
    between, rss = cpu_us(system.process.pid), rss_kib(system.process.pid)
    flow = run(STREAMS, 1, stream=True, max_tokens=TOKENS, delay=DELAY_S)
    after = cpu_us(system.process.pid)
    return {
        "cpu_us_per_request": round((between - before) / len(plain.took), 1),
        "cpu_us_per_chunk": round((after - between) / flow.chunks, 1),
        "requests_per_s": round(len(plain.took) / plain.seconds),
        "p99_ms": quantile_ms(plain.took, 0.99),
        "gap_p99_ms": quantile_ms(flow.gaps, 0.99),
        "rss_kib": rss,
    }


# --- the systems -----------------------------------------------------------------------------------------------------
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def child(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the time of the block, its output in `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, **env})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


NGINX = """worker_processes 1; daemon off; pid {d}/pid; error_log {d}/err;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {d}/b; proxy_temp_path {d}/p; fastcgi_temp_path {d}/f;
  uwsgi_temp_path {d}/u; scgi_temp_path {d}/s;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 512; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""

SEED = """
import os, sys
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
import django
django.setup(set_prefix=False)
from django.core.management import call_command
call_command("migrate", verbosity=0)
from catalog.models import Model
from llmgw.core.models import Secret
from nodes.engine_keys import SECRET_NAME, engine_key
from nodes.models import Node, NodeState, Replica, Shard
from tenants.actions import make_default_tree, make_key, make_operator
from tenants.audit import SYSTEM
owner = make_operator(username="bench", password="bench", actor=SYSTEM)
project = make_default_tree(owner=owner, actor=SYSTEM)
_, secret = make_key(project=project, name="bench", actor=SYSTEM)
Model.objects.create(name="m")
node = Node.objects.create(name="bench", state=NodeState.READY, address="127.0.0.1")
replica = Replica.objects.create(name="m-1", model="m", profile="cpu", engine="vllm", weight=512, state="ready")
Shard.objects.create(replica=replica, node=node, state="ready", port=int(sys.argv[1]))
print(secret, engine_key(Secret.named(SECRET_NAME), "m-1"))
"""


def llmgw(folder: Path, stack: contextlib.ExitStack) -> System:
    """Everything on: key check, scheduling, journal to SQLite, metrics, scraping."""
    engine_port, port = free_port(), free_port()
    env = {"LLMGW_DATA_DIR": str(folder / "data"), "LLMGW_ROLES": "gateway", "LLMGW_LISTEN__PORT": str(port)}
    seeded = subprocess.run(
        [sys.executable, "-c", SEED, str(engine_port)],
        env={**os.environ, **env},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    key, engine_key = seeded.stdout.split()
    # An engine with llmgw's key of its own; otherwise the one that the peers have.
    stack.enter_context(mock_engine(folder, engine_port, engine_key))
    command = [sys.executable, "-m", "uvicorn", "llmgw.asgi:application", "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--loop",
        "uvloop",
        "--http",
        "routing.edge:GatewayProtocol",
        "--no-proxy-headers",
        "--no-server-header",
    ]
    command += ["--no-access-log", "--log-level", "warning"]
    process = stack.enter_context(child(command, folder / "llmgw.log", **env))
    return System("llmgw", process, f"http://127.0.0.1:{port}/v1/chat/completions", key)


def vllm_router(folder: Path, stack: contextlib.ExitStack) -> System:
    beside = Path(sys.executable).with_name("vllm-router")
    command = os.environ.get("VLLM_ROUTER") or (str(beside) if beside.exists() else shutil.which("vllm-router"))
    if not command:
        raise SystemExit("vllm-router is not here: run `make bench BENCH=gateway`, which installs it")
    engine_port, port = free_port(), free_port()
    stack.enter_context(mock_engine(folder, engine_port, ""))
    arguments = ["--worker-urls", f"http://127.0.0.1:{engine_port}", "--host", "127.0.0.1", "--port", str(port)]
    metrics = ["--prometheus-port", str(free_port())]
    process = stack.enter_context(
        child([command, *arguments, "--policy", "round_robin", *metrics], folder / "vllm-router.log")
    )
    return System("vllm-router", process, f"http://127.0.0.1:{port}/v1/chat/completions", KEY)


def nginx(folder: Path, stack: contextlib.ExitStack) -> System:
    command = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if not command:
        raise SystemExit("nginx is not here: apt-get install nginx-light")
    engine_port, port = free_port(), free_port()
    stack.enter_context(mock_engine(folder, engine_port, ""))
    (folder / "nginx").mkdir()
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(d=folder / "nginx", engine=engine_port, port=port))
    process = stack.enter_context(child([command, "-c", str(config)], folder / "nginx.log"))
    return System("nginx", process, f"http://127.0.0.1:{port}/v1/chat/completions", KEY)


SYSTEMS = {"llmgw": llmgw, "vllm-router": vllm_router, "nginx": nginx}


def mock_engine(folder: Path, port: int, key: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.stubs.mock_engine", str(port), *([key] if key else [])]
    return child(command, folder / f"engine-{port}.log")


async def wait_for(system: System, seconds: float = 60) -> None:
    payload = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    said = "nothing"
    async with httpx.AsyncClient(trust_env=False, timeout=2) as http:
        for _ in range(int(seconds / 0.2)):
            if system.process.poll() is not None:
                raise SystemExit(f"{system.name} ended with {system.process.returncode} while it started")
            with contextlib.suppress(httpx.HTTPError):
                answer = await http.post(system.url, json=payload, headers={"authorization": f"Bearer {system.key}"})
                if answer.status_code == 200:
                    return
                said = answer.text
            await asyncio.sleep(0.2)
    raise SystemExit(f"{system.name} never answered at {system.url}: {said}")


def main() -> None:
    wanted = os.environ.get("LLMGW_BENCH_SYSTEMS", ",".join(SYSTEMS)).split(",")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmgw-bench-")))
        systems = [SYSTEMS[name](folder, stack) for name in wanted]
        for system in systems:
            asyncio.run(wait_for(system))
        rounds: dict[str, list[dict[str, float | None]]] = {system.name: [] for system in systems}
        for _ in range(ROUNDS):
            for system in systems:
                rounds[system.name].append(measure(system))
    medians = {name: _medians(seen) for name, seen in rounds.items()}
    for name, figures in medians.items():
        print(json.dumps({"bench": "gateway", "name": name, **figures}), flush=True)
    own = medians.get("llmgw", {})
    for peer in ("vllm-router", "nginx"):
        if own and peer in medians:
            ratios = {
                figure.replace("cpu_us", "cpu_ratio"): round(own[figure] / medians[peer][figure], 2)
                for figure in ("cpu_us_per_request", "cpu_us_per_chunk")
            }
            print(json.dumps({"bench": "gateway", "name": f"llmgw/{peer}", **ratios}), flush=True)


def _medians(rounds: list[dict[str, float | None]]) -> dict[str, float]:
    return {
        figure: round(statistics.median(value for each in rounds if (value := each[figure]) is not None), 2)
        for figure in FIGURES
    }
