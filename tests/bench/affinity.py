"""What following prompts' prefixes is worth: prefix_affinity beside least_load, in front of real llama.cpp engines.

Groups of requests share long beginnings, as one assistant's users do, and come in random order from a few clients.
Each engine has room in memory for a part of the beginnings only. Both models are the same engines under two names;
rounds are interleaved, every round with beginnings that nobody saw before. LLMGW_BENCH_ROUNDS narrows a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from agent.engines.base import Launch
from agent.engines.llamacpp import LlamaCpp
from agent.host import Host
from agent.installer import Installer
from agent.protocol import ShardSpec
from agent.weights import Weights
from catalog.defaults import SMOLLM2_SOURCE
from tests.bench.rig import ROOT, child, free_port

ROUNDS = int(os.environ.get("LLMGW_BENCH_ROUNDS", "3"))
PROFILES = ("least_load", "prefix_affinity")
ENGINES, SLOTS, CLIENTS = 3, 2, 2
GROUPS, QUESTIONS = 5, 5
PREFIX_WORDS, QUESTION_WORDS, ANSWER_TOKENS = 400, 12, 4
CONTEXT_PER_SLOT, CACHE_MIB = 1024, 16
START_S = 300.0
WORDS = (
    "river", "garden", "window", "market", "story", "engine", "yellow", "winter", "doctor", "letter", "kitchen",
    "teacher", "camera", "island", "forest", "silver", "dinner", "planet", "summer", "village", "music", "paper",
)  # fmt: skip

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
profiles, slots, *ports = sys.argv[1:]
owner = make_operator(username="bench", password="bench", actor=SYSTEM)
project = make_default_tree(owner=owner, actor=SYSTEM)
_, secret = make_key(project=project, name="bench", actor=SYSTEM)
node = Node.objects.create(name="bench", state=NodeState.READY, address="127.0.0.1")
print(secret)
for profile in profiles.split(","):
    Model.objects.create(name=profile, routing_profile=profile)
for index, port in enumerate(ports):
    keys = []
    for profile in profiles.split(","):
        name = f"{profile}-{index}"
        replica = Replica.objects.create(
            name=name, model=profile, profile="cpu", engine="llamacpp", weight=int(slots), state="ready"
        )
        Shard.objects.create(replica=replica, node=node, state="ready", port=int(port))
        keys.append(engine_key(Secret.named(SECRET_NAME), name))
    print(",".join(keys))
"""


@dataclass
class Seen:
    """What one model's requests of all rounds were answered with."""

    first_token_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


def workload(dice: random.Random) -> list[tuple[str, str]]:
    """(system prompt, question) pairs in random order."""
    beginnings = [text(dice, PREFIX_WORDS) for _ in range(GROUPS)]
    asked = [(beginning, text(dice, QUESTION_WORDS)) for beginning in beginnings for _ in range(QUESTIONS)]
    dice.shuffle(asked)
    return asked


async def ask(http: httpx.AsyncClient, model: str, system: str, question: str, seen: Seen) -> None:
    body = {
        "model": model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, usage = time.perf_counter(), None, None
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{model}: {answer.status_code} {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if first is None and event.get("choices") and event["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - began
            usage = event.get("usage") or usage
    if first is None or usage is None:
        raise SystemExit(f"{model}: an answer without a token or without usage; its figures would mean nothing")
    seen.first_token_ms.append(first * 1e3)
    seen.prompt_tokens += usage["prompt_tokens"]
    seen.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]


async def round_of(http: httpx.AsyncClient, model: str, dice: random.Random, seen: Seen) -> None:
    left = workload(dice)

    async def client() -> None:
        while left:
            await ask(http, model, *left.pop(), seen)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    seen.seconds += time.perf_counter() - began


async def prepare(folder: Path) -> tuple[Host, Launch]:
    """llama.cpp and the default model, as an agent gets them."""
    host = Host("127.0.0.1", platform.machine(), cores=os.cpu_count(), llamacpp_threads=1)
    build = await Installer(folder / "builds").ensure("llamacpp", host)
    weights = await Weights(folder / "models").ensure(SMOLLM2_SOURCE, lambda progress: None)
    return host, Launch(build=build, weights=str(weights), port=0)


def engine(
    folder: Path, host: Host, prepared: Launch, port: int, keys: str
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    shard = ShardSpec(
        replica="bench",
        model="smollm2",
        profile="cpu",
        profile_digest="",
        engine="llamacpp",
        source=SMOLLM2_SOURCE,
        slots=SLOTS,
        args=("--ctx-size", str(SLOTS * CONTEXT_PER_SLOT), "--cache-ram", str(CACHE_MIB)),
    )
    launch = Launch(build=prepared.build, weights=prepared.weights, port=port, key=keys)
    (command,) = LlamaCpp().commands(shard, host, launch)
    return child(list(command.argv), folder / f"engine-{port}.log", **dict((*command.env, *command.secrets)))


async def until_ready(urls: list[str]) -> None:
    end = time.monotonic() + START_S
    async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
        for url in urls:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(url)).status_code == 200:
                        break
                if time.monotonic() > end:
                    raise SystemExit(f"{url} never answered 200")
                await asyncio.sleep(0.2)


async def measure(url: str, key: str) -> dict[str, Seen]:
    seen = {profile: Seen() for profile in PROFILES}
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=300) as http:
        for number in range(ROUNDS):
            for profile in PROFILES:
                await round_of(http, profile, random.Random(f"{profile} {number}"), seen[profile])
    return seen


def main() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmgw-bench-")))
        host, prepared = asyncio.run(prepare(folder))
        ports, port = [free_port() for _ in range(ENGINES)], free_port()
        env = {"LLMGW_DATA_DIR": str(folder / "data"), "LLMGW_ROLES": "gateway", "LLMGW_LISTEN__PORT": str(port)}
        seeded = subprocess.run(
            [sys.executable, "-c", SEED, ",".join(PROFILES), str(SLOTS), *map(str, ports)],
            env={**os.environ, **env},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        key, *engine_keys = seeded.stdout.split()
        for engine_port, keys in zip(ports, engine_keys, strict=True):
            stack.enter_context(engine(folder, host, prepared, engine_port, keys))
        asyncio.run(until_ready([f"http://127.0.0.1:{engine_port}/health" for engine_port in ports]))
        command = [sys.executable, "-m", "uvicorn", "llmgw.asgi:application", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--loop", "uvloop", "--http", "routing.edge:GatewayProtocol"]
        command += ["--no-access-log", "--log-level", "warning"]
        stack.enter_context(child(command, folder / "llmgw.log", **env))
        url = f"http://127.0.0.1:{port}"
        asyncio.run(until_ready([f"{url}/ready"]))
        seen = asyncio.run(measure(url, key))
    for profile, each in seen.items():
        figures = {
            "requests": len(each.first_token_ms),
            "prompt_tokens": each.prompt_tokens,
            "cached_tokens": each.cached_tokens,
            "cached_percent": round(100 * each.cached_tokens / each.prompt_tokens, 1),
            "first_token_ms": round(statistics.median(each.first_token_ms), 1),
            "first_token_mean_ms": round(statistics.fmean(each.first_token_ms), 1),
            "seconds": round(each.seconds, 1),
        }
        print(json.dumps({"bench": "affinity", "name": profile, **figures}), flush=True)


if __name__ == "__main__":
    main()
