"""InfiniBand and RoCE adapters from sysfs; what cannot be read of one is said of it, and hides no other (AG-2)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agent.protocol import AdapterPort, Gid, RdmaAdapter

T = TypeVar("T")
_STATE = re.compile(r"\d+: ([A-Z_]+)\Z")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
_EMPTY = re.compile(r"[0:]*\Z")
IWARP = "4:"


def read_adapters(root: Path) -> tuple[RdmaAdapter, ...]:
    """Those under `root`/sys/class/infiniband, in the order of their names; none is no error."""
    home = root / "sys/class/infiniband"
    try:
        names = sorted(os.listdir(home), key=_natural)
    except OSError:
        return ()
    return tuple(_adapter(home / name) for name in names)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """mlx5_2 before mlx5_10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name))


def _adapter(home: Path) -> RdmaAdapter:
    try:
        numbers = sorted(int(name) for name in os.listdir(home / "ports") if name.isdigit())
    except OSError as error:
        return RdmaAdapter(name=home.name, fault=f"its ports cannot be read: {error.strerror}")
    fault = "" if numbers else "it has no ports"
    if _line(home / "node_type").startswith(IWARP):
        fault = "it speaks iWARP, over which engines do not talk"
    numa = _maybe(lambda: int(_line(home / "device/numa_node")))
    return RdmaAdapter(
        name=home.name,
        numa=numa if numa is not None and numa >= 0 else None,
        ports=tuple(_port(home / "ports" / str(number), number) for number in numbers),
        fault=fault,
    )


def _port(home: Path, number: int) -> AdapterPort:
    faults: list[str] = []

    def ask(name: str, pattern: re.Pattern[str]) -> str:
        """The part of a file that `pattern` names; empty, and a fault, when there is none."""
        try:
            text = (home / name).read_text(errors="replace").strip()
        except OSError as error:
            faults.append(f"{name}: {error.strerror}")
            return ""
        found = pattern.match(text)
        if found is None:
            faults.append(f"{name}: {text[:40]!r} is not understood")
        return found[1] if found else ""

    state, rate = ask("state", _STATE), ask("rate", _RATE)
    gids = _gids(home)
    first = next((one.gid for one in gids if one.index == 0), "")
    return AdapterPort(
        number=number,
        state=state,
        rate_gbit_s=float(rate) if rate else None,
        link_layer=_line(home / "link_layer"),
        subnet_prefix=first[:19],
        sm_lid=_maybe(lambda: int(_line(home / "sm_lid"), 0)),
        network=next((name for one in gids if (name := _line(home / f"gid_attrs/ndevs/{one.index}"))), ""),
        gids=gids,
        fault="; ".join(faults),
    )


def _gids(home: Path) -> tuple[Gid, ...]:
    """The rows in use: an empty one reads all zeros, and nothing more can be asked of it."""
    try:
        indices = sorted(int(name) for name in os.listdir(home / "gids") if name.isdigit())
    except OSError:
        return ()
    rows = ((index, _line(home / f"gids/{index}")) for index in indices)
    return tuple(
        Gid(index=index, gid=gid, kind=_line(home / f"gid_attrs/types/{index}"))
        for index, gid in rows
        if not _EMPTY.match(gid)
    )


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _maybe(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except ValueError:
        return None
