"""Who the client is and by which address it reached us: forwarded headers count only through trusted proxies."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.http import HttpRequest, HttpResponse

MAX_HOPS = 32
FORWARDED = ("HTTP_X_FORWARDED_FOR", "HTTP_X_FORWARDED_PROTO", "HTTP_X_FORWARDED_HOST", "HTTP_FORWARDED")
_HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?|\[[0-9a-f:.]{2,45}\])(?::\d{1,5})?", re.IGNORECASE)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


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
    return any(ipaddress.ip_address(address) in network for network in _networks(tuple(trusted)))


def forwarded_host(text: str) -> str | None:
    """The host that the nearest proxy names, or None when it is not one."""
    host = text.rpartition(",")[2].strip()
    return host if _HOST.fullmatch(host) else None


def base_url(request: HttpRequest) -> str:
    """The address to show this person, without a trailing slash. Never made from a Host header of our own peer."""
    if settings.LLMGW.listen.public_url:
        return settings.LLMGW.base_url
    return getattr(request, "forwarded_base_url", None) or settings.LLMGW.base_url


@lru_cache(maxsize=8)
def _networks(trusted: tuple[str, ...]) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(network, strict=False) for network in trusted)


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
    """Sets address, scheme and host from a trusted proxy's headers, and drops those headers from everybody else.

    It is outermost so that cookies set further in become Secure when the person came by https.
    """

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        self.believe(request)
        if self.is_async:
            return cast(HttpResponse, self._later(request))
        return self.secure_cookies(request, self.get_response(request))

    async def _later(self, request: HttpRequest) -> HttpResponse:
        return self.secure_cookies(request, await cast(Awaitable[HttpResponse], self.get_response(request)))

    @staticmethod
    def believe(request: HttpRequest) -> None:
        meta, trusted = request.META, settings.LLMGW.listen.trusted_proxies
        peer = meta.get("REMOTE_ADDR", "")
        if is_trusted(peer, trusted):
            meta["REMOTE_ADDR"] = client_address(peer, meta.get("HTTP_X_FORWARDED_FOR", ""), trusted)
            secure = meta.get("HTTP_X_FORWARDED_PROTO", "").rpartition(",")[2].strip().lower() == "https"
            if secure:
                meta["wsgi.url_scheme"] = "https"
                if (scope := getattr(request, "scope", None)) is not None:
                    scope["scheme"] = "https"
            if host := forwarded_host(meta.get("HTTP_X_FORWARDED_HOST", "")):
                meta["HTTP_HOST"] = host
                request.forwarded_base_url = f"{'https' if secure else 'http'}://{host}"  # type: ignore[attr-defined]
        for name in FORWARDED:
            meta.pop(name, None)

    @staticmethod
    def secure_cookies(request: HttpRequest, response: HttpResponse) -> HttpResponse:
        if request.is_secure():
            for cookie in response.cookies.values():
                cookie["secure"] = True
        return response
