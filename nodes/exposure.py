"""Whether agents come with join tokens where strangers may listen: said at start and in the summary (ND-4). Pure."""

from __future__ import annotations

import ipaddress


def exposed(host: str, port: int, *, join_tokens: bool) -> str:
    """What to know and to do about it; empty while nobody but a trusted network reaches `host`."""
    if not join_tokens or not _public(host):
        return ""
    where = f"port {port} of every address of this machine" if host in ("", "0.0.0.0", "::") else f"{host}:{port}"  # noqa: S104
    return (
        f"Agents may come with join tokens to {where}, where others may listen in and hear the tokens. "
        "Use certificates (llmgw server ca) and set agents.join_tokens to false, or listen on a trusted network only."
    )


def _public(host: str) -> bool:
    """Loopback and private addresses are a trusted network, as far as an address tells."""
    if host == "localhost":
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True
    return address.is_unspecified or not (address.is_loopback or address.is_private or address.is_link_local)
