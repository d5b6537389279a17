"""Who the client really is: forwarded headers count only when they come through a trusted proxy."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.http import HttpRequest, HttpResponse

MAX_HOPS = 32
FORWARDED = ("HTTP_X_FORWARDED_FOR", "HTTP_X_FORWARDED_PROTO", "HTTP_X_FORWARDED_HOST", "HTTP_FORWARDED")


def client_address(peer: str, forwarded_for: str, trusted: Sequence[str]) -> str:
    """Walk `X-Forwarded-For` from the right over trusted hops; the first untrusted one is the client.

    Anything that is no address ends the walk at the hop before it.
    """
    current = peer
    for hop in reversed(forwarded_for.split(",")[-MAX_HOPS:] if forwarded_for else []):
        if not is_trusted(current, trusted):
            break
        address = _address(hop)
        if address is None:
            break
        current = address
    return current


def is_trusted(peer: str, trusted: Sequence[str]) -> bool:
    address = _address(peer)
    if address is None:
        return False
    return any(ipaddress.ip_address(address) in ipaddress.ip_network(net, strict=False) for net in trusted)


def _address(text: str) -> str | None:
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


class TrustedProxies:
    """Sets REMOTE_ADDR and the scheme from a trusted proxy's headers and drops those headers otherwise."""

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        meta, trusted = request.META, settings.LLMGW.listen.trusted_proxies
        peer = meta.get("REMOTE_ADDR", "")
        if is_trusted(peer, trusted):
            meta["REMOTE_ADDR"] = client_address(peer, meta.get("HTTP_X_FORWARDED_FOR", ""), trusted)
            if meta.get("HTTP_X_FORWARDED_PROTO", "").strip().lower() == "https":
                meta["wsgi.url_scheme"] = "https"
                request.scope["scheme"] = "https"  # type: ignore[attr-defined]
        for name in FORWARDED:
            meta.pop(name, None)
        return self.get_response(request)
