"""Lengths of time as people write them: `20m`, `1h30m`, `500ms`, or a bare number of seconds. Pure."""

from __future__ import annotations

import re

UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_TEXT = re.compile(r"\s*(?:\d{1,15}(?:\.\d{1,6})?\s*(?:ms|d|h|m|s)\s*)+\Z")
_PART = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(ms|d|h|m|s)")
MAX_MS = 2**53


def read_ms(value: object) -> int | None:
    """Whole milliseconds, rounded up so that no written time becomes none; None for what is not a length of time."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        exact: float = value * 1000 if abs(value) < MAX_MS else MAX_MS
    elif isinstance(value, str) and _TEXT.match(value):
        exact = sum(float(number) * UNITS_MS[unit] for number, unit in _PART.findall(value))
    else:
        return None
    if exact != exact or abs(exact) >= MAX_MS:
        return None
    whole = int(exact)
    return whole + 1 if exact > whole else whole


def write_ms(value: int) -> str:
    """The shortest text that `read_ms` reads back: `1h30m`, `1500ms`. `value` is not negative."""
    if value % 1000:
        return f"{value}ms"
    parts: list[str] = []
    rest = value
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, UNITS_MS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
