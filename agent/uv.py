"""The edge to uv: put one pinned wheel into a directory, without its dependencies, checked against its hash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import uv

LIMIT_S = 1800.0
SYSTEM_CERTIFICATES = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))


class UvError(Exception):
    """`str()` is the whole sentence: what did not work and what to do."""


async def install_wheel(requirement: str, target: Path, *, what: str, limit_s: float = LIMIT_S) -> None:
    """Install `requirement`, a line with hashes, into `target`. Raises UvError."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    pins = target / "requirements.txt"
    pins.write_text(requirement + "\n")
    argv = [_uv(), "pip", "install", "--quiet", "--target", str(target), "--no-deps"]
    argv += ["--only-binary", ":all:", "--require-hashes", "--python", sys.executable, "-r", str(pins)]
    try:
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            cwd=target,  # so that no project in the agent's own directory lends its settings
            env=environment(dict(os.environ)),
        )
    except OSError as error:
        raise UvError(f"{what}: uv cannot be started ({error.strerror}). Reinstall llmgw, which brings it.") from None
    try:
        async with asyncio.timeout(limit_s):
            _, errors = await child.communicate()
    except TimeoutError:
        raise UvError(f"{what}: uv did not finish within {limit_s:.0f} s. Look at the network and try again.") from None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    if child.returncode:
        raise UvError(explain(what, errors.decode(errors="replace")))


def environment(given: dict[str, str], stores: tuple[Path, ...] = SYSTEM_CERTIFICATES) -> dict[str, str]:
    """What uv is started with: it trusts what the machine trusts, as a private network's own authority is only there.

    A bare machine has no such store; uv's own list serves there.
    """
    if any(store.exists() for store in stores):
        return {"UV_SYSTEM_CERTS": "true", **given}
    return given


def explain(what: str, errors: str) -> str:
    """uv's own words as one sentence with the next step."""
    lower = errors.lower()
    if "hash mismatch" in lower:
        return (
            f"{what}: the package index gave a file that does not have the pinned hash. Do not use it; check the index."
        )
    if "no space left" in lower or "os error 28" in lower:
        return f"{what}: the disk is full. Free space, or move work_dir to a larger disk."
    if "invalid peer certificate" in lower:
        return (
            f"{what}: the package index shows a certificate that this machine does not trust. "
            "Add its authority to the system's certificates, or name it in SSL_CERT_FILE."
        )
    if any(words in lower for words in ("dns error", "error sending request", "connect error", "timed out", "network")):
        return (
            f"{what}: the package index cannot be reached. "
            "Give this node a way there, or name a mirror in UV_DEFAULT_INDEX."
        )
    if "not found in the" in lower or "no solution found" in lower or "no version of" in lower:
        return f"{what}: the package index does not have it for this machine. Name one that has it in UV_DEFAULT_INDEX."
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"{what}: uv failed: {' '.join(lines)[:500] or 'without a word'}"


def _uv() -> str:
    try:
        return uv.find_uv_bin()
    except FileNotFoundError:
        return "uv"
