"""Facts about this machine that command lines and validation depend on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from agent.protocol import Fabric, Gpu, RdmaAdapter


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
    cards: tuple[Gpu, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    adapters: tuple[RdmaAdapter, ...] = ()
    interface: str = ""
    """The network interface that holds `address`; empty where none does, or it is unknown."""

    def card(self, uuid: str) -> Gpu | None:
        return next((card for card in self.cards if card.uuid == uuid), None)

    def fabric(self, name: str) -> Fabric | None:
        return next((fabric for fabric in self.fabrics if fabric.name == name), None)
