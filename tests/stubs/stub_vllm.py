"""A strict `vllm serve` look-alike (0.33): it takes the flags that vLLM takes, requires what vLLM requires, opens its
port when it is ready and not before, and answers OpenAI's API, metrics and LoRA routes in vLLM's words.

Run as `stub_vllm.py serve MODEL --port N …`. What it did is appended to the file STUB_EVENTS, a JSON object a line.
STUB_LOAD_S is how long loading takes, STUB_ADAPTER_S an adapter's, STUB_TOKEN_S each token. STUB_FAIL, a comma list:
  exit     write a line and exit with status 1 before listening
  never    load for ever
  dead     answer 503 to /health once ready, as when its EngineCore died
  deaf     ignore SIGTERM
  orphans  leave a child in its process group that outlives it
Ranks of one replica (`--nnodes`) meet at the master's port: rank 0 is ready once all are there, the others end with it.
Over Ray it is ready once the cluster at RAY_ADDRESS (stub_ray.py) has the cards for it, and ends with any of its nodes.
"""

from __future__ import annotations

import argparse
import hmac
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from acting import JOIN_S, await_ranks, check_cards, check_network, fail, join, note, pause

FAILURES = set(filter(None, os.environ.get("STUB_FAIL", "").split(",")))
TOKEN_S = float(os.environ.get("STUB_TOKEN_S", "0"))
GUARDED = ("/v1", "/v2", "/inference", "/cohere")
RUNTIME = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
TOKENS = 8
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


# --- flags -----------------------------------------------------------------------------------------------------------
def read_flags(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    serve = parser.add_subparsers(dest="command", required=True).add_parser("serve", allow_abbrev=False)
    add = serve.add_argument
    add("model")
    add("--served-model-name", nargs="+")
    add("--host")
    add("--port", type=int, default=8000)
    add("--api-key", nargs="+")
    add("--middleware", action="append", default=[])
    add("--uvicorn-log-level", default="info")
    add("--tensor-parallel-size", "-tp", type=int, default=1)
    add("--pipeline-parallel-size", "-pp", type=int, default=1)
    add("--data-parallel-size", "-dp", type=int, default=1)
    add("--api-server-count", type=int)
    add("--distributed-executor-backend", choices=("mp", "ray", "uni", "external_launcher"))
    add("--nnodes", "-n", type=int, default=1)
    add("--node-rank", "-r", type=int, default=0)
    add("--master-addr", default="127.0.0.1")
    add("--master-port", type=int, default=29501)
    add("--headless", action="store_true")
    add("--max-model-len", type=int, default=4096)
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int)
    add("--gpu-memory-utilization", type=float, default=0.92)
    add("--dtype", choices=("auto", "half", "float16", "bfloat16", "float", "float32"), default="auto")
    add("--quantization", "-q")
    add("--kv-cache-dtype", default="auto")
    add("--enforce-eager", action="store_true")
    add("--trust-remote-code", action="store_true")
    add("--chat-template")
    add("--tool-call-parser")
    add("--enable-auto-tool-choice", action="store_true")
    add("--reasoning-parser")
    add("--enable-prompt-tokens-details", action="store_true")
    add("--enable-force-include-usage", action="store_true")
    add("--enable-sleep-mode", action="store_true")
    add("--shutdown-timeout", type=float, default=0)
    add("--enable-lora", action="store_true")
    add("--max-loras", type=int, default=1)
    add("--max-cpu-loras", type=int)
    add("--max-lora-rank", type=int, default=16, choices=(1, 8, 16, 32, 64, 128, 256, 320, 512))
    add("--lora-modules", nargs="+", default=[])
    return parser.parse_args(argv)


def check(flags: argparse.Namespace) -> None:
    """What vLLM refuses before it loads anything."""
    world = flags.tensor_parallel_size * flags.pipeline_parallel_size * flags.data_parallel_size
    if flags.model.startswith(("/", ".")) and not Path(flags.model).exists():
        fail(f"OSError: {flags.model} does not exist")
    if world % flags.nnodes:
        fail(f"ValueError: world size {world} must be divisible by nnodes {flags.nnodes}")
    if not 0 <= flags.node_rank < flags.nnodes:
        fail(f"ValueError: node_rank {flags.node_rank} must be in [0, {flags.nnodes})")
    if flags.nnodes > 1 and flags.distributed_executor_backend == "ray":
        fail("ValueError: nnodes > 1 is only supported with the mp, uni and external_launcher backends")
    if flags.node_rank and not flags.headless:
        fail("ValueError: only node rank 0 serves HTTP; start the others with --headless")
    if flags.headless and (flags.api_server_count or 0) > 0:
        fail("ValueError: api_server_count must not be above 0 in headless mode")
    if flags.max_cpu_loras is not None and flags.max_cpu_loras < flags.max_loras:
        fail("ValueError: max_cpu_loras must be at least max_loras")
    if flags.lora_modules and not flags.enable_lora:
        fail("ValueError: --lora-modules needs --enable-lora")
    if RUNTIME and (flags.api_server_count or flags.data_parallel_size) > 1:
        fail("ValueError: VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with api_server_count > 1")
    if "://" in os.environ.get("VLLM_PORT", ""):
        fail(f"ValueError: VLLM_PORT '{os.environ['VLLM_PORT']}' appears to be a URI")
    check_network()


