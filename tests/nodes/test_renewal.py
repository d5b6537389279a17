"""Agents' certificates are renewed over their streams: for whom, by whom, how often, and what ends them (ND-4)."""

from __future__ import annotations

import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from agent import protocol
from llmgw.ops import pki
from nodes import asides, identity
from nodes.consumers import AgentStream
from nodes.models import Certificate, Event, Node
from nodes.signing import NotSigned, Sign, Signed
from tenants.audit import SYSTEM
from tenants.models import AuditEntry
from tests.nodes.test_attacks import race
from tests.nodes.test_identity import admitted
from tests.nodes.test_identity import connected as connected_anew
from tests.nodes.test_stream import LIMIT_S, a_register, heard, in_db, refusal, tell
from tests.nodes.test_stream import connected as with_token
from tests.nodes.test_stream import token as token

pytestmark = pytest.mark.django_db(transaction=True)
OLD = timedelta(days=pki.LEAF_DAYS * 2 / 3)
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@pytest.fixture
def authority(tmp_path: Path) -> pki.Authority:
    return pki.open_or_make(tmp_path / "authority")[0]


@pytest.fixture
def sign(authority: pki.Authority) -> Sign:
    return pki.signer(authority.directory)


def a_request(*names: str, key: Key | None = None) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    asked = x509.CertificateSigningRequestBuilder().subject_name(subject)
    signed = asked.sign(key or ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


async def admitted_long_ago(authority: pki.Authority, name: str = "one") -> pki.Issued:
    issued = await admitted(authority, name)
    await Certificate.objects.filter(serial=issued.serial).aupdate(
        made_at=timezone.now() - OLD, expires_at=timezone.now() + OLD / 2
    )
    return issued


@asynccontextmanager
async def registered(certificate: pki.Issued, sign: Sign) -> AsyncIterator[WebsocketCommunicator]:
    link = WebsocketCommunicator(AgentStream.as_asgi(sign=sign), protocol.PATH)
    link.scope["extensions"] = {"tls": {"client_cert_chain": [certificate.certificate.decode()]}}
    assert (await link.connect(timeout=LIMIT_S))[0]
    await tell(link, a_register())
    assert await heard(link) == protocol.Welcome(node="one", heartbeat_s=5, renews=True)
    try:
        yield link
    finally:
        await link.disconnect(timeout=LIMIT_S)


async def answer(link: WebsocketCommunicator, request: str) -> protocol.Down:
    await tell(link, protocol.CertificateRequest(request=request))
    return await heard(link)


async def not_renewed(link: WebsocketCommunicator, request: str) -> str:
    found = await answer(link, request)
    assert isinstance(found, protocol.NotRenewed)
    return found.reason


async def test_an_agent_is_given_another_certificate_that_proves_it_and_the_old_one_goes_on_proving_it(
    authority: pki.Authority, sign: Sign
) -> None:
    old = await admitted_long_ago(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    async with registered(old, sign) as link:
        made = await answer(link, a_request("one", key=key))
        assert isinstance(made, protocol.Certificate)
        shown = x509.load_pem_x509_certificate(made.certificate.encode())
        assert shown.public_key() == key.public_key()
        assert await link.receive_nothing(timeout=0.1)
    new = pki.Issued(made.certificate.encode(), b"", "", timezone.now())
    for certificate in (old, new):
        async with connected_anew(certificate) as link:
            await tell(link, a_register())
            assert isinstance(await heard(link), protocol.Welcome)
    assert await AuditEntry.objects.filter(action="renew certificate", target="one").acount() == 1
    event = await Event.objects.filter(kind="certificate").alatest("pk")
    assert event.text.startswith("Node one renewed its certificate, which holds until")


async def test_revoking_a_node_covers_the_certificates_that_it_renewed(authority: pki.Authority, sign: Sign) -> None:
    old = await admitted_long_ago(authority)
    async with registered(old, sign) as link:
        made = await answer(link, a_request("one"))
        assert isinstance(made, protocol.Certificate)
        node = await Node.objects.aget()
        assert await in_db(identity.revoke_certificates, node=node, actor=SYSTEM) == 2
        assert "was revoked" in await refusal(link)
    async with connected_anew(pki.Issued(made.certificate.encode(), b"", "", timezone.now())) as link:
        assert "it was revoked, or its node removed" in await refusal(link)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (lambda: a_request("two"), "the request is for two, and the stream is node one's"),
        (lambda: a_request(), "the request is for nobody, and the stream is node one's"),
        (lambda: a_request("one", "two"), "the request is for one, two, and the stream is node one's"),
        (lambda: "nonsense", "the request is none that can be read"),
        (lambda: a_request("one", key=ec.generate_private_key(ec.SECP384R1())), "of the kind that is taken (P-256)"),
        (lambda: a_request("one", key=rsa.generate_private_key(65537, 2048)), "of the kind that is taken (P-256)"),
    ],
)
async def test_only_a_sound_request_in_the_name_of_the_stream_is_signed(
    authority: pki.Authority, sign: Sign, request_: Any, says: str
) -> None:
    async with registered(await admitted_long_ago(authority), sign) as link:
        assert says in await not_renewed(link, request_())
    assert await Certificate.objects.acount() == 1


async def test_a_request_that_its_key_did_not_sign_is_refused(authority: pki.Authority) -> None:
    der = bytearray(x509.load_pem_x509_csr(a_request("one").encode()).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    forged = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM).decode()
    current = authority.issue_node("one").certificate.decode()
    answered = authority.sign_request("one", forged, current)
    assert isinstance(answered, NotSigned)
    assert "not signed with a key" in answered.reason


