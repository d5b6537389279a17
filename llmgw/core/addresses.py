"""Addresses on the network: whether an endpoint's URL can be meant at all, and where a provider may not be. Pure.

What is refused follows IANA's registries of special-purpose addresses, and the addresses at which clouds answer with
credentials to whoever asks from inside.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import urlsplit

MAX_URL = 1000
PORTS = {"http": 80, "https": 443}
UNKNOWN = "an unknown"
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}\Z|[0-9A-Fa-f:.]{2,45}\Z")


class AddressError(ValueError):
    """A URL that no endpoint can have; `str()` is the whole sentence."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an endpoint listens. `path` is what stands before every path there, without a slash at its end."""

    tls: bool
    host: str
    port: int
    path: str = ""

    @property
    def authority(self) -> str:
        """As it stands in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS["https" if self.tls else "http"] else f"{host}:{self.port}"


def parse(url: str) -> Address:
    """Raises AddressError, which never repeats the URL: it could hold a password."""
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise AddressError(f"Write the address in plain ASCII without blanks, {MAX_URL} characters at most.")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressError(f"It is not an address: {str(error).partition(':')[0]}.") from None
    if parts.username is not None or parts.password is not None:
        raise AddressError("It holds a user name or password; put the key into a file and name that file instead.")
    if parts.scheme not in PORTS or not parts.hostname or port == 0:
        raise AddressError("Write an address such as https://provider.example/v1.")
    if "?" in url or "#" in url or "\\" in url:
        raise AddressError("Write the address alone, without ?, # or \\.")
    if not _HOST.match(parts.hostname):
        raise AddressError("Its host is neither a name nor a number; write one such as provider.example.")
    return Address(parts.scheme == "https", parts.hostname, port or PORTS[parts.scheme], parts.path.rstrip("/"))


# --- which addresses a provider may have -----------------------------------------------------------------------------
_METADATA = frozenset(
    ipaddress.ip_address(each)
    for each in (
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd20:ce::254",
    )
)
_INSIDE_4 = {
    "127.0.0.0/8": "a loopback",
    "10.0.0.0/8": "a private",
    "172.16.0.0/12": "a private",
    "192.168.0.0/16": "a private",
    "100.64.0.0/10": "a shared (carrier NAT)",
    "198.18.0.0/15": "a private (benchmark)",
}
_NEVER_4 = {
    "0.0.0.0/8": "an unspecified",
    "169.254.0.0/16": "a link-local",
    "192.0.0.0/24": "a reserved",
    "192.0.2.0/24": "a documentation",
    "192.88.99.0/24": "a reserved",
    "198.51.100.0/24": "a documentation",
    "203.0.113.0/24": "a documentation",
    "224.0.0.0/4": "a multicast",
    "240.0.0.0/4": "a reserved",
}
_INSIDE_6 = {"::1/128": "a loopback", "fc00::/7": "a private", "fec0::/10": "a private"}
_NEVER_6 = {
    "::/128": "an unspecified",
    "fe80::/10": "a link-local",
    "ff00::/8": "a multicast",
    "2001::/23": "a reserved",
    "2001:db8::/32": "a documentation",
    "2002::/16": "a reserved",
    "3fff::/20": "a documentation",
}
_INSIDE = [(ipaddress.ip_network(net), word) for net, word in (*_INSIDE_4.items(), *_INSIDE_6.items())]
_NEVER = [(ipaddress.ip_network(net), word) for net, word in (*_NEVER_4.items(), *_NEVER_6.items())]
_PUBLIC_6 = IPv6Network("2000::/3")
_CARRYING_4 = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))
"""An IPv4 address as IPv6 writes it, and as NAT64 reaches it."""


def refused(address: str, *, private: bool) -> str | None:
    """Why nothing is sent to this IP address, as "a loopback" or the like; None when something may be.

    `private`: whether the operator lets providers be inside. Link-local, metadata and multicast addresses never may.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return UNKNOWN
    if isinstance(found, IPv6Address) and any(found in network for network in _CARRYING_4):
        found = IPv4Address(int(found) & 0xFFFFFFFF)
    if found in _METADATA:
        return "a metadata"
    if word := _word(found, _NEVER):
        return word
    if word := _word(found, _INSIDE):
        return None if private else word
    return None if isinstance(found, IPv4Address) or found in _PUBLIC_6 else "a reserved"


def _word(address: IPv4Address | IPv6Address, networks: list[tuple[IPv4Network | IPv6Network, str]]) -> str | None:
    return next((word for network, word in networks if address in network), None)
