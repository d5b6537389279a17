"""Who an agent's stream is: the node that its client certificate, or else its join token, proves (ND-4)."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from llmgw.core import doorbell
from nodes import timeline
from nodes.models import Certificate, Node
from nodes.signing import NotSigned, Sign, Signed
from tenants import audit
from tenants.audit import Actor
from tenants.keys import MAX_LENGTH, digest

Kind = Literal["token", "certificate"]
RENEW_EVERY = timedelta(hours=1)
MOST_HELD = 8
"""Certificates that a node may hold when it asks for another."""


@dataclass(frozen=True, slots=True)
class Proof:
    """`serial`: of the certificate, in hexadecimal; empty with a token."""

    node: Node
    kind: Kind = "token"
    serial: str = ""
    certificate: str = ""
    """As PEM."""
    is_new: bool = False
    """Whether no stream has come with this certificate before."""


@dataclass(frozen=True, slots=True)
class Unproven:
    """`reason`: with the next step. `name`: whose certificate it was, if it was one of ours."""

    reason: str
    name: str = ""


def prove(scope: Mapping[str, Any]) -> Proof | Unproven:
    """A certificate that TLS has verified counts before any token."""
    chain = scope.get("extensions", {}).get("tls", {}).get("client_cert_chain")
    if chain:
        return _by_certificate(str(chain[0]))
    if not settings.LLMGW.agents.join_tokens:
        return Unproven(
            f"join tokens are not taken here (agents.join_tokens); come to port {settings.LLMGW.agents.port or '-'} "
            "with a certificate: llmgw node add NAME"
        )
    node = node_of_token(_bearer(scope))
    if node is None:
        return Unproven(
            "the join token is not known here; make one with `llmgw ctl node-token NAME`, and put it into the"
            " agent's settings"
        )
    return Proof(node)


def node_of_token(token: str) -> Node | None:
    """The node that a join token proves, if any."""
    if not token.startswith("nt-") or len(token) > MAX_LENGTH:
        return None
    found = digest(token)
    node = Node.objects.filter(token_digest=found).first()
    return node if node and hmac.compare_digest(node.token_digest or "", found) else None


def _by_certificate(pem: str) -> Proof | Unproven:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    certificate = x509.load_pem_x509_certificate(pem.encode())
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name, serial = str(names[0].value) if names else "", format(certificate.serial_number, "x")
    known = Certificate.objects.select_related("node").filter(serial=serial, node=name).first()
    if known is None:
        return Unproven(
            f"the certificate of {name or 'nobody'} (serial {serial}) is not known here: it was revoked, or its node "
            f"removed; make another with `llmgw node add {name or 'NAME'}`",
            name,
        )
    return Proof(known.node, "certificate", serial, pem, known.proved_at is None)


def still_proven(proof: Proof) -> bool:
    """Whether what proved a stream still does."""
    if proof.serial:
        return Certificate.objects.filter(serial=proof.serial, node=proof.node).exists()
    return Node.objects.filter(pk=proof.node.pk).exists()


def _bearer(scope: Mapping[str, Any]) -> str:
    headers = dict(scope["headers"])
    kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


# --- certificates ----------------------------------------------------------------------------------------------------
@transaction.atomic
def admit_certificate(*, name: str, serial: str, expires_at: datetime, actor: Actor) -> Node:
    """From now on a certificate proves the node `name`, which is made where there is none."""
    _, made = Node.objects.get_or_create(name=name)
    node = Node.objects.select_for_update(no_key=True).get(pk=name)
    Certificate.objects.create(node=node, serial=serial, expires_at=expires_at, made_by=actor.name)
    audit.record(actor, "issue certificate", name, after={"serial": serial})
    text = f"node {name} may join with a certificate until {expires_at:%Y-%m-%d}, issued by {actor.name}"
    timeline.note("made" if made else "certificate", text, at=timezone.now(), node=name)
    return node


@transaction.atomic
def renew_certificate(*, proof: Proof, request: str, sign: Sign, now: datetime) -> Signed | NotSigned:
    """Another certificate for the agent of a stream that came with one, in its second half; that one stays valid.

    Bounded by what a node holds, so that it does not matter how often it asks, or which control plane.
    """
    name = proof.node.name
    anew = f"make another: llmgw node add {name} --renew"
    _locked(proof.node)
    held = list(Certificate.objects.filter(node=name))
    shown = next((each for each in held if each.serial == proof.serial), None)
    if shown is None:
        return NotSigned(f"the certificate of node {name} was revoked; {anew}")
    if now < shown.made_at + (shown.expires_at - shown.made_at) / 2:
        return NotSigned(f"this one holds until {shown.expires_at:%Y-%m-%d}, which is too long for another")
    if any(each.serial != proof.serial and now - each.made_at < RENEW_EVERY for each in held):
        return NotSigned(f"node {name} was given one less than {RENEW_EVERY.seconds // 60} min ago; ask again later")
    if len(held) >= MOST_HELD:
        return NotSigned(f"node {name} holds {len(held)} certificates already; {anew}, which voids them")
    signed = sign(name, request, proof.certificate)
    if isinstance(signed, Signed):
        Certificate.objects.filter(node=name, expires_at__lt=now).exclude(serial=proof.serial).delete()
        Certificate.objects.create(
            node_id=name, serial=signed.serial, made_at=now, expires_at=signed.expires_at, made_by=f"node {name}"
        )
        audit.record(
            Actor(name=f"node {name}", via="system"), "renew certificate", name, after={"serial": signed.serial}
        )
        text = f"node {name} renewed its certificate, which holds until {signed.expires_at:%Y-%m-%d}"
        timeline.note("certificate", text, at=now, node=name)
    return signed


def mark_proved(proof: Proof, now: datetime) -> None:
    """A stream came with this certificate, so that its agent has it."""
    Certificate.objects.filter(serial=proof.serial, proved_at=None).update(proved_at=now)


def _locked(node: Node) -> None:
    """Until the transaction ends nobody else gives this node certificates or takes them, so that none is left over."""
    list(Node.objects.select_for_update(no_key=True).filter(pk=node.pk).values_list("pk"))


@transaction.atomic
def revoke_certificates(*, node: Node, actor: Actor, keep: str = "") -> int:
    """None of a node's certificates proves it any more, but for the one with the serial `keep`; how many there were.

    A stream that came with one of them ends at once.
    """
    _locked(node)
    gone, _ = Certificate.objects.filter(node=node).exclude(serial=keep).delete()
    if gone:
        audit.record(actor, "revoke certificates", node.name, before={"certificates": gone})
        text = f"{gone} certificates of node {node.name} were revoked by {actor.name}"
        timeline.note("revoked", text, at=timezone.now(), node=node.name)
        Node.objects.filter(pk=node.pk).update(connection="")
        doorbell.ring_on_commit(doorbell.commands_for(node.name))
    return gone
