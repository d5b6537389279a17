"""How long to wait before the next connection: exponential, full jitter, forgiven only after health (ND-5). Pure."""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """Bounds grow from `base_s` to `cap_s` with each failure in a row; waits are uniform below the bound."""

    def __init__(self, uniform: Callable[[float, float], float], *, base_s: float = 1.0, cap_s: float = 60.0) -> None:
        self._uniform = uniform
        self._base_s = base_s
        self._cap_s = cap_s
        self._failures = 0

    def wait_s(self, *, at_least_s: float = 0.0) -> float:
        """Count one more failure and say how long to wait; a server's own wish is a lower bound, jittered on top."""
        bound = min(self._cap_s, self._base_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return at_least_s + self._uniform(0.0, bound)

    def healthy(self) -> None:
        """The connection has held for its healthy period."""
        self._failures = 0
