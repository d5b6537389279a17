"""What was read of cards, made into what the control plane is told: classes, faults, strangers. Pure (AG-1, ND-20)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agent.protocol import Gpu, GpuReading

GIB = 2**30
_WORDS = r"nvidia|tesla|geforce|graphics|device|gpu|generation|server|workstation|edition|max|q|pcie|sxm|nvl|mig"
_DROPPED = re.compile(rf"(?:{_WORDS}|sxm\d+|hbm\d+\w*|\d+gb|\d+g\.\d+gb\S*)\Z")
"""What a product's name says besides the product: maker, shape, memory."""
_SLICE = re.compile(r"(\d+g)\.\d+gb")


@dataclass(frozen=True, slots=True)
class Process:
    """Who holds memory of a card. `memory_bytes` None is unknown, not nothing."""

    pid: int
    name: str = ""
    memory_bytes: int | None = None
    visible: bool = True
    """Whether there was such a process here when the card was read; in a container there may not be."""


LOST = "the driver has lost it"


@dataclass(frozen=True, slots=True)
class Errors:
    """What a card counts against itself; None is unknown, and no fault."""

    uncorrected_ecc: int | None = None
    remap_failed: bool | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Card:
    """One card, or one MIG slice of a card, as a reader found it. `slice_kind`: such as 3g.20gb."""

    uuid: str
    index: int
    name: str
    memory_bytes: int | None = None
    pci: str = ""
    compute_capability: str = ""
    numa: int | None = None
    peers: tuple[str, ...] | None = None
    nvlink_cluster: str = ""
    nvlink_clique: int | None = None
    slice_of: str = ""
    slice_kind: str = ""
    errors: Errors = Errors()
    processes: tuple[Process, ...] = ()
    reading: GpuReading | None = None


@dataclass(frozen=True, slots=True)
class Cards:
    """All that one probe found. Empty on a machine without cards."""

    cards: tuple[Card, ...] = ()
    driver: str = ""
    cuda: str = ""
    reader: str = field(default="", compare=False)
    """Who read it: nvml, nvidia-smi, or nobody."""


def gpu_class(name: str, memory_bytes: int | None, slice_kind: str = "") -> str:
    """As the driver reports it, memory to the nearest whole GiB: h100-80g, l40s-45g, a100-mig-3g-20g."""
    words = re.findall(r"[a-z0-9.+]+", name.lower())
    kept = [word for word in words if not _DROPPED.match(word)]
    stem = "-".join(re.sub(r"[^a-z0-9]+", "", word) for word in kept) or "gpu"
    cut = _SLICE.match(slice_kind)
    if slice_kind:
        stem += f"-mig-{cut[1]}" if cut else "-mig"
    return f"{stem}-unknown" if memory_bytes is None else f"{stem}-{max(1, round(memory_bytes / GIB))}g"


def to_gpu(card: Card, *, given: bool, stranger: Callable[[int], bool]) -> Gpu:
    """`given`: one of our shards runs on it. `stranger`: whether a process lives, and is none of our engines'."""
    strangers = [one for one in card.processes if (stranger(one.pid) if one.visible else not given)]
    fault = "; ".join((*_faults(card.errors), *map(_held, sorted(strangers, key=lambda one: one.pid))))
    return Gpu(
        uuid=card.uuid,
        index=card.index,
        name=card.name,
        gpu_class=gpu_class(card.name, card.memory_bytes, card.slice_kind),
        memory_bytes=card.memory_bytes,
        healthy=not fault,
        fault=fault,
        pci=card.pci,
        compute_capability=card.compute_capability,
        numa=card.numa,
        peers=card.peers,
        nvlink_cluster=card.nvlink_cluster,
        nvlink_clique=card.nvlink_clique,
        slice_of=card.slice_of,
    )


def _faults(errors: Errors) -> Iterable[str]:
    if errors.lost:
        yield f"{LOST}; reset the card or restart the machine"
    if errors.remap_failed:
        yield "row remap failure: it has to be replaced"
    if errors.uncorrected_ecc:
        yield f"{errors.uncorrected_ecc} uncorrected ECC errors; reset the card"


def _held(stranger: Process) -> str:
    """Memory held by what llmgw did not start."""
    held = "memory" if stranger.memory_bytes is None else f"{stranger.memory_bytes / GIB:.1f} GiB"
    name = stranger.name.rpartition("/")[2][:60]
    who = f"process {stranger.pid}" + (f" ({name})" if name else "")
    return f"{who}, which is not llmgw's, holds {held} of it; end it"