# --- ranks of one replica --------------------------------------------------------------------------------------------
def meet(flags: argparse.Namespace) -> None:
    """Rank 0 returns once every other rank is there; another one ends when rank 0 does."""
    if flags.distributed_executor_backend == "ray":
        return _over_ray(flags.tensor_parallel_size * flags.pipeline_parallel_size)
    check_cards(flags.tensor_parallel_size * flags.pipeline_parallel_size // flags.nnodes)
    place = (flags.master_addr, flags.master_port)
    if flags.node_rank:
        join(place, flags.node_rank)
        fail("RuntimeError: rank 0 is gone")
    if flags.nnodes > 1:
        await_ranks(place, flags.nnodes - 1, lambda: fail("RuntimeError: a worker rank is gone"))
    return None


def _over_ray(cards: int) -> None:
    host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    try:
        link = socket.create_connection((host, int(port)), timeout=JOIN_S)
        link.sendall(json.dumps({"cards": cards}).encode() + b"\n")
        told = link.makefile("rb")
        if not told.readline():
            fail("RuntimeError: the Ray cluster is gone")
    except (OSError, ValueError) as error:
        fail(f"ConnectionError: Could not find any running Ray instance at {host}:{port}: {error}")
    link.settimeout(None)
    note("joined", cards=cards)

    def watch() -> None:
        told.readline()
        fail("RayActorError: The actor died unexpectedly before finishing this task.")

    threading.Thread(target=watch, daemon=True).start()


# --- the engine ------------------------------------------------------------------------------------------------------
class Refused(Exception):
    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class Engine:
    """What is served, and how much of it goes on."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.names: list[str] = flags.served_model_name or [flags.model]
        self.adapters: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.changed = threading.Condition()
        self.waiting: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.loading: set[str] = set()
        for module in flags.lora_modules:
            name, _, path = module.partition("=")
            told = json.loads(module) if module.startswith("{") else {"name": name, "path": path}
            self.load(told["name"], told["path"])

    def load(self, name: str, path: str) -> None:
        if not name or not path:
            raise Refused(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        with self.changed:
            if name in self.adapters or name in self.loading:
                text = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place,"
                raise Refused(400, f"{text} set 'load_inplace' to True.", "InvalidUserInput")
            self.loading.add(name)
        try:
            pause(float(os.environ.get("STUB_ADAPTER_S", "0")))
            self._read(name, Path(path))
        finally:
            self.loading.discard(name)
        self.adapters[name] = path
        note("load", name=name, path=path, held=sorted(self.adapters))

    def _read(self, name: str, path: Path) -> None:
        """What vLLM takes: PEFT's directory."""
        if not path.is_dir():
            raise Refused(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        try:
            config = json.loads((path / "adapter_config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise Refused(500, f"Loading lora {name} failed: {error}", "InternalServerError") from None
        wrong = [
            f"`{field}` is {config.get(field)!r}"
            for field, good in (("peft_type", "LORA"), ("bias", "none"), ("use_dora", False))
            if config.get(field, good) != good
        ]
        if not 0 < config.get("r", 0) <= self.flags.max_lora_rank:
            wrong.append(f"LoRA rank {config.get('r')} is greater than max_lora_rank {self.flags.max_lora_rank}")
        if not any((path / f"adapter_model.{end}").is_file() for end in ("safetensors", "bin", "pt")):
            wrong.append(f"{path} doesn't contain tensors")
        if wrong:
            raise Refused(500, f"Loading lora {name} failed: {'; '.join(wrong)}", "InternalServerError")

    def unload(self, name: str) -> None:
        if not name:
            raise Refused(400, "'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput")
        if name not in self.adapters:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self.adapters[name]
        note("unload", name=name, in_use=self.running[name], held=sorted(self.adapters))

    @contextmanager
    def work(self, name: str) -> Iterator[None]:
        """One request for a model or an adapter. No more adapters than max_loras are worked on at once."""
        if name not in self.names and name not in self.adapters:
            text = f"The model `{name}` does not exist. Valid aliases: {', '.join(self.names)}"
            raise Refused(404, text, "NotFoundError", "model")
        adapter = name if name in self.adapters else ""
        with self.changed:
            self.waiting[adapter] += 1
            self.changed.wait_for(lambda: self._fits(adapter))
            self.waiting[adapter] -= 1
            self.running[adapter] += 1
        note("begin", model=name)
        try:
            yield
        finally:
            with self.changed:
                self.running[adapter] -= 1
                self.changed.notify_all()

    def _fits(self, adapter: str) -> bool:
        others = {name for name, count in self.running.items() if name and count and name != adapter}
        room = not adapter or len(others) < self.flags.max_loras
        return room and sum(self.running.values()) < self.flags.max_num_seqs

    def models(self) -> list[dict[str, Any]]:
        shared = {"object": "model", "created": int(time.time()), "owned_by": "vllm"}
        length = {"max_model_len": self.flags.max_model_len}
        base = [{"id": name, **shared, "root": self.flags.model, "parent": None, **length} for name in self.names]
        return base + [
            {"id": name, **shared, "root": path, "parent": self.names[0]} for name, path in self.adapters.items()
        ]

    def metrics(self) -> str:
        labels = f'engine="0",model_name="{self.names[0]}"'
        names = [",".join(name for name, n in counts.items() if name and n) for counts in (self.running, self.waiting)]
        figures: dict[str, float] = {
            "num_requests_running": sum(self.running.values()),
            "num_requests_waiting": sum(self.waiting.values()),
            "kv_cache_usage_perc": min(1.0, sum(self.running.values()) / self.flags.max_num_seqs),
            **{name: self.counts[name] for name in ("prompt_tokens_total", "generation_tokens_total")},
        }
        lines = [f"vllm:{name}{{{labels}}} {float(value)}" for name, value in figures.items()]
        lines += [f'vllm:request_success_total{{{labels},finished_reason="stop"}} {float(self.counts["done"])}']
        if self.flags.enable_lora:
            held = f'max_lora="{self.flags.max_loras}",running_lora_adapters="{names[0]}"'
            lines += [f'vllm:lora_requests_info{{{held},waiting_lora_adapters="{names[1]}"}} {time.time()}']
        return "\n".join(lines) + "\n"


# --- its API ---------------------------------------------------------------------------------------------------------
class Api(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine
    keys: tuple[str, ...]

    def do_GET(self) -> None:
        if not self._allowed():
            return
        path, _, query = self.path.partition("?")
        match path:
            case "/health" | "/ping":
                self._send(503 if "dead" in FAILURES else 200, b"", "")
            case "/metrics":
                self._send(200, self.engine.metrics().encode(), METRICS_TYPE)
            case "/metrics/":
                names = parse_qs(query).get("name[]")
                lines = self.engine.metrics().splitlines(keepends=True)
                page = "".join(line for line in lines if names is None or line.partition("{")[0] in names)
                self._send(200, page.encode(), METRICS_TYPE)
            case "/version":
                self._json(200, {"version": "0.33.0"})
            case "/v1/models":
                self._json(200, {"object": "list", "data": self.engine.models()})
            case _:
                self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self._allowed():
            return None
        routes = {
            "/v1/chat/completions": self._generate,
            "/v1/completions": self._generate,
            "/v1/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
        }
        route = routes.get(self.path)
        if route is None or ("lora" in self.path and not (RUNTIME and self.engine.flags.enable_lora)):
            return self._json(404, {"detail": "Not Found"})
        try:
            if self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
                raise Refused(400, "Unsupported Media Type: Only 'application/json' is allowed", "BadRequestError")
            try:
                asked = json.loads(body)
            except ValueError as error:
                raise Refused(400, f"JSON decode error: {error}", "BadRequestError") from None
            route(asked)
        except Refused as refused:
            self._json(refused.status, refused.body)
        except (BrokenPipeError, ConnectionResetError):
            note("left")
            self.close_connection = True

    def _allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        token = given[7:] if given[:7].lower() == "bearer " else ""
        if not self.keys or not self.path.startswith(GUARDED):
            return True
        if any(hmac.compare_digest(token, key) for key in self.keys):
            return True
        self._json(401, {"error": "Unauthorized"})
        return False

    def _load(self, asked: dict[str, Any]) -> None:
        name = asked.get("lora_name", "")
        self.engine.load(name, asked.get("lora_path", ""))
        self._send(200, f"Success: LoRA adapter '{name}' added successfully.".encode(), "text/plain; charset=utf-8")

    def _unload(self, asked: dict[str, Any]) -> None:
        name = asked.get("lora_name", "")
        self.engine.unload(name)
        self._send(200, f"Success: LoRA adapter '{name}' removed successfully.".encode(), "text/plain; charset=utf-8")

    def _generate(self, asked: dict[str, Any]) -> None:
        chat = self.path == "/v1/chat/completions"
        needed = "messages" if chat else "prompt"
        if needed not in asked:
            raise Refused(400, f"[{{'type': 'missing', 'loc': ('body', '{needed}')}}]", "BadRequestError", needed)
        name = asked.get("model") or self.engine.names[0]
        count = asked.get("max_completion_tokens") or asked.get("max_tokens") or TOKENS
        prompt = max(1, len(json.dumps(asked[needed]).split()))
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}
        usage |= {"prompt_tokens_details": {"cached_tokens": 0} if self._details() else None}
        options = asked.get("stream_options") or {}
        if options and not asked.get("stream"):
            raise Refused(400, "Stream options can only be defined when `stream=True`.", "BadRequestError")
        with self.engine.work(name):
            kind = "chat.completion" if chat else "text_completion"
            shared = {"id": f"chatcmpl-{os.urandom(8).hex()}", "created": int(time.time()), "model": name}
            words = [f"{name} " if number == 0 else "word " for number in range(count)]
            if asked.get("stream"):
                told = usage if options.get("include_usage") or self.engine.flags.enable_force_include_usage else None
                self._stream({**shared, "object": f"{kind}.chunk" if chat else kind}, words, chat, told)
            else:
                pause(TOKEN_S * count)
                text = "".join(words)
                said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
                choice = {"index": 0, **said, "logprobs": None, "finish_reason": "stop"}
                self._json(200, {**shared, "object": kind, "choices": [choice], "usage": usage})
        self.engine.counts.update(prompt_tokens_total=prompt, generation_tokens_total=count, done=1)

    def _details(self) -> bool:
        return bool(self.engine.flags.enable_prompt_tokens_details)

    def _stream(self, shared: dict[str, Any], words: list[str], chat: bool, usage: dict[str, Any] | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if chat:
            self._event({**shared, "choices": [_choice({"role": "assistant", "content": ""}, chat)]})
        for number, word in enumerate(words, start=1):
            pause(TOKEN_S)
            end = "stop" if number == len(words) else None
            self._event({**shared, "choices": [_choice({"content": word}, chat, end)]})
        if usage:
            self._event({**shared, "choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, status: int, value: object) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _choice(delta: dict[str, Any], chat: bool, end: str | None = None) -> dict[str, Any]:
    said = {"delta": delta} if chat else {"text": delta.get("content", "")}
    return {"index": 0, **said, "logprobs": None, "finish_reason": end}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2048

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left."""


def main(argv: list[str]) -> None:
    flags = read_flags(argv)
    check(flags)
    note("start", argv=argv, host_ip=os.environ.get("VLLM_HOST_IP"))
    print("INFO vLLM API server version 0.33.0", flush=True)
    ending: list[int] = []

    def end(number: int, _: Any) -> None:
        if "deaf" not in FAILURES:
            ending.append(number)
            threading.Thread(target=lambda: os._exit(0) if not server else server[0].shutdown(), daemon=True).start()

    server: list[Server] = []
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    if "orphans" in FAILURES:
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", "VLLM::EngineCore"])
    if "exit" in FAILURES:
        fail("RuntimeError: Engine core initialization failed. See root cause above.")
    meet(flags)
    pause(float(os.environ.get("STUB_LOAD_S", "0")))
    while "never" in FAILURES:
        pause(1)
    try:
        Api.engine = Engine(flags)
    except Refused as refused:
        fail(f"ValueError: {refused}")
    Api.keys = tuple(flags.api_key or filter(None, [os.environ.get("VLLM_API_KEY")]))
    try:
        server.append(Server((flags.host or "0.0.0.0", flags.port), Api))
    except OSError as error:
        fail(f"OSError: [Errno {error.errno}] error while attempting to bind on address: {error.strerror}")
    note("ready", rank=0)
    print("INFO:     Application startup complete.", flush=True)
    server[0].serve_forever(poll_interval=0.05)
    limit = time.monotonic() + flags.shutdown_timeout  # 0: what runs is cut
    while sum(Api.engine.running.values()) and time.monotonic() < limit:
        pause(0.05)
    note("end", running=sum(Api.engine.running.values()))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
