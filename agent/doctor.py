"""Whether this machine can be a node, and what to fix when it cannot (AG-3)."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agent import builds, files, join_token
from agent.config import AgentSettings
from agent.discovery.machine import Machine
from agent.engines import ENGINES
from agent.host import Host

ROOM_BYTES = 1_000_000_000
REACH_S = 3.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `text` says what was found or what to do."""

    subject: str
    ok: bool
    text: str


def check(settings: AgentSettings) -> tuple[Finding, ...]:
    machine = Machine(work_dir=settings.work_dir)
    host = Host(settings.address or "127.0.0.1", machine.architecture(), machine.cpu().cores, machine.memory_bytes())
    return (
        _python(),
        _work_dir(settings.work_dir),
        *(_engine(name, host, settings) for name in ENGINES),
        *(_control_plane(address) for address in settings.control_plane),
        *((_token(settings.token_file, settings.node),) if settings.token_file else ()),
    )


def text(findings: tuple[Finding, ...]) -> str:
    return "\n".join(f"{'ok ' if one.ok else 'FIX'}  {one.subject:<14} {one.text}" for one in findings)


def _python() -> Finding:
    return Finding("python", True, ".".join(map(str, sys.version_info[:3])))


def _work_dir(path: Path) -> Finding:
    place = next((one for one in (path, *path.parents) if one.exists()), Path("/"))
    if not os.access(place, os.W_OK):
        return Finding("work_dir", False, f"{path} is not writable for this user. Change its owner, or work_dir.")
    free = files.free_bytes(path)
    if free is not None and free < ROOM_BYTES:
        return Finding(
            "work_dir", False, f"{path} has {free / 1e9:.1f} GB free; free at least {ROOM_BYTES / 1e9:.0f} GB."
        )
    return Finding("work_dir", True, f"{path}, {'-' if free is None else f'{free / 1e9:.0f} GB'} free")


def _engine(name: str, host: Host, settings: AgentSettings) -> Finding:
    if name == "llamacpp" and (binary := settings.llamacpp.binary):
        if binary.is_file() and os.access(binary, os.X_OK):
            return Finding(name, True, f"{binary}, named in agent.yaml")
        return Finding(name, False, f"llamacpp.binary: {binary} cannot be run. Correct agent.yaml, or leave it out.")
    reasons = []
    for build in builds.for_engine(name):
        objection = builds.objection(build, host)
        if objection is None:
            return Finding(name, True, f"{build.name} {build.version} can be installed here")
        reasons.append(objection)
    return Finding(name, False, " ".join(reasons))


def _control_plane(address: str) -> Finding:
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=REACH_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        return Finding(
            "control plane", False, f"{address} cannot be reached: {why}. Start it, or correct control_plane."
        )
    return Finding("control plane", True, f"{address} answers")


def _token(path: Path, node: str) -> Finding:
    try:
        _, warning = join_token.read(path, node=node)
    except join_token.TokenError as error:
        return Finding("token_file", False, f"{error}.")
    return Finding("token_file", not warning, warning or str(path))
