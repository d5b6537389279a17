"""What stands around the start of an engine: its environment, its weights, its port, and whom it waits for (AG-12)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent import files, lora_files, validate
from agent.engines.base import Command
from agent.protocol import Gpu

# What engines get of the agent's environment: no secret, and nothing that llama-server would take for a flag.
INHERITED = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
)
INHERITED_PREFIXES = ("CUDA_", "NVIDIA_", "GGML_", "OMP_")


class NotStarted(Exception):
    """`str()` is the reason."""


def environment(command: Command, marks: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    folder = os.path.dirname(command.argv[0])
    if folder:  # what an environment brings besides its program, such as ninja
        inherited["PATH"] = f"{folder}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    return inherited | dict(command.env) | dict(command.secrets) | dict(marks)


def look_at_weights(engine: str, path: Path, cards: tuple[Gpu, ...] = ()) -> str | None:
    """Why the weights at `path` cannot be served on `cards`; None when they look well."""
    try:
        head, config = _head(path), _config(path)
    except OSError as error:
        return files.sentence(error, f"source: {path} cannot be read")
    return validate.weights_refusal(engine, str(path), is_file=path.is_file(), head=head, config=config, cards=cards)


def look_at_adapter(engine: str, name: str, path: Path, weights: Path) -> str | None:
    """Why the adapter at `path` cannot be attached to the model at `weights`; None when it looks well."""
    try:
        head = _head(path)
    except OSError as error:
        return files.sentence(error, f"adapter {name}: {path} cannot be read")
    refusal = validate.adapter_refusal(engine, name, str(path), is_file=path.is_file(), head=head)
    if refusal:
        return refusal
    look = lora_files.gguf_refusal if engine == "llamacpp" else lora_files.peft_refusal
    try:
        objection = look(path, weights)
    except lora_files.Unread as error:
        return f"adapter {name}: {path} cannot be read: {error}."
    return objection and f"adapter {name}: {objection}"


def adapter_rank(paths: Iterable[Path]) -> int | None:
    """The highest rank among PEFT adapters, as far as their directories are here and say one."""
    ranks: list[int] = []
    for path in paths:
        try:
            found = lora_files.read_peft(path)
        except lora_files.Unread:
            continue
        ranks += [] if isinstance(found, str) else found.ranks
    return max(ranks, default=None)


def _config(path: Path) -> object:
    """What a model's config.json says; None where there is none, or none that can be read as one."""
    try:
        return files.read_json(path / "config.json", files.MAX_CONFIG_BYTES)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _head(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(4)


async def wait_for_listener(host: str, port: int, *, limit_s: float) -> None:
    """Return once somebody listens. Raises NotStarted when nobody does in time."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, port)
                except OSError:
                    await asyncio.sleep(0.25)
                else:
                    writer.close()
                    return
    except TimeoutError:
        raise NotStarted(f"nothing listened on {host}:{port} within {limit_s:g} s") from None


def is_free(address: str, port: int) -> bool:
    """Whether an engine could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((address, port))
        except OSError:
            return False
    return True
