"""A node's cards, fabrics and network adapters as lines that a person reads. Pure (ND-20 to ND-22, WEB-2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.protocol import Gpu, GpuReading, Inventory, NodeLoad, Sensor
from nodes.fabrics import PortLine, Told, fabric_map


@dataclass(frozen=True, slots=True)
class CardLine:
    """`state`: free, used by `replica`, or faulty, which is neither. `links`: NVLink in words."""

    index: int
    name: str
    gpu_class: str
    memory_bytes: int | None
    memory_used_bytes: int | None
    utilisation_percent: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    clock_mhz: float | None
    fan_percent: float | None
    compute_capability: str
    state: str
    replica: str
    note: str
    links: str
    numa: int | None


@dataclass(frozen=True, slots=True)
class FabricLine:
    name: str
    state: str
    adapters: str
    rate_gbit_s: float | None
    link_layer: str
    note: str


@dataclass(frozen=True, slots=True)
class Hardware:
    cards: tuple[CardLine, ...] = ()
    cards_fault: str = ""
    cards_age_s: float | None = None
    driver: str = ""
    cuda: str = ""
    fabrics: tuple[FabricLine, ...] = ()
    ports: tuple[PortLine, ...] = ()
    sensors: tuple[Sensor, ...] = ()
    cut: tuple[str, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    """A state and a sentence for whatever is wrong and what to do about it."""


def hardware(told: Inventory, load: NodeLoad, holders: Mapping[str, str]) -> Hardware:
    """`holders`: by card, the replica that holds it."""
    readings = {reading.uuid: reading for reading in load.gpus}
    return Hardware(
        cards=tuple(
            _card(gpu, readings.get(gpu.uuid) or GpuReading(uuid=gpu.uuid), holders.get(gpu.uuid, ""))
            for gpu in sorted(told.gpus, key=_order)
        ),
        cards_fault=told.gpus_fault,
        cards_age_s=load.gpus_age_s,
        driver=told.driver,
        cuda=told.cuda,
        fabrics=tuple(
            FabricLine(
                each.name, "up" if each.up else "down", ", ".join(each.adapters), each.rate_gbit_s, each.link_layer,
                each.reason,
            )
            for each in told.fabrics
        ),
        ports=fabric_map([Told("", fabrics=told.fabrics, adapters=told.adapters)]).ports,
        sensors=load.sensors,
        cut=told.cut,
        needs=tuple(_needs(told, holders)),
    )  # fmt: skip


def _card(gpu: Gpu, reading: GpuReading, replica: str) -> CardLine:
    state = "faulty" if not gpu.healthy else "used" if replica else "free"
    notes = (gpu.fault, f"slowed down: {reading.throttled}" if reading.throttled else "")
    return CardLine(
        index=gpu.index,
        name=gpu.name,
        gpu_class=gpu.gpu_class,
        memory_bytes=gpu.memory_bytes,
        memory_used_bytes=reading.memory_used_bytes,
        utilisation_percent=reading.utilisation_percent,
        temperature_c=reading.temperature_c,
        power_w=reading.power_w,
        power_limit_w=reading.power_limit_w,
        clock_mhz=reading.sm_clock_mhz,
        fan_percent=reading.fan_percent,
        compute_capability=gpu.compute_capability,
        state=state,
        replica=replica,
        note="; ".join(filter(None, notes)),
        links=_links(gpu),
        numa=gpu.numa,
    )


def _links(gpu: Gpu) -> str:
    """None and unknown are two things: a driver that does not say has not said "none"."""
    if gpu.slice_of:
        return "MIG slice"
    if gpu.peers is None:
        return "unknown"
    links = f"{len(gpu.peers)} cards" if len(gpu.peers) != 1 else "1 card"
    beyond = f", clique {gpu.nvlink_clique} of {gpu.nvlink_cluster[:8]}" if gpu.nvlink_cluster else ""
    return (links if gpu.peers else "none") + beyond


def _needs(told: Inventory, holders: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if told.gpus_fault:
        yield "warn", f"Its cards cannot be relied on: {told.gpus_fault}. Nothing new is placed on them."
    for gpu in sorted(told.gpus, key=_order):
        if not gpu.healthy:
            holder = holders.get(gpu.uuid)
            still = f" Replica {holder} still runs on it." if holder else ""
            which = f"Card {gpu.index} ({gpu.name}, {gpu.pci or gpu.uuid})"
            yield "faulty", f"{which}: {gpu.fault}. It counts neither used nor free.{still}"
    for fabric in told.fabrics:
        if not fabric.up:
            yield "down", f"Fabric {fabric.name} is not advertised: {fabric.reason}. No replica spans nodes over it."


def _order(gpu: Gpu) -> tuple[int, str]:
    return gpu.index, gpu.uuid


@dataclass(frozen=True, slots=True)
class CardCount:
    """A node's cards: each is used, free or faulty. `note`: which are faulty and why, and why none can be read."""

    used: int
    free: int
    faulty: int
    note: str


def count_cards(gpus: Sequence[Gpu], unread: str, held: Collection[str]) -> CardCount:
    """`unread`: why the cards could not be read lately. `held`: those that replicas hold, by UUID."""
    faulty = [gpu for gpu in gpus if not gpu.healthy]
    used = len([gpu for gpu in gpus if gpu.healthy and gpu.uuid in held])
    notes = [f"cards cannot be read: {unread}"] if unread else []
    notes += [f"card {gpu.index}: {gpu.fault}" for gpu in sorted(faulty, key=_order)]
    return CardCount(used, len(gpus) - len(faulty) - used, len(faulty), "; ".join(notes))


def cards_in_words(held: Collection[str], gpus: Iterable[Gpu]) -> str:
    """A shard's cards: "h100-80g 0–3", by class and index; those that its node does not report stand with their id."""
    known = {gpu.uuid: gpu for gpu in gpus}
    by_class: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in sorted((known[uuid] for uuid in held if uuid in known), key=_order):
        by_class[gpu.gpu_class].append(gpu)
    words = [f"{name} {', '.join(_runs(cards))}" for name, cards in sorted(by_class.items())]
    return "; ".join([*words, *(f"{uuid} (not reported)" for uuid in held if uuid not in known)])


def _runs(cards: Sequence[Gpu]) -> Iterator[str]:
    """Indices in their order, healthy ones that follow each other as one."""
    first = last = None
    for gpu in cards:
        if gpu.healthy and last is not None and gpu.index == last + 1:
            last = gpu.index
            continue
        if first is not None:
            yield _run(first, last)
        first = last = gpu.index if gpu.healthy else None
        if not gpu.healthy:
            yield f"{gpu.index} (faulty)"
    if first is not None:
        yield _run(first, last)


def _run(first: int, last: int | None) -> str:
    return f"{first}" if first == last else f"{first}–{last}"
