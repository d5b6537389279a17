"""Forwarded headers: walked from the right over trusted hops only, ignored from everybody else."""

from __future__ import annotations

from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from hypothesis import given
from hypothesis import strategies as st
from pytest_django import Settings

from llmgw.core.csp import ContentSecurityPolicy
from llmgw.core.proxies import MAX_HOPS, TrustedProxies, base_url, client_address, forwarded_host, is_trusted

TRUSTED = ("10.0.0.2", "192.168.0.0/24", "2001:db8:1::/48")


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "client"),
    [
        ("203.0.113.9", "1.2.3.4", "203.0.113.9"),
        ("10.0.0.2", "", "10.0.0.2"),
        ("10.0.0.2", "203.0.113.10", "203.0.113.10"),
        ("10.0.0.2", "1.2.3.4, 203.0.113.10", "203.0.113.10"),
        ("10.0.0.2", "203.0.113.10, 192.168.0.7", "203.0.113.10"),
        ("10.0.0.2", "1.2.3.4, 203.0.113.10, 192.168.0.7,192.168.0.8", "203.0.113.10"),
        ("10.0.0.2", "unknown", "10.0.0.2"),
        ("10.0.0.2", "203.0.113.10, unknown", "10.0.0.2"),
        ("10.0.0.2", "unknown, 203.0.113.10", "203.0.113.10"),
        ("10.0.0.2", "[2001:db8::1]:443", "2001:db8::1"),
        ("10.0.0.2", "2001:db8::1", "2001:db8::1"),
        ("10.0.0.2", "203.0.113.10:52110", "203.0.113.10"),
        ("::ffff:10.0.0.2", "203.0.113.10", "203.0.113.10"),
        ("10.0.0.2", "203.0.113.10, ::ffff:192.168.0.7", "203.0.113.10"),
        ("10.0.0.2", ",,", "10.0.0.2"),
        ("10.0.0.2", "<script>", "10.0.0.2"),
        ("2001:db8:1::5", "203.0.113.10", "203.0.113.10"),
        ("", "203.0.113.10", ""),
        ("unix", "203.0.113.10", "unix"),
    ],
)
def test_the_client_is_the_first_hop_from_the_right_not_ours(peer: str, forwarded_for: str, client: str) -> None:
    assert client_address(peer, forwarded_for, TRUSTED) == client


@given(st.text(max_size=200))
def test_no_header_makes_an_untrusted_peer_somebody_else(header: str) -> None:
    assert client_address("203.0.113.9", header, TRUSTED) == "203.0.113.9"


@given(st.lists(st.ip_addresses().map(str), max_size=60))
def test_what_a_client_writes_in_front_changes_nothing(spoofed: list[str]) -> None:
    assert client_address("10.0.0.2", ",".join([*spoofed, "203.0.113.10"]), TRUSTED) == "203.0.113.10"


def test_ten_thousand_hops_are_not_all_walked() -> None:
    client = client_address("10.0.0.2", ",".join(["203.0.113.1"] + ["192.168.0.7"] * 10_000), TRUSTED)
    assert client == "192.168.0.7"
    assert MAX_HOPS < 100


def test_nobody_is_trusted_unless_configured() -> None:
    assert not is_trusted("127.0.0.1", ())


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("llm.example.org", "llm.example.org"),
        ("llm.example.org:8443", "llm.example.org:8443"),
        ("[2001:db8::1]:443", "[2001:db8::1]:443"),
        ("evil.example, llm.example.org", "llm.example.org"),
        ("", None),
        ("a/../b", None),
        ("localhost/health?x=", None),
        ("user@evil.example", None),
        ("x y", None),
        ("llm.example.org:port", None),
        ("-", None),
    ],
)
def test_a_forwarded_host_is_a_host_or_nothing(header: str, host: str | None) -> None:
    assert forwarded_host(header) == host


def listen(settings: Settings, **changes: Any) -> None:
    ours = settings.LLMGW
    settings.LLMGW = ours.model_copy(update={"listen": ours.listen.model_copy(update=changes)})


