"""Cuts an inventory to what a message may hold, and says so (ND-6). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from agent import protocol
from agent.protocol import AdapterPort, Fabric, Gpu, Inventory, RdmaAdapter

T = TypeVar("T")


def within_bounds(told: Inventory) -> Inventory:
    """`cut` names each list that is longer than shown."""
    cut = set(told.cut)

    def first(items: Sequence[T], most: int, name: str) -> tuple[T, ...]:
        if len(items) > most:
            cut.add(name)
        return tuple(items[:most])

    def adapter(one: RdmaAdapter) -> RdmaAdapter:
        ports = first(one.ports, protocol.MAX_PORTS, "adapters")
        return msgspec.structs.replace(one, ports=tuple(map(port, ports)), fault=_short(one.fault))

    def port(one: AdapterPort) -> AdapterPort:
        gids = first(one.gids, protocol.MAX_GIDS, "adapters")
        return msgspec.structs.replace(one, gids=gids, fault=_short(one.fault))

    fitting = [file for file in told.files if len(file.path) <= protocol.MAX_PATH]
    if len(fitting) < len(told.files):
        cut.add("files")
    gpus = first(told.gpus, protocol.MAX_GPUS, "gpus")
    adapters = first(told.adapters, protocol.MAX_ADAPTERS, "adapters")
    fabrics = first(told.fabrics, protocol.MAX_FABRICS, "fabrics")
    files = first(fitting, protocol.MAX_FILES, "files")
    return msgspec.structs.replace(
        told,
        gpus=tuple(map(_gpu, gpus)),
        gpus_fault=_short(told.gpus_fault),
        adapters=tuple(map(adapter, adapters)),
        fabrics=tuple(map(_fabric, fabrics)),
        files=files,
        cut=tuple(sorted(cut)),
    )


def _gpu(one: Gpu) -> Gpu:
    return msgspec.structs.replace(one, name=_short(one.name), fault=_short(one.fault))


def _fabric(one: Fabric) -> Fabric:
    return msgspec.structs.replace(one, reason=_short(one.reason))


def _short(text: str) -> str:
    return text if len(text) <= protocol.MAX_TEXT else text[: protocol.MAX_TEXT - 1] + "…"
