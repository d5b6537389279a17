"""Why nodes turned a model down, told so that a person can read it of one node or of a thousand. Pure.

1. Nodes that give the very same reason share a line.
2. Where more than SHOWN reasons of a profile are left, those that differ in figures and names alone share one too.
3. A command that is told of one node alone names it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from nodes.fitting import UNCORDON
from nodes.names import some
from nodes.state import TurnedDown

FRESH = 16
"""Models whose reasons are put into lines at a time."""
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


Reasons = tuple[TurnedDown, ...]


class Lines:
    """The lines of many models, made anew only where the reasons are other values than before, and for at most FRESH
    models at a time: in a fleet of a thousand nodes each takes milliseconds, and nobody reads that fast."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Reasons, tuple[str, ...]]] = {}
        """By model, the one that was told the longest ago first."""

    def of(self, reasons: Iterable[tuple[str, Reasons]], models: Set[str]) -> Mapping[str, tuple[str, ...]]:
        """By model, without those whose turn is yet to come: first who was never told, then the longest ago. Others
        than `models` are forgotten."""
        given = dict(reasons)
        stale = {model for model, why in given.items() if why and self._before(model)[0] is not why}
        turns = [model for model in given if model in stale and model not in self._known]
        turns += [model for model in self._known if model in stale]
        for model in turns[:FRESH]:
            self._known.pop(model, None)
            self._known[model] = given[model], told(given[model])
        late = set(turns[FRESH:])
        self._known = {m: known for m, known in self._known.items() if m in models and (m not in given or given[m])}
        return {model: self._before(model)[1] for model in given if model not in late}

    def _before(self, model: str) -> tuple[Reasons, tuple[str, ...]]:
        return self._known.get(model, ((), ()))


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
        reason = first.reason if len(nodes) > 1 else first.reason.replace(UNCORDON, UNCORDON.replace("NODE", nodes[0]))
        yield f"{_named(nodes, everywhere)} ({profile}): {reason}{alike}"


def _nodes_by(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for reason, node in pairs:
        found[reason].append(node)
    return found


def _kind(reason: str) -> str:
    """The reason without its figures, and without what it gives as details."""
    return _FIGURE.sub("0", _DETAIL.sub("", reason))


def _named(nodes: Sequence[str], everywhere: int) -> str:
    return f"all {everywhere:,} nodes" if NAMED < len(nodes) == everywhere else some(nodes, NAMED)
