"""How many whole nodes are free on each fabric, for replicas that span nodes (WEB-2). Pure.

A node is whole and free for a class when it takes new replicas, its fabric is up, and every card of the class on it is
healthy, no slice, and held by nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from agent.protocol import Fabric
from nodes.names import some
from nodes.state import Node
from nodes.totals import is_closed

NAMED = 3
"""Nodes that a note names before it only counts them."""


@dataclass(frozen=True, slots=True)
class WholeLine:
    """One class of cards on one fabric."""

    fabric: str
    gpu_class: str
    """Empty: no node on it has cards."""
    nodes: int
    """That declare the fabric, have such cards and are not lost."""
    up: int
    """On how many of them it is up."""
    free: int
    """Nodes of which a replica could have every such card."""
    free_cards: int
    rate_gbit_s: float | None
    """Of the slowest link that is up; unknown as soon as one is."""
    note: str
    """Where it is not up and why; empty when it is up everywhere."""


def wholes(nodes: Iterable[Node], held: Mapping[str, Collection[str]]) -> tuple[WholeLine, ...]:
    """By fabric and class. `held`: by node, the cards that replicas hold."""
    fabrics: dict[str, list[tuple[Node, Fabric]]] = defaultdict(list)
    for node in sorted(nodes, key=lambda node: node.name):
        for fabric in node.fabrics if node.state in ("ready", "unreachable") else ():
            fabrics[fabric.name].append((node, fabric))
    return tuple(line for name, there in sorted(fabrics.items()) for line in _lines(name, there, held))


def _lines(name: str, there: list[tuple[Node, Fabric]], held: Mapping[str, Collection[str]]) -> Iterator[WholeLine]:
    classes = sorted({gpu.gpu_class for node, _ in there for gpu in node.gpus})
    for gpu_class in classes or [""]:
        mine = [pair for pair in there if not classes or any(gpu.gpu_class == gpu_class for gpu in pair[0].gpus)]
        up = [fabric for _, fabric in mine if fabric.up]
        rates = [fabric.rate_gbit_s for fabric in up]
        known = [rate for rate in rates if rate is not None]
        free = [count for node, fabric in mine if (count := _free(node, fabric, gpu_class, held.get(node.name, ())))]
        yield WholeLine(
            fabric=name,
            gpu_class=gpu_class,
            nodes=len(mine),
            up=len(up),
            free=len(free),
            free_cards=sum(free),
            rate_gbit_s=min(known) if known and len(known) == len(rates) else None,
            note=_note(mine),
        )


def _free(node: Node, fabric: Fabric, gpu_class: str, held: Collection[str]) -> int:
    """The node's cards of the class, if all of them could be had."""
    cards = [gpu for gpu in node.gpus if gpu.gpu_class == gpu_class]
    whole = all(gpu.healthy and not gpu.slice_of and gpu.uuid not in held for gpu in cards)
    return len(cards) if whole and fabric.up and not is_closed(node) else 0


def _note(there: Iterable[tuple[Node, Fabric]]) -> str:
    why: dict[str, list[str]] = defaultdict(list)
    for node, fabric in there:
        if not fabric.up:
            why[fabric.reason or "its agent does not say why"].append(node.name)
    return "; ".join(f"{some(nodes, NAMED)}: {reason}" for reason, nodes in why.items())
