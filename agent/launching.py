"""What stands around the start of an engine: its environment, its weights, its port, and whom it waits for (AG-12)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from agent import files, validate
from agent.engines.base import Command

# What engines get of the agent's environment: no secret, and nothing that llama-server would take for a flag.
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
INHERITED_PREFIXES = ("CUDA_", "NVIDIA_", "GGML_", "OMP_")


class NotStarted(Exception):
    """`str()` is the reason."""


def environment(command: Command, marks: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    return inherited | dict(command.env) | dict(command.secrets) | dict(marks)


def look_at_weights(engine: str, path: Path) -> str | None:
    """Why the weights at `path` cannot be served; None when they look well."""
    try:
        head = _head(path)
    except OSError as error:
        return files.sentence(error, f"source: {path} cannot be read")
    return validate.weights_refusal(engine, str(path), is_file=path.is_file(), head=head)


def look_at_adapter(engine: str, name: str, path: Path) -> str | None:
    """Why the adapter at `path` cannot be attached; None when it looks well."""
    try:
        head = _head(path)
    except OSError as error:
        return files.sentence(error, f"adapter {name}: {path} cannot be read")
    return validate.adapter_refusal(engine, name, str(path), is_file=path.is_file(), head=head)


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
