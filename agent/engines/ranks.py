"""What engines on cards have in common: which cards a rank gets, where the leader is, how adapters are called. Pure."""

from __future__ import annotations

import re

from agent.discovery.cards import LOST
from agent.engines import nccl
from agent.engines.base import Launch
from agent.host import Host
from agent.protocol import ShardSpec, engine_name

MAX_AT_ONCE = 8
"""Adapters that an engine works with in one batch; each takes memory of the cards."""


def environment(spec: ShardSpec, host: Host, launch: Launch) -> tuple[tuple[str, str], ...]:
    """What a profile may say otherwise."""
    return (*launch.build.env, ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), *nccl.environment(spec.fabric, host))


def cards(spec: ShardSpec, host: Host, *, by_uuid: bool = False) -> tuple[tuple[str, str], ...]:
    """The shard's own cards. A UUID is the same card whatever became of others; engines that read it as a number get
    numbers, as long as the driver and we can only count alike. `by_uuid`: the engine takes UUIDs."""
    found = [card for uuid in spec.gpus if (card := host.card(uuid))]
    counted = len(found) == len(spec.gpus) and not any(card.slice_of or LOST in card.fault for card in host.cards)
    visible = [str(card.index) for card in found] if counted and not by_uuid else spec.gpus
    return (("CUDA_VISIBLE_DEVICES", ",".join(visible)),)


def at_least(version: str, *least: int) -> bool:
    """Whether a build is known to be of that version or a later one."""
    parts = re.match(r"(\d+)\.(\d+)", version)
    return parts is not None and tuple(map(int, parts.groups())) >= least


def leader(spec: ShardSpec, host: Host, launch: Launch) -> tuple[str, int]:
    """Where the ranks meet: this machine for the leader, what it was told for everybody else."""
    if spec.rank == 0:
        return host.address, launch.rendezvous or 0
    return split(spec.rendezvous) or ("", 0)


def split(address: str) -> tuple[str, int] | None:
    """Host and port of `host:port` or `[host]:port`; None when it is neither."""
    place, _, port = address.rpartition(":")
    place = place.removeprefix("[").removesuffix("]")
    return (place, int(port)) if place and port.isascii() and port.isdigit() and 0 < int(port) < 65536 else None


def joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def adapters(spec: ShardSpec, launch: Launch) -> tuple[tuple[str, str], ...]:
    """Name and place of those that are there from the start; none where they are loaded when asked for."""
    if spec.max_loaded_adapters is not None:
        return ()
    return tuple(
        (engine_name(each.name, each.source), path) for each, path in zip(spec.adapters, launch.adapters, strict=True)
    )
