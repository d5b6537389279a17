"""A strict `python -m sglang.launch_server` look-alike (0.5.23), run as `stub_sglang.py -m sglang.launch_server …`.

Rank 0 serves once all ranks have joined at --dist-init-addr; told to end, it tells the others. They have a health of
their own that is always well, do not hear SIGTERM, and end when rank 0 tells them to or their own process is killed.
"""

from __future__ import annotations

import argparse
import hmac
import http.server
import json
import os
import signal
import sys
import threading
from pathlib import Path

import yaml
from acting import await_ranks, check_cards, check_network, fail, join, note

OPEN = ("/health", "/ready", "/metrics")
BYE = b"shutdown"


def read_flags(argv: list[str]) -> argparse.Namespace:
    """As there, flags may be cut short while they stay clear: --pp is not."""
    parser = argparse.ArgumentParser(prog="launch_server")
    add = parser.add_argument
    add("--model-path", "--model", required=True)
    add("--served-model-name")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--tp-size", "--tensor-parallel-size", type=int, default=1)
    add("--pp-size", "--pipeline-parallel-size", type=int, default=1)
    add("--pp-max-micro-batch-size", type=int)
    add("--pp-async-batch-depth", type=int)
    add("--dp-size", "--data-parallel-size", type=int, default=1)
    add("--nnodes", type=int, default=1)
    add("--node-rank", type=int, default=0)
    add("--dist-init-addr")
    add("--base-gpu-id", type=int, default=0)
    add("--api-key")
    add("--admin-api-key")
    add("--enable-metrics", action="store_true")
    add("--context-length", type=int)
    add("--mem-fraction-static", type=float)
    add("--enable-lora", action="store_true")
    add("--lora-paths", nargs="*")
    add("--max-loras-per-batch", type=int, default=8)
    add("--max-loaded-loras", type=int)
    add("--max-lora-rank", type=int)
    add("--lora-target-modules", nargs="*")
    return parser.parse_args(_merged(argv))


def _merged(argv: list[str]) -> list[str]:
    """What a file says, before what the command line says."""
    if "--config" not in argv:
        return argv
    at = argv.index("--config")
    path = Path(argv[at + 1])
    if "--config" in argv[at + 1 :] or path.suffix not in (".yaml", ".yml"):
        fail("ValueError: one config file, in YAML format, is expected")
    if path.stat().st_mode & 0o077:
        fail(f"stub: {path} can be read by others")
    told = yaml.safe_load(path.read_text())
    return [part for name, value in told.items() for part in (f"--{name}", str(value))] + argv[:at] + argv[at + 2 :]


def check(flags: argparse.Namespace) -> None:
    world = flags.tp_size * flags.pp_size
    if world % flags.nnodes:
        fail("AssertionError: tp_size must be divisible by number of nodes")
    if flags.dp_size > 1 and flags.nnodes > 1:
        fail("AssertionError: multi-node data parallel is not supported unless dp attention!")
    if not 0 <= flags.node_rank < flags.nnodes or flags.base_gpu_id < 0:
        fail("AssertionError: node_rank or base_gpu_id is out of range")
    if flags.nnodes > 1 and not flags.dist_init_addr:
        fail("AssertionError: --dist-init-addr is needed for more than one node")
    if flags.enable_lora and not flags.lora_paths and not (flags.max_lora_rank and flags.lora_target_modules):
        fail("AssertionError: --max-lora-rank and --lora-target-modules are needed where there are no --lora-paths")
    if flags.model_path.startswith("/") and not Path(flags.model_path).exists():
        fail(f"OSError: {flags.model_path} does not exist")
    check_cards(world // flags.nnodes)
    check_network()


class Api(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    flags: argparse.Namespace
    ending = False

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(OPEN):
            return self._answer(503 if self.ending and path != "/metrics" else 200, b"")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.flags.api_key and not hmac.compare_digest(token, self.flags.api_key):
            return self._answer(401, b'{"error":"Unauthorized"}')
        if self.flags.node_rank or path != "/v1/models":
            return self._answer(404, b'{"detail":"Not Found"}')
        name = self.flags.served_model_name or self.flags.model_path
        listed = {"object": "list", "data": [{"id": name, "object": "model", "root": name}]}
        return self._answer(200, json.dumps(listed).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True


def serve(flags: argparse.Namespace) -> Server:
    try:
        server = Server((flags.host, flags.port), Api)
    except OSError as error:
        fail(f"[Errno {error.errno}] error while attempting to bind on address ('{flags.host}', {flags.port})")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main(argv: list[str]) -> None:
    if argv[:2] != ["-m", "sglang.launch_server"]:
        fail(f"stub: run as -m sglang.launch_server, not {argv[:2]}", status=2)
    flags = Api.flags = read_flags(argv[2:])
    check(flags)
    note("start", program="sglang", argv=argv, host_ip=os.environ.get("SGLANG_HOST_IP"))
    print(f"launch_server: rank {flags.node_rank} of {flags.nnodes}", flush=True)
    host, _, port = (flags.dist_init_addr or ":0").rpartition(":")
    place = (host.removeprefix("[").removesuffix("]"), int(port))
    if flags.node_rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        serve(flags)
        while join(place, flags.node_rank) != BYE:
            threading.Event().wait()  # without rank 0 it hangs
        note("end", rank=flags.node_rank)
        os._exit(0)
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    links = []
    if flags.nnodes > 1:
        links = await_ranks(place, flags.nnodes - 1, lambda: Api.ending or fail("RuntimeError: a scheduler died"))
    serve(flags)
    note("ready", rank=0)
    told_to_end.wait()
    Api.ending = True
    note("end", rank=0)
    for link in links:
        link.sendall(BYE)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
