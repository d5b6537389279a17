"""What NCCL and Gloo are told about the network between ranks (AG-13). Pure.

Without a word of ours NCCL takes any adapter it likes, and where it finds none falls silently back to sockets.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import AddressValueError, IPv6Address

from agent.host import Host
from agent.protocol import AdapterPort

ROCE = "Ethernet"
ROCE_V2 = "RoCE v2"


def environment(fabric: str, host: Host) -> tuple[tuple[str, str], ...]:
    """For one rank on `host`. `fabric`: the one that its replica spans nodes over; empty: none."""
    found: list[tuple[str, str]] = []
    if host.interface:
        # For NCCL a name is a prefix unless it is marked as exact; Gloo knows no marks.
        found += [("NCCL_SOCKET_IFNAME", f"={host.interface}"), ("GLOO_SOCKET_IFNAME", host.interface)]
    chosen = host.fabric(fabric)
    if chosen is None:
        return (*found, ("NCCL_IB_DISABLE", "1"))
    found += [("NCCL_NET", "IB"), ("NCCL_IB_HCA", "=" + ",".join(chosen.adapters))]
    if chosen.link_layer == ROCE:
        ports = [port for each in host.adapters if each.name in chosen.adapters for port in each.ports]
        index = _gid_index(port for port in ports if port.state == "ACTIVE")
        found += [("NCCL_IB_GID_INDEX", str(index))] if index is not None else []
    return tuple(found)


def _gid_index(ports: Iterable[AdapterPort]) -> int | None:
    """The row of the RoCE v2 entry with an IPv4 address; None where ports differ, as NCCL finds each port's own."""
    rows = {next((gid.index for gid in port.gids if gid.kind == ROCE_V2 and _is_ipv4(gid.gid)), None) for port in ports}
    return rows.pop() if len(rows) == 1 else None


def _is_ipv4(gid: str) -> bool:
    try:
        return IPv6Address(gid).ipv4_mapped is not None
    except AddressValueError:
        return False
