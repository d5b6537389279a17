"""Which network interface holds an address, asked of the kernel over netlink: NCCL and Gloo want to know."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_address, ip_interface

log = logging.getLogger(__name__)

_GET_ADDRESSES, _DONE, _ERROR = 22, 3, 2
_REQUEST_DUMP = 0x301
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_BODY = struct.Struct("=BBBBi")  # family, prefix length, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")
_ADDRESS, _LOCAL = 1, 2
LIMIT_S = 2.0
MAX_READS = 1024


@dataclass(frozen=True, slots=True)
class Held:
    interface: str
    network: IPv4Interface | IPv6Interface


def holding(address: str) -> str:
    """The interface that holds `address`; empty where none does, or the kernel does not say."""
    try:
        wanted = ip_address(address)
    except ValueError:
        return ""
    try:
        held = list(all_held())
    except OSError as error:
        log.warning("The network interfaces of this machine cannot be listed: %s", error)
        return ""
    return find(wanted, held)


def find(wanted: IPv4Address | IPv6Address, held: list[Held]) -> str:
    """Where it is written down; the loopback interface holds all of its network."""
    exact = [one.interface for one in held if one.network.ip == wanted]
    around = [one.interface for one in held if wanted.is_loopback and wanted in one.network.network]
    return next(iter((*exact, *around)), "")


def all_held() -> Iterator[Held]:
    """Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        link.settimeout(LIMIT_S)
        body = _BODY.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        link.send(_HEADER.pack(_HEADER.size + len(body), _GET_ADDRESSES, _REQUEST_DUMP, 1, 0) + body)
        for _ in range(MAX_READS):
            for kind, message in _messages(link.recv(65536)):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("=i", message)[0], "the kernel refuses to list addresses")
                yield from _held(message)


def _messages(received: bytes) -> Iterator[tuple[int, bytes]]:
    while len(received) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(received)
        yield kind, received[_HEADER.size : length]
        received = received[_aligned(max(length, _HEADER.size)) :]


def _held(message: bytes) -> Iterator[Held]:
    family, prefix, _, _, index = _BODY.unpack_from(message)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return
    found = dict(_attributes(message[_BODY.size :]))
    packed = found.get(_LOCAL) or found.get(_ADDRESS)  # of a point-to-point link, the latter is the other end's
    if packed:
        try:
            name = socket.if_indextoname(index)
        except OSError:  # gone meanwhile
            return
        yield Held(name, ip_interface((packed, prefix)))


def _attributes(rest: bytes) -> Iterator[tuple[int, bytes]]:
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        yield kind, rest[_ATTRIBUTE.size : length]
        rest = rest[_aligned(max(length, _ATTRIBUTE.size)) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