def test_whatever_a_request_holds_is_answered_and_signed_for_nobody_else(authority: pki.Authority) -> None:
    current = authority.issue_node("one").certificate.decode()
    der = x509.load_pem_x509_csr(a_request("one").encode()).public_bytes(serialization.Encoding.DER)

    @given(st.lists(st.tuples(st.integers(0, len(der) - 1), st.integers(0, 255)), min_size=1, max_size=4))
    def tried(changes: list[tuple[int, int]]) -> None:
        spoilt = bytearray(der)
        for place, value in changes:
            spoilt[place] = value
        pem = ssl.DER_cert_to_PEM_cert(bytes(spoilt)).replace("CERTIFICATE", "CERTIFICATE REQUEST")
        answered = authority.sign_request("one", pem, current)
        assert isinstance(answered, NotSigned) or bytes(spoilt) == der

    tried()


async def test_a_request_that_is_too_long_ends_the_stream(authority: pki.Authority, sign: Sign) -> None:
    async with registered(await admitted_long_ago(authority), sign) as link:
        await tell(link, protocol.CertificateRequest(request="x" * (protocol.MAX_REQUEST + 1)))
        assert "8193 characters of a certificate request are more than 8192" in await refusal(link)


async def test_a_certificate_that_holds_for_long_is_not_renewed(authority: pki.Authority, sign: Sign) -> None:
    async with registered(await admitted(authority, "one"), sign) as link:
        assert "which is too long for another" in await not_renewed(link, a_request("one"))


async def test_a_node_is_given_one_at_a_time_and_not_without_end(authority: pki.Authority, sign: Sign) -> None:
    old = await admitted_long_ago(authority)
    async with registered(old, sign) as link:
        for count in range(2, identity.MOST_HELD + 1):
            assert isinstance(await answer(link, a_request("one")), protocol.Certificate)
            assert "less than 60 min ago; ask again later" in await not_renewed(link, a_request("one"))
            assert await Certificate.objects.acount() == count
            await Certificate.objects.exclude(serial=old.serial).aupdate(made_at=timezone.now() - timedelta(hours=2))
        assert "holds 8 certificates already" in await not_renewed(link, a_request("one"))


async def test_certificates_that_ended_are_forgotten_when_another_is_made(authority: pki.Authority, sign: Sign) -> None:
    old, ended = await admitted_long_ago(authority), await admitted_long_ago(authority)
    await Certificate.objects.filter(serial=ended.serial).aupdate(expires_at=timezone.now() - timedelta(days=1))
    async with registered(old, sign) as link:
        assert isinstance(await answer(link, a_request("one")), protocol.Certificate)
    assert not await Certificate.objects.filter(serial=ended.serial).aexists()


async def test_a_control_plane_without_the_authoritys_key_says_so(authority: pki.Authority, sign: Sign) -> None:
    issued = await admitted_long_ago(authority)
    (authority.directory / pki.CA_KEY).rename(authority.directory / "elsewhere")
    async with registered(issued, sign) as link:
        reason = await not_renewed(link, a_request("one"))
        assert "this control plane does not hold the authority's key (ca.key)" in reason
        assert "llmgw node add one --renew" in reason
        (authority.directory / pki.CA_KEY).write_text("nonsense")
        assert "the control plane's authority cannot sign" in await not_renewed(link, a_request("one"))


async def test_an_authority_that_did_not_issue_the_old_one_issues_no_new_one(
    authority: pki.Authority, tmp_path: Path
) -> None:
    other, _ = pki.open_or_make(tmp_path / "other")
    async with registered(await admitted_long_ago(authority), pki.signer(other.directory)) as link:
        assert "another authority issued the certificate of one" in await not_renewed(link, a_request("one"))


async def test_a_stream_with_a_token_renews_nothing(token: str) -> None:
    async with with_token(token) as link:
        await tell(link, a_register())
        welcome = await heard(link)
        assert isinstance(welcome, protocol.Welcome)
        assert not welcome.renews
        assert "this stream came without a certificate" in await not_renewed(link, a_request("one"))


async def test_a_certificate_that_its_agent_never_came_with_quiets_no_alert(
    authority: pki.Authority, sign: Sign
) -> None:
    old = await admitted_long_ago(authority)
    await Certificate.objects.aupdate(expires_at=timezone.now() + timedelta(days=20))
    async with registered(old, sign) as link:
        made = await answer(link, a_request("one"))
        assert isinstance(made, protocol.Certificate)
    assert [each.node for each in await in_db(asides.ending, timezone.now())] == ["one"]
    async with connected_anew(pki.Issued(made.certificate.encode(), b"", "", timezone.now())) as link:
        await tell(link, a_register())
        await heard(link)
    assert await in_db(asides.ending, timezone.now()) == ()


def test_no_certificate_survives_a_revocation_that_comes_at_the_same_moment(authority: pki.Authority) -> None:
    node = Node.objects.create(name="one")
    old = authority.issue_node("one")
    identity.admit_certificate(name="one", serial=old.serial, expires_at=old.expires_at, actor=SYSTEM)
    Certificate.objects.update(made_at=timezone.now() - OLD, expires_at=timezone.now() + OLD / 2)
    proof = identity.Proof(node, "certificate", old.serial, old.certificate.decode())
    given: list[Signed | NotSigned] = []
    signing = threading.Event()

    def renew() -> None:
        def sign(*_: str) -> Signed:
            signing.set()
            return Signed("x", "abc", timezone.now() + OLD)

        given.append(identity.renew_certificate(proof=proof, request="x", sign=sign, now=timezone.now()))

    race(renew, lambda: identity.revoke_certificates(node=node, actor=SYSTEM))
    assert signing.is_set()
    assert isinstance(given[0], Signed)
    assert not Certificate.objects.exists()
    renew()
    assert isinstance(given[1], NotSigned)
    assert "was revoked" in given[1].reason
