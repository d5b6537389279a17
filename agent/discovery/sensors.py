"""Temperatures, fans and power from hwmon; a sensor that does not answer is unknown, and hides no other (AG-3)."""

from __future__ import annotations

import re
from pathlib import Path

from agent.protocol import Sensor

_INPUT = re.compile(r"(temp|fan|power|in|curr)(\d+)_(input|average)\Z")
_UNITS = {"temp": ("°C", 1e3), "fan": ("rpm", 1.0), "power": ("W", 1e6), "in": ("V", 1e3), "curr": ("A", 1e3)}
MAX_SENSORS = 64


def read_sensors(root: Path) -> tuple[Sensor, ...]:
    """At most MAX_SENSORS readings of the chips under `root`, in a stable order."""
    found: dict[str, Sensor] = {}
    try:
        chips = sorted(root.iterdir())
    except OSError:
        return ()
    for chip in chips:
        name = _text(chip / "name") or chip.name
        try:
            inputs = sorted(path for path in chip.iterdir() if _INPUT.match(path.name))
        except OSError:
            continue
        for path in inputs:
            parts = _INPUT.match(path.name)
            assert parts
            kind, number, _ = parts.groups()
            label = _text(chip / f"{kind}{number}_label") or f"{kind}{number}"
            unit, scale = _UNITS[kind]
            key = f"{name} {label}"
            if key in found:
                key = f"{chip.name} {key}"
            found.setdefault(key, Sensor(name=key, value=_number(path, scale), unit=unit))
    return tuple(found.values())[:MAX_SENSORS]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _number(path: Path, scale: float) -> float | None:
    try:
        return round(int(_text(path) or "") / scale, 3)
    except ValueError:
        return None
