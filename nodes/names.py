"""What a node may be called, and how many names a sentence holds. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

NODE_NAME = re.compile(r"\A[A-Za-z0-9](?:[A-Za-z0-9._-]{0,118}[A-Za-z0-9])?\Z")
"""A certificate and an address can carry it."""


def some(names: Sequence[str], most: int) -> str:
    """The first `most` of them, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
