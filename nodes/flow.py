"""How much agents may say: for each node a bucket of tokens that fills as time passes (ND-6). Pure.

Generous: a node whose every shard goes through all its states at once passes, and one that does so for ever does not.
"""

from __future__ import annotations

from agent import protocol

MOST = 8.0 * protocol.MAX_SHARDS
"""A message takes one token, and one more for each TOKEN_BYTES of it."""
A_SECOND = 50.0
TOKEN_BYTES = 16 * 1024


class Flow:
    """By node, so that a new stream is no fresh start. Times are of any clock that only goes forward, in seconds."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """Tokens, and when there were so many. Full buckets are not kept."""

    def take(self, node: str, size_bytes: int, now: float) -> bool:
        """Whether `node` may say so much now."""
        if node not in self._left:
            self._left = {name: kept for name, kept in self._left.items() if _filled(kept, now) < MOST}
        left = _filled(self._left.get(node, (MOST, now)), now)
        wanted = 1 + size_bytes / TOKEN_BYTES
        allowed = wanted <= left
        self._left[node] = (left - wanted if allowed else left, now)
        return allowed


def _filled(kept: tuple[float, float], now: float) -> float:
    left, at = kept
    return min(MOST, left + max(0.0, now - at) * A_SECOND)
