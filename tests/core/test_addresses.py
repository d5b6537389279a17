"""Which URLs an endpoint may have, and which addresses a provider may resolve to."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core import addresses
from llmgw.core.addresses import Address, AddressError, parse, refused


@pytest.mark.parametrize(
    ("url", "address", "authority"),
    [
        ("https://provider.example/v1", Address(True, "provider.example", 443, "/v1"), "provider.example"),
        ("https://Provider.Example:443/v1/", Address(True, "provider.example", 443, "/v1"), "provider.example"),
        ("http://10.0.0.5:8000", Address(False, "10.0.0.5", 8000), "10.0.0.5:8000"),
        ("http://engine", Address(False, "engine", 80), "engine"),
        ("https://[2001:db8::1]:8443/a/b", Address(True, "2001:db8::1", 8443, "/a/b"), "[2001:db8::1]:8443"),
    ],
)
def test_a_url_is_read_into_its_parts(url: str, address: Address, authority: str) -> None:
    assert parse(url) == address
    assert address.authority == authority


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "Write an address such as"),
        ("ftp://x", "Write an address such as"),
        ("file:///etc/passwd", "Write an address such as"),
        ("provider.example/v1", "Write an address such as"),
        ("https://", "Write an address such as"),
        ("https://x:0", "Write an address such as"),
        ("https://x:99999", "It is not an address"),
        ("http://[::1", "It is not an address"),
        ("https://me:secret@x", "user name or password"),
        ("https://me@x", "user name or password"),
        ("https://x/?a=b", "without ?, #"),
        ("https://x/#", "without ?, #"),
        ("https://x\\@y", "user name or password"),
        ("https://x/\\y", "without ?, #"),
        ("https://x y", "plain ASCII"),
        ("https://x\r\nHost: y", "plain ASCII"),
        ("https://bücher.example", "plain ASCII"),
        ("https://" + "x" * 1000, "plain ASCII"),
        ("https://exa%6dple.com", "neither a name nor a number"),
        ("https://[fe80::1%25eth0]/", "neither a name nor a number"),
    ],
)
def test_a_url_that_no_endpoint_can_have_is_refused_without_repeating_it(url: str, says: str) -> None:
    with pytest.raises(AddressError, match=says.replace("?", r"\?")) as caught:
        parse(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "word", "with_private"),
    [
        ("8.8.8.8", None, None),
        ("2606:4700::1111", None, None),
        ("64:ff9b::808:808", None, None),
        ("127.0.0.1", "a loopback", None),
        ("127.9.9.9", "a loopback", None),
        ("::1", "a loopback", None),
        ("::ffff:127.0.0.1", "a loopback", None),
        ("64:ff9b::7f00:1", "a loopback", None),
        ("10.1.2.3", "a private", None),
        ("172.31.255.255", "a private", None),
        ("192.168.0.1", "a private", None),
        ("::ffff:10.0.0.1", "a private", None),
        ("fd12::1", "a private", None),
        ("100.64.0.1", "a shared (carrier NAT)", None),
        ("0.0.0.0", "an unspecified", "an unspecified"),
        ("0.1.2.3", "an unspecified", "an unspecified"),
        ("::", "an unspecified", "an unspecified"),
        ("169.254.1.1", "a link-local", "a link-local"),
        ("fe80::1%eth0", "a link-local", "a link-local"),
        ("169.254.169.254", "a metadata", "a metadata"),
        ("::ffff:169.254.169.254", "a metadata", "a metadata"),
        ("64:ff9b::a9fe:a9fe", "a metadata", "a metadata"),
        ("100.100.100.200", "a metadata", "a metadata"),
        ("fd00:ec2::254", "a metadata", "a metadata"),
        ("224.0.0.1", "a multicast", "a multicast"),
        ("ff02::1", "a multicast", "a multicast"),
        ("255.255.255.255", "a reserved", "a reserved"),
        ("2001:0:53aa::1", "a reserved", "a reserved"),
        ("2002:7f00:1::", "a reserved", "a reserved"),
        ("::7f00:1", "a reserved", "a reserved"),
        ("64:ff9b:1::1", "a reserved", "a reserved"),
        ("203.0.113.7", "a documentation", "a documentation"),
        ("provider.example", "an unknown", "an unknown"),
        ("2130706433", "an unknown", "an unknown"),
    ],
)
def test_where_a_provider_may_be(address: str, word: str | None, with_private: str | None) -> None:
    assert refused(address, private=False) == word
    assert refused(address, private=True) == with_private


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_judged_the_same_however_ipv6_carries_it(address: ipaddress.IPv4Address) -> None:
    for private in (False, True):
        alone = refused(str(address), private=private)
        assert refused(f"::ffff:{address}", private=private) == alone
        assert refused(str(ipaddress.IPv6Address((0x64FF9B << 96) | int(address))), private=private) == alone


@given(st.ip_addresses())
def test_what_the_registries_call_not_global_is_never_sent_to(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    word = refused(str(address), private=False)
    carried = isinstance(address, ipaddress.IPv6Address) and any(address in net for net in addresses._CARRYING_4)
    assert word is not None or address.is_global or carried
    assert refused(str(address), private=True) in (None, word)


@pytest.mark.parametrize("spelling", ["2130706433", "0x7f.1", "017700000001", "127.1", "0"])
def test_an_odd_spelling_resolves_to_what_is_refused(spelling: str) -> None:
    found = {str(each[4][0]) for each in socket.getaddrinfo(spelling, 80, type=socket.SOCK_STREAM)}
    assert all(refused(address, private=False) for address in found)
    assert found
