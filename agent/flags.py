"""Arguments that a profile must not give an engine, as llmgw says them itself: for catalog and node alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Where it listens, how, and with which key: gateways and probes know nothing of another one.
_EVERYWHERE = {
    "--model": "source", "--model-path": "source", "--served-model-name": "name", "--alias": "name",
    "--host": "", "--port": "", "--api-key": "", "--api-key-file": "",
}  # fmt: skip
_RANKS = {
    "--tensor-parallel-size": "tp", "--pipeline-parallel-size": "pp", "--data-parallel-size": "scaling",
    "--nnodes": "nodes", "--node-rank": "", "--config": "args", "--enable-lora": "adapters",
}  # fmt: skip
OWN: Mapping[str, Mapping[str, str]] = {
    "llamacpp": {
        **_EVERYWHERE, "-m": "source", "-a": "name",
        "--ssl-key-file": "", "--ssl-cert-file": "", "--api-prefix": "", "--log-file": "", "--path": "",
    },
    "vllm": {
        **_EVERYWHERE, **_RANKS,
        "-tp": "tp", "-pp": "pp", "-dp": "scaling", "-n": "nodes", "-r": "", "--headless": "",
        "--master-addr": "", "--master-port": "", "--shutdown-timeout": "",
        "--uds": "", "--root-path": "", "--ssl-keyfile": "", "--ssl-certfile": "",
        "--distributed-executor-backend": "launch_mode", "--lora-modules": "adapters",
    },
    "sglang": {
        **_EVERYWHERE, **_RANKS,
        "--tp-size": "tp", "--tp": "tp", "--pp-size": "pp", "--pp": "pp", "--dp-size": "scaling", "--dp": "scaling",
        "--dist-init-addr": "", "--nccl-init-addr": "", "--base-gpu-id": "", "--lora-paths": "adapters",
        "--fastapi-root-path": "", "--ssl-keyfile": "", "--ssl-certfile": "",
    },
}  # fmt: skip
"""By engine and flag, the field of the catalog that says it; empty where nobody has to."""
ABBREVIATED = ("vllm", "sglang")
"""Engines that take the beginning of a long flag for the whole."""
SHORTEST = len("--xx")
CACHE_RAM = ("--cache-ram", "-cram")
"""llama.cpp's cache of prompts, which does not tell adapters apart."""


def objection(engine: str, arg: str) -> str | None:
    """Why a profile of `engine` cannot have this argument, as a whole sentence; None when it can."""
    own = OWN.get(engine, _EVERYWHERE)
    written = arg.partition("=")[0]
    flag = written.replace("_", "-") if written.startswith("--") else written
    meant = flag if flag in own else _meant(engine, flag, own)
    if meant is None:
        return None
    short = "" if flag == meant else f", short for {meant},"
    instead = f"; write {own[meant]} instead" if own[meant] else "; leave it out"
    return f"{flag}{short} is set by llmgw itself{instead}."


def _meant(engine: str, flag: str, own: Iterable[str]) -> str | None:
    if engine not in ABBREVIATED or not flag.startswith("--") or len(flag) < SHORTEST:
        return None
    return next((name for name in sorted(own) if name.startswith(flag)), None)


def cache_objection(engine: str, args: Iterable[str]) -> str | None:
    """Why a model with adapters cannot have these arguments."""
    if engine == "llamacpp" and any(arg.partition("=")[0] in CACHE_RAM for arg in args):
        return "Leave --cache-ram out. llama.cpp's prompt cache does not tell adapters apart, so it stays off."
    return None
