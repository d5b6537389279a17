"""Cards from NVML, the driver's own library, through the package nvidia-ml-py (AG-1).

Each question is asked by itself: one that a card does not answer is unknown, and hides no other.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable, Iterable
from typing import Any

from agent.discovery.cards import Card, Cards, Errors, Process
from agent.discovery.prober import ProbeError
from agent.protocol import GpuReading

_THROTTLED = ((0x8, "hw"), (0x20, "sw thermal"), (0x40, "hw thermal"), (0x80, "hw power brake"))
_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_LINKED, _NOBODY_KNOWS = 0, 6
_COMPLETED = 3
_LOST = 15
_KIND = re.compile(r"MIG (\S+)\s*\Z")
_FABRICS = ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t")
"""Drivers before 580 know only the second."""
_PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)
_ODD = (AttributeError, TypeError, ValueError, OSError, ctypes.ArgumentError)
"""How bindings fail that do not fit the driver, or a name that is no UTF-8; as good as no answer."""


class NoNvml(ProbeError):
    """NVML is not to be had here, which is usual on a machine without cards."""


class Nvml:
    """One driver. `library`: the module pynvml, or what stands in for it."""

    def __init__(self, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._load = load
        self._library: Any = None

    def read(self) -> Cards:
        """Raises ProbeError."""
        library = self._started()
        try:
            count = library.nvmlDeviceGetCount()
        except (library.NVMLError, *_ODD) as error:
            self._library = None
            raise ProbeError(f"NVML does not list the cards: {error}") from None
        handles = [self._ask("nvmlDeviceGetHandleByIndex", number) for number in range(count)]
        named = ((self._text("nvmlDeviceGetUUID", handle), handle) for handle in handles if handle is not None)
        known = [(uuid, handle) for uuid, handle in named if uuid]
        ordered = sorted(known, key=lambda pair: self._pci(pair[1]))
        cards: list[Card] = []
        for index, (uuid, handle) in enumerate(ordered):
            cards += self._cards(uuid, handle, index, ordered)
        if len(known) < count:
            missing = count - len(known)
            cards += [Card(f"lost-{n}", count - missing + n, "lost", errors=Errors(lost=True)) for n in range(missing)]
        cuda = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return Cards(
            tuple(cards),
            driver=self._text("nvmlSystemGetDriverVersion"),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            reader="nvml",
        )

    def _started(self) -> Any:
        if self._library is None:
            try:
                library = self._load()
            except ImportError:
                raise NoNvml("the Python package nvidia-ml-py is not installed") from None
            except (SyntaxError, *_ODD) as error:
                raise NoNvml(f"the Python package nvidia-ml-py cannot be loaded: {error}") from None
            try:
                library.nvmlInit()
            except (library.NVMLError, *_ODD) as error:
                raise NoNvml(f"NVML cannot be used: {error}") from None
            self._library = library
        return self._library

    def _cards(self, uuid: str, handle: Any, index: int, all_cards: list[tuple[str, Any]]) -> list[Card]:
        name, pci = self._text("nvmlDeviceGetName", handle), self._pci(handle)
        major_minor = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        capability = ".".join(map(str, major_minor)) if major_minor else ""
        errors = self._errors(handle)
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        if mode and mode[0] == 1:
            return self._slices(uuid, handle, index, name, pci, capability, errors)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        cluster, clique = self._fabric(handle)
        return [
            Card(
                uuid=uuid,
                index=index,
                name=name,
                memory_bytes=memory.total if memory else None,
                pci=pci,
                compute_capability=capability,
                peers=self._peers(uuid, handle, all_cards),
                nvlink_cluster=cluster,
                nvlink_clique=clique,
                errors=errors,
                processes=tuple(self._processes(handle)),
                reading=self._reading(uuid, handle, memory.used if memory else None),
            )
        ]

    def _slices(
        self, parent: str, handle: Any, index: int, name: str, pci: str, capability: str, errors: Errors
    ) -> list[Card]:
        """What a card in MIG mode is cut into; a card that is not cut yet offers nothing."""
        found = []
        for number in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            part = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            if part is None:
                continue
            memory = self._ask("nvmlDeviceGetMemoryInfo", part)
            kind = _KIND.search(self._text("nvmlDeviceGetName", part))
            found.append(
                Card(
                    uuid=self._text("nvmlDeviceGetUUID", part),
                    index=index,
                    name=name,
                    memory_bytes=memory.total if memory else None,
                    pci=pci,
                    compute_capability=capability,
                    slice_of=parent,
                    slice_kind=kind[1] if kind else "unknown",
                    errors=errors,
                    processes=tuple(self._processes(part)),
                )
            )
        return found

    def _errors(self, handle: Any) -> Errors:
        library = self._library
        rows = self._ask("nvmlDeviceGetRemappedRows", handle)
        try:
            library.nvmlDeviceGetMemoryInfo(handle)
            lost = False
        except (library.NVMLError, *_ODD) as error:
            lost = getattr(error, "value", None) == _LOST
        return Errors(
            uncorrected_ecc=self._ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0),
            remap_failed=bool(rows[3]) if rows else None,
            lost=lost,
        )

    def _peers(self, uuid: str, handle: Any, all_cards: list[tuple[str, Any]]) -> tuple[str, ...] | None:
        """Those with an NVLink to it, through a switch or not; None when the driver does not say of any."""
        answers = {
            other: self._ask("nvmlDeviceGetP2PStatus", handle, its, _NVLINK)
            for other, its in all_cards
            if other != uuid
        }
        if answers and all(answer in (None, _NOBODY_KNOWS) for answer in answers.values()):
            return None
        return tuple(other for other, answer in answers.items() if answer == _LINKED)

    def _fabric(self, handle: Any) -> tuple[str, int | None]:
        """The NVLink domain beyond the node."""
        for kind in filter(None, (getattr(self._library, name, None) for name in _FABRICS)):
            told = kind()
            if self._ask("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(told)) is None:
                continue
            cluster = bytes(told.clusterUuid)
            if told.state == _COMPLETED and told.status == 0 and any(cluster):
                return cluster.hex(), int(told.cliqueId)
            break
        return "", None

    def _processes(self, handle: Any) -> Iterable[Process]:
        """Of every type: a Vulkan engine is a graphics process."""
        found: dict[int, Process] = {}
        for question in _PROCESSES:
            for each in self._ask(question, handle) or ():
                name = self._text("nvmlSystemGetProcessName", each.pid)
                found.setdefault(each.pid, Process(each.pid, name, each.usedGpuMemory))
        return found.values()

    def _reading(self, uuid: str, handle: Any, memory_used: int | None) -> GpuReading:
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle) or 0
        return GpuReading(
            uuid=uuid,
            memory_used_bytes=memory_used,
            utilisation_percent=rates.gpu if rates else None,
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, 0),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, 1),
            fan_percent=self._ask("nvmlDeviceGetFanSpeed", handle),
            throttled=", ".join(word for bit, word in _THROTTLED if reasons & bit),
        )

    def _pci(self, handle: Any) -> str:
        found = self._ask("nvmlDeviceGetPciInfo", handle)
        return _plain(found.busId) if found else ""

    def _text(self, question: str, *args: Any) -> str:
        return _plain(self._ask(question, *args) or "")

    def _ask(self, question: str, *args: Any) -> Any:
        """The answer, or None: not supported, not permitted, unknown to this driver, or the card is gone."""
        try:
            return getattr(self._library, question)(*args)
        except (self._library.NVMLError, *_ODD):
            return None


def _plain(text: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return text.decode(errors="replace") if isinstance(text, bytes) else text
