"""Whether this machine can be a node, and what to fix when it cannot (AG-3)."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agent import builds, files, join_token, process
from agent.config import AgentSettings
from agent.discovery.machine import Machine
from agent.engines import ENGINES
from agent.hardware import Found, Hardware
from agent.host import Host
from agent.protocol import Fabric

ROOM_BYTES = 1_000_000_000
REACH_S = 3.0
LOOK_S = 60.0
"""How long cards and adapters may take to answer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `text` says what was found or what to do."""

    subject: str
    ok: bool
    text: str


def check(settings: AgentSettings, hardware: Hardware | None = None) -> tuple[Finding, ...]:
    """`hardware`: another than this machine's."""
    machine = Machine(work_dir=settings.work_dir)
    hardware = hardware or Hardware.of_this_machine(settings.fabrics)
    hardware.wait(LOOK_S)
    # An agent may run here already: which processes are not its engines cannot be told from outside.
    found = hardware.look(given=frozenset(), ours=process.table)
    host = Host(
        address=settings.address or "127.0.0.1",
        architecture=machine.architecture(),
        cores=machine.cpu().cores,
        memory_bytes=machine.memory_bytes(),
        gpus=len(found.gpus),
    )
    return (
        _python(),
        _work_dir(settings.work_dir),
        *_gpus(found),
        *map(_fabric, found.fabrics),
        *_undeclared(found),
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


def _gpus(found: Found) -> Iterator[Finding]:
    if found.gpus_fault:
        yield Finding("gpus", False, f"{found.gpus_fault}.")
    faulty = [gpu for gpu in found.gpus if not gpu.healthy]
    for gpu in faulty:
        yield Finding("gpus", False, f"Card {gpu.index} ({gpu.name}, {gpu.pci or gpu.uuid}): {gpu.fault}.")
    if faulty or found.gpus_fault:
        return
    classes = Counter(gpu.gpu_class for gpu in found.gpus)
    there = ", ".join(f"{count} {name}" for name, count in sorted(classes.items()))
    yield Finding("gpus", True, f"{there}, driver {found.driver or '-'}, CUDA {found.cuda or '-'}" if there else "none")


def _fabric(fabric: Fabric) -> Finding:
    subject = f"fabric {fabric.name}"
    if not fabric.up:
        return Finding(subject, False, f"{fabric.reason}. Mend that, or correct fabrics in agent.yaml.")
    rate = "-" if fabric.rate_gbit_s is None else f"{fabric.rate_gbit_s:g}"
    return Finding(subject, True, f"{', '.join(fabric.adapters)}: {fabric.link_layer}, {rate} Gbit/s")


def _undeclared(found: Found) -> Iterator[Finding]:
    """No fault: a node that shares no replica with others needs no fabric."""
    declared = {name for fabric in found.fabrics for name in fabric.adapters}
    active = [
        adapter.name
        for adapter in found.adapters
        if adapter.name not in declared and any(port.state == "ACTIVE" for port in adapter.ports)
    ]
    if active:
        names = ", ".join(active)
        yield Finding("adapters", True, f"{names}: in no fabric; name them under fabrics to let replicas span nodes")


def _engine(name: str, host: Host, settings: AgentSettings) -> Finding:
    if binary := settings.programs.get(name):
        if binary.is_file() and os.access(binary, os.X_OK):
            return Finding(name, True, f"{binary}, named in agent.yaml")
        key = builds.NAMED_ONLY.get(name, f"{name}.binary")
        return Finding(name, False, f"{key}: {binary} cannot be run. Correct agent.yaml, or leave it out.")
    if name in builds.NAMED_ONLY:  # what is not there is no fault
        return Finding(name, True, builds.unnamed(name) if host.gpus else "needs cards, and this machine has none")
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
