"""Facts about this machine that command lines and validation depend on. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """`address`: where engines listen, which gateways must reach. None is unknown."""

    address: str
    architecture: str
    cores: int | None = None
    memory_bytes: int | None = None
    gpus: int = 0
    llamacpp_threads: int | None = None
    """The operator's choice; None: half the CPUs."""
