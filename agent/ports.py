"""Which port an engine gets: never one in use or lately released, and another than the last one. Pure.

Somebody may still know an old port as another model's, and would reach the wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping


def choose(
    first: int,
    last: int,
    *,
    after: int | None,
    used: Collection[int],
    released_at: Mapping[int, float],
    quarantine_s: float,
    now: float,
    is_free: Callable[[int], bool],
) -> int | None:
    """The next port behind `after`, going round; None when every port is taken or too lately released."""
    count = last - first + 1
    start = 0 if after is None or not first <= after <= last else after - first + 1
    for offset in range(count):
        port = first + (start + offset) % count
        if port in used or now - released_at.get(port, now - quarantine_s) < quarantine_s:
            continue
        if is_free(port):
            return port
    return None
