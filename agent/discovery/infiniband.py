"""InfiniBand and RoCE adapters from sysfs; what cannot be read of one is said of it, and hides no other (AG-2)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import TypeVar

from agent.protocol import AdapterPort, Gid, RdmaAdapter

T = TypeVar("T")
_STATE = re.compile(r"\d+: ([A-Z_]+)\Z")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
_EMPTY = re.compile(r"[0:]*\Z")
IWARP = "4:"
Route = tuple[str, IPv4Network]
"""An interface, and a network that it is in."""


def read_adapters(root: Path) -> tuple[RdmaAdapter, ...]:
    """Those under `root`/sys/class/infiniband, in the order of their names; none is no error."""
    home = root / "sys/class/infiniband"
    try:
        names = sorted(os.listdir(home), key=_natural)
    except OSError:
        return ()
    routes = tuple(_routes(root / "proc/net/route"))
    return tuple(_adapter(home / name, routes) for name in names)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """mlx5_2 before mlx5_10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name))


def _adapter(home: Path, routes: Sequence[Route]) -> RdmaAdapter:
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
        ports=tuple(_port(home / "ports" / str(number), number, routes) for number in numbers),
        fault=fault,
    )


def _port(home: Path, number: int, routes: Sequence[Route]) -> AdapterPort:
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
    gids, link_layer = _gids(home), _line(home / "link_layer")
    first = next((one.gid for one in gids if one.index == 0), "")
    interface, network = _network(home, gids, routes)
    return AdapterPort(
        number=number,
        state=state,
        rate_gbit_s=float(rate) if rate else None,
        link_layer=link_layer,
        subnet_prefix=network if link_layer == "Ethernet" else first[:19],
        sm_lid=_maybe(lambda: int(_line(home / "sm_lid"), 0)),
        network=interface,
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


def _network(home: Path, gids: Sequence[Gid], routes: Sequence[Route]) -> tuple[str, str]:
    """The interface behind a port and the IPv4 network that it is in; empty where there is none, or none is seen."""
    named = [(name, one) for one in gids if (name := _line(home / f"gid_attrs/ndevs/{one.index}"))]
    for name, one in named:
        address = _ipv4(one.gid)
        for interface, network in routes:
            if interface == name and address is not None and address in network:
                return name, str(network)
    return (named[0][0] if named else ""), ""


def _ipv4(gid: str) -> IPv4Address | None:
    address = _maybe(lambda: IPv6Address(gid))
    return address.ipv4_mapped if address else None


def _routes(path: Path) -> Iterator[Route]:
    """The networks that interfaces are in: what is reached without a gateway."""
    for line in _line(path).splitlines()[1:]:
        words = line.split()
        network = _maybe(lambda words=words: _destination(words))  # type: ignore[misc]
        if network is not None:
            yield words[0], network


def _destination(words: Sequence[str]) -> IPv4Network | None:
    """Of a line of /proc/net/route: interface, destination, gateway, four figures, mask. Raises ValueError."""
    if len(words) < 8 or words[2].strip("0"):
        return None
    network = IPv4Network(f"{_address(words[1])}/{_address(words[7])}")
    return network if network.prefixlen else None


def _address(hexadecimal: str) -> IPv4Address:
    """The kernel writes them in the machine's byte order."""
    octets = bytes.fromhex(hexadecimal)
    return IPv4Address(octets[::-1] if sys.byteorder == "little" else octets)


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
