"""Metrics of the nodes whose streams this process holds: each process publishes its own, and together they are all."""

from __future__ import annotations

from collections.abc import Iterator

from agent.protocol import Gpu
from llmgw.core.metrics import Computed

NVLINK_PEERS = Computed(
    "llmgw_gpu_nvlink_peers",
    "Cards that a card reaches over NVLink; left out where its driver does not say. Zero on every card of a fleet means"
    " that nothing is known, not that there is no NVLink.",
    ("node", "gpu", "gpu_class"),
)
_told: dict[str, tuple[str, tuple[Gpu, ...]]] = {}
"""By node: the stream that speaks for it, and its cards. Slices have no links of their own."""


def tell_cards(node: str, connection: str, gpus: tuple[Gpu, ...]) -> None:
    _told[node] = connection, tuple(gpu for gpu in gpus if not gpu.slice_of)


def forget_cards(node: str, connection: str) -> None:
    """Its stream ended, unless a newer one has spoken since."""
    if node in _told and _told[node][0] == connection:
        del _told[node]


def _peers() -> Iterator[tuple[tuple[str, ...], float]]:
    for node, (_, gpus) in list(_told.items()):
        for gpu in gpus:
            if gpu.peers is not None:
                yield (node, str(gpu.index), gpu.gpu_class), len(gpu.peers)


NVLINK_PEERS.source = _peers