def seen(request: HttpRequest) -> HttpResponse:
    response = HttpResponse(f"{request.META['REMOTE_ADDR']} {request.scheme} {request.get_host()} {base_url(request)}")
    response.set_cookie("llmgw_session", "x")
    return response


HEADERS = {
    "HTTP_X_FORWARDED_FOR": "203.0.113.10",
    "HTTP_X_FORWARDED_PROTO": "https",
    "HTTP_X_FORWARDED_HOST": "llm.example.org",
}


def test_a_trusted_proxy_tells_address_scheme_and_host(settings: Settings) -> None:
    listen(settings, trusted_proxies=["10.0.0.2"])
    response = TrustedProxies(seen)(RequestFactory().get("/", REMOTE_ADDR="10.0.0.2", **HEADERS))
    assert response.content == b"203.0.113.10 https llm.example.org https://llm.example.org"
    assert response.cookies["llmgw_session"]["secure"]


def test_others_tell_nothing(settings: Settings) -> None:
    listen(settings, trusted_proxies=["10.0.0.2"])
    response = TrustedProxies(seen)(RequestFactory().get("/", REMOTE_ADDR="203.0.113.99", **HEADERS))
    assert response.content == f"203.0.113.99 http testserver {settings.LLMGW.base_url}".encode()
    assert not response.cookies["llmgw_session"]["secure"]


def test_the_shown_address_never_comes_from_the_host_header(settings: Settings) -> None:
    response = TrustedProxies(seen)(RequestFactory().get("/", HTTP_HOST="evil.example"))
    assert response.content.endswith(settings.LLMGW.base_url.encode())


def test_the_public_url_wins_over_what_a_proxy_says(settings: Settings) -> None:
    listen(settings, trusted_proxies=["10.0.0.2"], public_url="https://llm.example.com/")
    response = TrustedProxies(seen)(RequestFactory().get("/", REMOTE_ADDR="10.0.0.2", **HEADERS))
    assert response.content.endswith(b" https://llm.example.com")


def test_a_proxy_that_speaks_http_gives_an_http_address(settings: Settings) -> None:
    listen(settings, trusted_proxies=["10.0.0.2"])
    headers = HEADERS | {"HTTP_X_FORWARDED_PROTO": "https, http"}
    response = TrustedProxies(seen)(RequestFactory().get("/", REMOTE_ADDR="10.0.0.2", **headers))
    assert response.content.endswith(b" http://llm.example.org")


async def test_under_asgi_the_scheme_reaches_the_request_and_the_cookies(settings: Settings) -> None:
    listen(settings, trusted_proxies=["127.0.0.1"])

    async def view(request: HttpRequest) -> HttpResponse:
        return seen(request)

    request = AsyncRequestFactory().get(
        "/", headers={"x-forwarded-proto": "https", "x-forwarded-host": "llm.example.org"}
    )
    response = await TrustedProxies(view)(request)  # type: ignore[misc, arg-type]
    assert response.content == b"127.0.0.1 https llm.example.org https://llm.example.org"
    assert response.cookies["llmgw_session"]["secure"]


@pytest.mark.parametrize(("path", "strict"), [("/", True), ("/dashboard/", True), ("/admin/", False)])
def test_pages_allow_no_inline_scripts_but_the_admin_does(path: str, strict: bool) -> None:
    response = ContentSecurityPolicy(lambda request: HttpResponse())(RequestFactory().get(path))
    assert ("unsafe-inline" not in response["Content-Security-Policy"]) == strict
    assert "frame-ancestors 'none'" in response["Content-Security-Policy"]


async def test_the_policy_is_set_under_asgi_too() -> None:
    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    response = await ContentSecurityPolicy(view)(AsyncRequestFactory().get("/"))  # type: ignore[misc, arg-type]
    assert response["Content-Security-Policy"].startswith("default-src 'self'")
