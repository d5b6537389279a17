"""How long to wait before the next connection: full jitter, forgiven only after health (ND-5). Pure.

1. A server that refuses is asked ever more seldom: the ceiling doubles with each refusal.
2. One that cannot be reached is missed: the ceiling follows the time without a stream. A short outage is over
   for an agent soon after it is over for the server, and a long one spreads a fleet over as long as it took.
"""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """Ceilings grow from `base_s`, or half of it for an outage, to `cap_s`; waits are uniform below them."""

    def __init__(self, uniform: Callable[[float, float], float], *, base_s: float = 1.0, cap_s: float = 60.0) -> None:
        self._uniform = uniform
        self._base_s = base_s
        self._cap_s = cap_s
        self._refusals = 0
        self._lost_s = 0.0
        """Time without a stream since the last healthy one, the time that streams held left out."""

    def wait_s(self, *, reached: bool, tried_s: float = 0.0, at_least_s: float = 0.0) -> float:
        """How long to wait after an attempt that ended. `reached`: the server answered, and its answer was no.

        `tried_s`: how long the attempt took until its stream stood, or until it failed. A server's own wish is a lower
        bound, jittered on top.
        """
        self._lost_s += tried_s
        if reached:
            ceiling_s = self._base_s * 2.0 ** min(self._refusals, 32)  # 1
            self._refusals += 1
        else:
            ceiling_s = max(self._base_s / 2, self._lost_s)  # 2
        wait_s = at_least_s + self._uniform(0.0, min(self._cap_s, ceiling_s))
        self._lost_s += wait_s
        return wait_s

    def healthy(self) -> None:
        """The connection has held for its healthy period."""
        self._refusals = 0
        self._lost_s = 0.0
