"""In which order a list of nodes, models or replicas is shown, and where its next page begins. Pure.

The order comes from the address: `cpu` or, from the largest down, `-cpu`. What is unknown comes last either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nodes.lines import ModelLine, NodeLine, ReplicaLine

Line = TypeVar("Line", NodeLine, ModelLine, ReplicaLine)
Columns = Mapping[str, Callable[[Line], Any]]
"""By the word for it in an address, what a column is sorted by; None is unknown."""

NAME = "name"


@dataclass(frozen=True, slots=True)
class Order:
    column: str = NAME
    descending: bool = False

    def __str__(self) -> str:
        """As an address names it; empty for the order that needs no name."""
        return "" if self == Order() else f"{'-' * self.descending}{self.column}"

    def clicked(self, column: str, *, figures: bool) -> Order:
        """What a click on a column's head asks for: of figures the largest first, and the other way round the second
        time."""
        return Order(column, not self.descending if column == self.column else figures)


def order_of(text: str, columns: Columns[Line]) -> Order:
    """By name for what is no column."""
    column = text.removeprefix("-")
    return Order(column, text.startswith("-")) if column in columns else Order()


def sort(lines: Sequence[Line], columns: Columns[Line], order: Order) -> list[Line]:
    """Those that are alike by name."""
    value: Callable[[Line], Any] = columns[order.column]
    by_name: list[Line] = sorted(lines, key=lambda line: line.name)
    known: list[Line] = [line for line in by_name if value(line) is not None]
    unknown: list[Line] = [line for line in by_name if value(line) is None]
    return sorted(known, key=value, reverse=order.descending) + unknown


def after(lines: Sequence[Line], name: str, order: Order) -> list[Line]:
    """What comes behind the line of that name. Where it is gone, the list begins anew, but for that by name."""
    if order == Order():
        return [line for line in lines if line.name > name]
    place = next((number for number, line in enumerate(lines, start=1) if line.name == name), 0)
    return list(lines[place:])


def _load(line: ModelLine) -> float | None:
    return line.in_flight / line.slots if line.in_flight is not None and line.slots else None


NODES: Columns[NodeLine] = {
    NAME: lambda line: line.name,
    "state": lambda line: line.state,
    "gpus": lambda line: line.gpus_free if line.gpus else None,
    "memory": lambda line: line.memory_used_bytes,
    "disk": lambda line: line.disk_free_bytes,
    "files": lambda line: line.files,
    "engines": lambda line: line.engines or None,
    "cores": lambda line: line.cores_used,
    "replicas": lambda line: line.replicas,
    "load": lambda line: line.load_1m,
    "cpu": lambda line: line.cpu_percent,
    "seen": lambda line: line.last_seen_at,
}
MODELS: Columns[ModelLine] = {
    NAME: lambda line: line.name,
    "state": lambda line: line.state,
    "ready": lambda line: line.ready,
    "load": _load,
    "waiting": lambda line: line.waiting if line.slots else None,
    "note": lambda line: line.note or None,
}
REPLICAS: Columns[ReplicaLine] = {
    NAME: lambda line: line.name,
    "model": lambda line: line.model,
    "engine": lambda line: line.engine,
    "node": lambda line: line.node or None,
    "cards": lambda line: line.cards,
    "state": lambda line: line.state,
    "requests": lambda line: line.in_flight,
    "waiting": lambda line: line.waiting,
    "cache": lambda line: line.kv_used,
    "ready": lambda line: line.ready_at,
    "note": lambda line: line.note or None,
}
