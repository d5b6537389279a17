"""What every engine adapter answers: the commands of a shard, and how to tell that it serves. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from agent.host import Host
from agent.protocol import ShardSpec

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)?\Z")


@dataclass(frozen=True, slots=True)
class Command:
    """One process of a shard. `env` is added to a small clean environment; `secrets` too, and is never printed."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    private: tuple[str, str] | None = field(default=None, repr=False)
    """Path and content of a file that only its owner can read, there from before the start until the shard's end."""
    wait_for: tuple[str, int] | None = None
    """Address that must listen before this command starts; given up after `wait_s` seconds."""
    wait_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Build:
    """An engine build that is ready to run: how its server is started."""

    name: str
    version: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """What the agent chose for one start. `weights`: the file or directory on this machine, or the repository's id;
    `adapters`: those of the spec's adapters, in its order."""

    build: Build
    weights: str
    port: int
    rendezvous: int | None = None
    """Where a leader is to await the other ranks; None for everybody else."""
    adapters: tuple[str, ...] = ()
    adapter_rank: int | None = None
    """The highest rank among the adapters, as far as it is known."""
    private: str = ""
    """Path that a command's private file can have."""
    key: str | None = field(default=None, repr=False)


class Engine(Protocol):
    name: str
    health_path: str
    models_path: str
    multi_node: bool
    """Whether a replica may span nodes, tensor or pipeline ranks."""
    launch_modes: tuple[str, ...]
    """How ranks on several nodes may be started."""
    repositories: bool
    """Whether it fetches a bare org/name by itself."""

    def commands(self, spec: ShardSpec, host: Host, launch: Launch) -> tuple[Command, ...]:
        """All but the last are sidecars, alive as long as the shard; the exit of the last is the shard's."""

    def serves_http(self, rank: int) -> bool:
        """Whether this rank has an HTTP server, and so a readiness to ask for."""


def names_flag(args: tuple[str, ...], *flags: str) -> bool:
    """Whether `args` already sets one of `flags`, as `--flag value` or `--flag=value`."""
    return any(arg.partition("=")[0] in flags for arg in args)


def is_repository(source: str) -> bool:
    """Whether a source is the bare id of a repository, such as org/name."""
    return bool(_REPOSITORY.match(source))
