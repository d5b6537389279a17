"""Cards and network adapters as they were last read, and what follows from them for placement (ND-2, ND-20, ND-21)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent import fabrics, process
from agent.discovery.cards import Cards, to_gpu
from agent.discovery.commands import Runner
from agent.discovery.gpus import GpuReader
from agent.discovery.infiniband import read_adapters
from agent.discovery.nvml import Nvml
from agent.discovery.prober import Prober
from agent.protocol import Fabric, Gpu, GpuReading, RdmaAdapter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """`gpus_fault`: why the cards are not to be relied on; `age_s`: since they were read."""

    gpus: tuple[Gpu, ...] = ()
    gpus_fault: str = ""
    driver: str = ""
    cuda: str = ""
    fabrics: tuple[Fabric, ...] = ()
    adapters: tuple[RdmaAdapter, ...] = ()
    readings: tuple[GpuReading, ...] = ()
    age_s: float | None = None


class Hardware:
    """`look` never waits for hardware; `wait` does, for so long, until it was read once."""

    def __init__(
        self,
        declared: Mapping[str, Sequence[str]],
        *,
        cards: Callable[[], Cards],
        adapters: Callable[[], tuple[RdmaAdapter, ...]],
    ) -> None:
        self._declared = declared
        self._cards = Prober("the NVIDIA driver", cards)
        self._adapters = Prober("the network adapters", adapters)
        self._said: tuple[Fabric, ...] = ()

    @classmethod
    def of_this_machine(cls, declared: Mapping[str, Sequence[str]], root: Path = Path("/")) -> Hardware:
        reader = GpuReader(root, nvml=Nvml().read, run=Runner().run)
        return cls(declared, cards=reader.read, adapters=lambda: read_adapters(root))

    def wait(self, limit_s: float) -> None:
        self._cards.wait(limit_s)
        self._adapters.wait(limit_s)

    def look(self, *, given: Collection[str], ours: Callable[[], Collection[int]]) -> Found:
        """`given`: cards that our shards run on. `ours`: their processes, asked for only where a card has any."""
        cards, rdma = self._cards.latest(), self._adapters.latest()
        known = cards.value or Cards()
        mine = ours() if any(card.processes for card in known.cards) else ()

        def stranger(pid: int) -> bool:
            lives = process.stat(pid)
            return pid not in mine and lives is not None and not lives.dead

        found = Found(
            gpus=tuple(to_gpu(card, given=card.uuid in given, stranger=stranger) for card in known.cards),
            gpus_fault=cards.fault,
            driver=known.driver,
            cuda=known.cuda,
            fabrics=fabrics.advertise(self._declared, rdma.value or (), rdma.fault),
            adapters=rdma.value or (),
            readings=tuple(card.reading for card in known.cards if card.reading),
            age_s=cards.age_s if known.cards else None,
        )
        self._say(found.fabrics)
        return found

    def _say(self, now: tuple[Fabric, ...]) -> None:
        for fabric in now:
            if fabric in self._said:
                continue
            if fabric.up:
                log.info("Fabric %s is up over %s", fabric.name, ", ".join(fabric.adapters))
            else:
                log.warning("Fabric %s is not advertised: %s", fabric.name, fabric.reason)
        self._said = now
