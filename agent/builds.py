"""The engine builds that a node can be given, best first, pinned by version and hash (AG-30). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from agent.host import Host
from agent.protocol import AUTO, NONE


@dataclass(frozen=True, slots=True)
class Wheel:
    """A build that is one PyPI wheel. `hashes`: SHA-256 by machine architecture."""

    engine: str
    name: str
    version: str
    hashes: tuple[tuple[str, str], ...]
    disk_bytes: int
    """What it needs while it is installed: download and unpacked files."""

    @property
    def directory(self) -> str:
        return f"{self.name}-{self.version}"

    def requirement(self) -> str:
        """The one line of a requirements file that lets nothing but the pinned wheels in."""
        return f"{self.name}=={self.version} " + " ".join(f"--hash=sha256:{digest}" for _, digest in self.hashes)


XLLAMACPP = Wheel(
    engine="llamacpp",
    name="xllamacpp",
    version="2026.10.11549",
    hashes=(
        ("x86_64", "c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261"),
        ("aarch64", "e2a3e79e775515de4ad197e667f874070446ef9ac9cf2044bc9866bc4c72289e"),
    ),
    disk_bytes=300 * 2**20,
)
BUILDS: tuple[Wheel, ...] = (XLLAMACPP,)
NAMED = "named"
"""The name of a build that the operator installed and named in agent.yaml."""

NAMED_ONLY = {"vllm": "vllm.binary", "sglang": "sglang.python"}
"""Engines that this version installs nowhere, and the setting that names what the operator has installed."""


def for_engine(engine: str) -> tuple[Wheel, ...]:
    return tuple(build for build in BUILDS if build.engine == engine)


def unnamed(engine: str) -> str:
    """Why a node without a named program has no build of `engine`, as a whole sentence."""
    if engine not in NAMED_ONLY:
        return f"This version of llmgw has no build of {engine}."
    return f"llmgw installs no {engine} yet; install it on the node and name it in agent.yaml as {NAMED_ONLY[engine]}."


def objection(build: Wheel, host: Host) -> str | None:
    """Why `build` cannot run on `host`, as a sentence; None when nothing speaks against it."""
    known = [name for name, _ in build.hashes]
    if host.architecture not in known:
        return (
            f"{build.name} {build.version} is made for {' and '.join(known)}, and this machine is {host.architecture}."
        )
    if host.gpus:
        return f"{build.name} computes on CPUs only, and this node has {host.gpus} GPUs that it would leave idle."
    return None


def passed_over(engine: str, name: str, chosen: str) -> str:
    """Why a build is not to be used where `chosen` is the choice for its engine; empty when it may be."""
    if chosen == NONE:
        return switched_off(engine)
    if chosen in (AUTO, name):
        return ""
    return f"Not chosen: the control plane chose {chosen}. To use it: llmgw ctl engine-build NODE {engine} {name}."


def switched_off(engine: str) -> str:
    return f"Switched off by the control plane. To use {engine} again: llmgw ctl engine-build NODE {engine} auto."
