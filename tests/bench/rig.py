"""The systems that benches compare, each a process of its own in front of a mock engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.bench.load import Caller

ROOT = Path(__file__).resolve().parents[2]
PEER = ("sk-bench", "m")
"""What peers, which know no keys, are called with."""
SEED = "import sys; from tests.bench import rows; rows.main(['seed', *sys.argv[1:]])"
"""For `python -c`, with a port: rows of a key and a model with one endpoint there. Prints the key and the engine's."""
PLAIN = {"keys": 1, "projects": 1, "models": 1, "endpoints": 1, "limited": 0}
SMALL = {**PLAIN, "endpoints": 2, "limited": 1}
LIMITED = {**SMALL, "limited": 2}
LARGE = {"keys": 10_000, "projects": 200, "models": 200, "endpoints": 500, "limited": 1}
SERVE = ("-m", "llmgw", "server", "run", "gateway", "--host", "127.0.0.1")


@dataclass
class System:
    """`answered` is how many requests it answered with 200; None where nobody looks whether it recorded them."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    callers: tuple[Caller, ...] = (PEER,)
    answered: int | None = None
    engine: subprocess.Popen[bytes] | None = None


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
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Rig:
    """Starts systems that end with `stack`; their files lie in `folder`."""

    folder: Path
    stack: contextlib.ExitStack

    def engine(self) -> tuple[int, subprocess.Popen[bytes]]:
        port = free_port()
        command = [sys.executable, "-m", "tests.bench.engine", str(port)]
        return port, self.child(command, f"engine-{port}")

    def child(self, command: list[str], log: str, **env: str) -> subprocess.Popen[bytes]:
        return self.stack.enter_context(child(command, self.folder / f"{log}.log", **env))

    def start(self, name: str) -> System:
        return SYSTEMS[name](self)


def direct(rig: Rig) -> System:
    """The engine itself."""
    port, engine = rig.engine()
    return System("direct", engine, chats(port))


def llmgw_plain(rig: Rig) -> System:
    return _llmgw(rig, "llmgw-plain", PLAIN)


def llmgw(rig: Rig) -> System:
    return _llmgw(rig, "llmgw", SMALL)


def llmgw_limited(rig: Rig) -> System:
    return _llmgw(rig, "llmgw-limited", LIMITED)


def llmgw_tables(rig: Rig) -> System:
    """Large tables alone: who calls what is as in the small case."""
    system = _llmgw(rig, "llmgw-tables", LARGE)
    system.callers = system.callers[:1]
    return system


def llmgw_large(rig: Rig) -> System:
    return _llmgw(rig, "llmgw-large", LARGE)


def _llmgw(rig: Rig, name: str, size: dict[str, int]) -> System:
    """Key check, admission, scheduling, journal, usage rows and sums in SQLite, metrics, scraping; and what `size` says
    of budgets, prices, rates and places."""
    port, (engine_port, engine) = free_port(), rig.engine()
    env = {"LLMGW_DATA_DIR": str(rig.folder / name), "LLMGW_LISTEN__PORT": str(port)}
    seeded = _rows(env, "seed", engine_port, *size.values())
    callers = tuple((words[0], words[1]) for words in map(str.split, seeded.splitlines()))
    callers = ((callers[0][0], "m"), *callers[1:])

    def verify(failed: object, *_: object) -> None:
        if failed is None and system.answered is not None:
            _rows(env, "verify", system.answered, size["limited"])

    rig.stack.push(verify)  # called once the process has ended, with all that it had to write
    process = rig.child([sys.executable, *SERVE, "--port", str(port)], name, **env)
    system = System(name, process, chats(port), callers, answered=0, engine=engine)
    return system


def _rows(env: dict[str, str], *words: object) -> str:
    command = [sys.executable, "-m", "tests.bench.rows", *map(str, words)]
    done = subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{Path(env['LLMGW_DATA_DIR']).name}: {done.stderr}")
    return done.stdout


def vllm_router(rig: Rig) -> System:
    beside = Path(sys.executable).with_name("vllm-router")
    command = os.environ.get("VLLM_ROUTER") or (str(beside) if beside.exists() else shutil.which("vllm-router"))
    if not command:
        raise SystemExit("vllm-router is not here: run `make bench BENCH=gateway`, which installs it")
    port, (engine_port, engine) = free_port(), rig.engine()
    arguments = ["--worker-urls", f"http://127.0.0.1:{engine_port}", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
    return System("vllm-router", rig.child([command, *arguments], "vllm-router"), chats(port), engine=engine)


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


def nginx(rig: Rig) -> System:
    command = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if not command:
        raise SystemExit("nginx is not here: apt-get install nginx-light")
    port, (engine_port, engine) = free_port(), rig.engine()
    home = rig.folder / "nginx"
    home.mkdir()
    config = home / "nginx.conf"
    config.write_text(NGINX.format(d=home, engine=engine_port, port=port))
    return System("nginx", rig.child([command, "-c", str(config)], "nginx"), chats(port), engine=engine)


SYSTEMS: dict[str, Callable[[Rig], System]] = {
    "llmgw-plain": llmgw_plain,
    "llmgw": llmgw,
    "llmgw-limited": llmgw_limited,
    "llmgw-tables": llmgw_tables,
    "llmgw-large": llmgw_large,
    "vllm-router": vllm_router,
    "nginx": nginx,
    "direct": direct,
}


def chats(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1/chat/completions"


async def until_answers(system: System, seconds: float = 120) -> None:
    payload = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    said, end = "nothing", time.monotonic() + seconds
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        while time.monotonic() < end:
            if system.process.poll() is not None:
                raise SystemExit(f"{system.name} ended with {system.process.returncode} while it started")
            with contextlib.suppress(httpx.HTTPError):
                headers = {"authorization": f"Bearer {system.callers[0][0]}"}
                answer = await http.post(system.url, json=payload, headers=headers)
                if answer.status_code == 200:
                    if system.answered is not None:
                        system.answered += 1
                    return
                said = answer.text
            await asyncio.sleep(0.2)
    raise SystemExit(f"{system.name} never answered at {system.url}: {said}")
