"""How long a profile that failed is left alone: doubling, jittered, bounded (ND-42). Pure."""

from __future__ import annotations

import hashlib
from datetime import timedelta

FIRST = timedelta(seconds=2)
LONGEST = timedelta(minutes=5)
HEALTHY = timedelta(minutes=2)
"""How long a replica must have been ready for earlier failures to be forgotten."""


def delay(failures: int, jitter: float) -> timedelta:
    """The wait after the nth failure in a row, n from 1. `jitter` (0 to 1) adds up to half; it grows with n."""
    doublings = min(failures - 1, 20)
    wait_s = FIRST.total_seconds() * float(2**doublings) * (1 + jitter / 2)
    return min(timedelta(seconds=wait_s), LONGEST)


def jitter_of(*words: str) -> float:
    """A number from 0 to 1 that is always the same for the same words, and differs between profiles and tries."""
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:4]) / 2**32
