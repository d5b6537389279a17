"""What all nodes say of their networks, read in one query for the map of fabrics."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from django.db.models import TextField
from django.db.models.functions import Cast

from agent.protocol import Fabric, RdmaAdapter
from nodes.fabrics import FabricMap, PortLine, Told, fabric_map
from nodes.models import Node


class _Gpu(msgspec.Struct):
    peers: tuple[msgspec.Raw, ...] | None = None
    slice_of: str = ""


class _Facts(msgspec.Struct):
    fabrics: tuple[Fabric, ...] = ()
    adapters: tuple[RdmaAdapter, ...] = ()
    gpus: tuple[_Gpu, ...] = ()


_facts = msgspec.json.Decoder(_Facts).decode


NO_FABRIC = "none"
"""What addresses and commands say for ports that are in no fabric; a fabric of that name is shown with them."""


def current_map() -> FabricMap:
    return fabric_map(_told())


def of_fabric(found: FabricMap, fabric: str) -> tuple[PortLine, ...]:
    return tuple(line for line in found.ports if (line.fabric or NO_FABRIC) == fabric)


def _told() -> Iterator[Told]:
    rows = Node.objects.values_list("name", "state", Cast("inventory", TextField()))
    for name, state, inventory in rows:
        facts = _facts(inventory)
        peers = (None if gpu.peers is None else len(gpu.peers) for gpu in facts.gpus if not gpu.slice_of)
        yield Told(name, state, facts.fabrics, facts.adapters, tuple(peers))
