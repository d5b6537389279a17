"""Who an agent's stream is: the node that its client certificate, or else its join token, proves (ND-4)."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from llmgw.core import doorbell
from nodes import timeline
from nodes.models import Certificate, Node
from tenants import audit
from tenants.audit import Actor
from tenants.keys import MAX_LENGTH, digest

Kind = Literal["token", "certificate"]


@dataclass(frozen=True, slots=True)
class Proof:
    """`serial`: of the certificate, in hexadecimal; empty with a token."""

    node: Node
    kind: Kind = "token"
    serial: str = ""


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
    return Proof(known.node, "certificate", serial)


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
    node, made = Node.objects.get_or_create(name=name)
    Certificate.objects.create(node=node, serial=serial, expires_at=expires_at, made_by=actor.name)
    audit.record(actor, "issue certificate", name, after={"serial": serial})
    text = f"node {name} may join with a certificate until {expires_at:%Y-%m-%d}, issued by {actor.name}"
    timeline.note("made" if made else "certificate", text, at=timezone.now(), node=name)
    return node


@transaction.atomic
def revoke_certificates(*, node: Node, actor: Actor, keep: str = "") -> int:
    """None of a node's certificates proves it any more, but for the one with the serial `keep`; how many there were.

    A stream that came with one of them ends at once.
    """
    gone, _ = Certificate.objects.filter(node=node).exclude(serial=keep).delete()
    if gone:
        audit.record(actor, "revoke certificates", node.name, before={"certificates": gone})
        text = f"{gone} certificates of node {node.name} were revoked by {actor.name}"
        timeline.note("revoked", text, at=timezone.now(), node=node.name)
        Node.objects.filter(pk=node.pk).update(connection="")
        doorbell.ring_on_commit(doorbell.commands_for(node.name))
    return gone
