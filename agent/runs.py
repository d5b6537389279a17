"""What the edge knows of a shard besides its state, and how it calls it in the log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from agent.engines.base import Build
from agent.process import Identity
from agent.shards import Shard

Key = tuple[str, int]
"""Of a shard: its replica's name, and its rank."""


@dataclass(slots=True)
class Run:
    shard: Shard
    output: Path
    address: str
    key: str | None = field(default=None, repr=False)
    processes: list[Identity] = field(default_factory=list)
    expected: int = 1
    """How many commands the shard consists of."""
    weights: Path | None = None
    """A file or directory, or the id of a repository that the engine fetches by itself."""
    adapters: list[Path] = field(default_factory=list)
    build: Build | None = None
    port: int | None = None
    awaits: int | None = None
    """Where a leader is to await the other ranks."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    pids: list[int] = field(default_factory=list)
    """Its processes as of the last thorough probe; enough to see whether it is busy."""
    cpu: tuple[float, float] | None = None
    told_to_stop: bool = False
    tail: str = ""
    logged_percent: int = 0

    @property
    def ports(self) -> set[int]:
        return {port for port in (self.port, self.awaits) if port is not None}


def name(run: Run) -> str:
    spec = run.shard.spec
    return f"{spec.model} ({spec.replica}/{spec.rank})" if spec.nodes > 1 else f"{spec.model} ({spec.replica})"


def transition(run: Run) -> str:
    shard = run.shard
    where = f" on port {shard.port}" if shard.state == "ready" and shard.serves else ""
    why = f": {shard.reason}" if shard.reason else ""
    return f"{name(run)} is {shard.state}{where}{why}"
