"""How numbers, sizes and times read on pages and in the command line. Pure; `None` is unknown and reads "–"."""

from __future__ import annotations

from datetime import datetime, timedelta

UNKNOWN = "–"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None, digits: int = 0) -> str:
    """1234567 -> "1,234,567"; at most `digits` decimals, none when they would be zeros."""
    if value is None:
        return UNKNOWN
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(value: float | None) -> str:
    """Bytes in binary units, three figures: 98.3 MiB."""
    if value is None:
        return UNKNOWN
    step = 0
    while abs(value) >= 1024 and step < len(_UNITS) - 1:
        value, step = value / 1024, step + 1
    return f"{number(value, 0 if step == 0 or abs(value) >= 100 else 1)} {_UNITS[step]}"


def milliseconds(value: float | None) -> str:
    """285 ms, 1.8 s, 3 min 5 s."""
    if value is None:
        return UNKNOWN
    if value < 1000:
        return f"{number(value)} ms"
    if value < 60_000:
        return f"{number(value / 1000, 1)} s"
    return span(timedelta(milliseconds=value))


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{number(value)} %"


def span(length: timedelta) -> str:
    """The two largest units: 2 d 3 h, 3 h 12 min, 1 min 40 s, 12 s."""
    seconds = max(int(length.total_seconds()), 0)
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    while len(parts) > 1 and not parts[0][0]:
        del parts[0]
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count) or "0 s"


def ago(at: datetime | None, now: datetime) -> str:
    """ "just now", "3 min ago", "in 40 s"; only the largest unit, so that it does not flicker."""
    if at is None:
        return "never"
    past = now - at
    if abs(past) < timedelta(seconds=2):
        return "just now"
    text = " ".join(span(abs(past)).split()[:2])
    return f"{text} ago" if past > timedelta(0) else f"in {text}"
