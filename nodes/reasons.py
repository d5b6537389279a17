"""Why nodes turned a model down, told so that a person can read it of one node or of a thousand. Pure.

1. Nodes that give the very same reason share a line.
2. Where more than SHOWN reasons of a profile are left, those that differ in figures and names alone share one too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from nodes.state import TurnedDown

NAMED = 8
"""Nodes that a line names before it only counts them."""
SHOWN = 8
"""Reasons of one profile that are told word for word."""
_DETAIL = re.compile(r"(?:: |; ).*\Z", re.DOTALL)
_FIGURE = re.compile(r"\d+(?:\.\d+)?")


def told(reasons: Iterable[TurnedDown]) -> tuple[str, ...]:
    """Lines in the order in which profiles and reasons first appear."""
    by_profile: dict[str, list[TurnedDown]] = defaultdict(list)
    for turned in reasons:
        by_profile[turned.profile].append(turned)
    return tuple(line for profile, mine in by_profile.items() for line in _lines(profile, mine))


def _lines(profile: str, mine: Sequence[TurnedDown]) -> Iterator[str]:
    exact = _nodes_by((turned.reason, turned.node) for turned in mine)
    kinds = _nodes_by((_kind(turned.reason) if len(exact) > SHOWN else turned.reason, turned.node) for turned in mine)
    told_by = {(_kind(turned.reason) if len(exact) > SHOWN else turned.reason): turned for turned in reversed(mine)}
    everywhere = len({turned.node for turned in mine})
    for kind, nodes in kinds.items():
        first = told_by[kind]
        if not first.node or first.anywhere:
            yield f"{profile}: {first.reason}" if first.node else first.reason
            continue
        alike = f" (on {first.node}; alike on the others)" if len(nodes) > len(exact[first.reason]) else ""
        yield f"{_named(nodes, everywhere)} ({profile}): {first.reason}{alike}"


def _nodes_by(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for reason, node in pairs:
        found[reason].append(node)
    return found


def _kind(reason: str) -> str:
    """The reason without its figures, and without what it gives as details."""
    return _FIGURE.sub("0", _DETAIL.sub("", reason))


def _named(nodes: Sequence[str], everywhere: int) -> str:
    if len(nodes) <= NAMED:
        return ", ".join(nodes)
    if len(nodes) == everywhere:
        return f"all {everywhere:,} nodes"
    return f"{', '.join(nodes[:NAMED])} and {len(nodes) - NAMED:,} more"
