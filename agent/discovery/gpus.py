"""The cards of this machine, by NVML or, said aloud, by nvidia-smi (AG-1)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agent.discovery import nvidia_smi
from agent.discovery.cards import Card, Cards
from agent.discovery.nvml import NoNvml
from agent.discovery.prober import ProbeError

log = logging.getLogger(__name__)
_NVIDIA = "0x10de"
_DISPLAYS = ("0x0300", "0x0302")


class GpuReader:
    """Blocking, and perhaps for ever: for a prober's thread only."""

    def __init__(self, root: Path, *, nvml: Callable[[], Cards], run: nvidia_smi.Run, program: str = "nvidia-smi"):
        self._root = root
        self._nvml = nvml
        self._run = run
        self._program = program
        self._said = ""

    def read(self) -> Cards:
        """Raises ProbeError where there are cards that nobody can be asked about."""
        try:
            return self._completed(self._nvml())
        except ProbeError as error:
            why = error
        program = shutil.which(self._program)
        if program is None:
            present = self._present()
            if not present and isinstance(why, NoNvml):
                return Cards()
            raise ProbeError(
                f"this machine has {present} NVIDIA cards, but no nvidia-smi, and {why}; install the NVIDIA driver"
            )
        if str(why) != self._said:
            self._said = str(why)
            log.warning("Cards are read with nvidia-smi: %s", why)
        return self._completed(nvidia_smi.read(self._run, program))

    def _completed(self, found: Cards) -> Cards:
        """With what the kernel knows: NUMA nodes, and which processes are to be seen from here."""
        return replace(found, cards=tuple(map(self._with_kernel, found.cards)))

    def _with_kernel(self, card: Card) -> Card:
        seen = tuple(replace(each, visible=(self._root / "proc" / str(each.pid)).exists()) for each in card.processes)
        return replace(card, numa=self._numa(card.pci), processes=seen)

    def _numa(self, pci: str) -> int | None:
        """NVML writes 00000000:61:00.0 for the kernel's 0000:61:00.0."""
        domain, _, rest = pci.lower().partition(":")
        try:
            text = (self._root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text()
            number = int(text)
        except (OSError, ValueError):
            return None
        return number if number >= 0 else None

    def _present(self) -> int:
        try:
            devices = sorted((self._root / "sys/bus/pci/devices").iterdir())
        except OSError:
            return 0
        return sum(_text(d / "vendor") == _NVIDIA and _text(d / "class").startswith(_DISPLAYS) for d in devices)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
