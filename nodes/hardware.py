"""A node's cards, fabrics and network adapters as lines that a person reads. Pure (ND-20 to ND-22, WEB-2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from agent.protocol import AdapterPort, Gpu, GpuReading, Inventory, NodeLoad


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
class PortLine:
    """`reports`: what stands behind the port: the subnet manager, or the network of a RoCE port."""

    adapter: str
    number: int | None
    fabric: str
    """Empty: nobody declared it."""
    state: str
    rate_gbit_s: float | None
    link_layer: str
    reports: str
    note: str


@dataclass(frozen=True, slots=True)
class Hardware:
    cards: tuple[CardLine, ...] = ()
    cards_fault: str = ""
    cards_age_s: float | None = None
    driver: str = ""
    fabrics: tuple[FabricLine, ...] = ()
    ports: tuple[PortLine, ...] = ()
    cut: tuple[str, ...] = ()


def hardware(told: Inventory, load: NodeLoad, holders: Mapping[str, str]) -> Hardware:
    """`holders`: by card, the replica that holds it."""
    readings = {reading.uuid: reading for reading in load.gpus}
    fabrics = {adapter: fabric.name for fabric in told.fabrics for adapter in fabric.adapters}
    return Hardware(
        cards=tuple(
            _card(gpu, readings.get(gpu.uuid) or GpuReading(uuid=gpu.uuid), holders.get(gpu.uuid, ""))
            for gpu in sorted(told.gpus, key=lambda gpu: (gpu.index, gpu.uuid))
        ),
        cards_fault=told.gpus_fault,
        cards_age_s=load.gpus_age_s,
        driver=told.driver,
        fabrics=tuple(
            FabricLine(
                each.name, "up" if each.up else "down", ", ".join(each.adapters), each.rate_gbit_s, each.link_layer,
                each.reason,
            )
            for each in told.fabrics
        ),
        ports=tuple(_ports(told, fabrics)),
        cut=told.cut,
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


def _ports(told: Inventory, fabrics: Mapping[str, str]) -> Iterator[PortLine]:
    for adapter in told.adapters:
        fabric = fabrics.get(adapter.name, "")
        if not adapter.ports:
            yield PortLine(adapter.name, None, fabric, "", None, "", "", adapter.fault)
        for port in adapter.ports:
            yield PortLine(
                adapter=adapter.name,
                number=port.number,
                fabric=fabric,
                state=port.state,
                rate_gbit_s=port.rate_gbit_s,
                link_layer=port.link_layer,
                reports="; ".join(_reports(port)),
                note="; ".join(filter(None, (adapter.fault, port.fault))),
            )


def _reports(port: AdapterPort) -> Iterable[str]:
    """Equal prefixes alone prove nothing, so the subnet manager stands beside them."""
    if port.network:
        yield f"network {port.network}"
    if port.link_layer == "InfiniBand":
        yield f"subnet {port.subnet_prefix or 'unknown'}"
        yield f"subnet manager {'unknown' if port.sm_lid is None else port.sm_lid}"
    yield from (f"GID {gid.index} {gid.gid}" + (f" ({gid.kind})" if gid.kind else "") for gid in port.gids[:4])
