"""Certificates prove nodes: whose they must be, what ends them, and what is said to those who are refused (ND-4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from channels.testing import WebsocketCommunicator
from django.conf import settings
from django.utils import timezone

from agent import protocol
from llmgw import config
from llmgw.agents_asgi import application
from llmgw.ops import pki
from nodes import actions, identity
from nodes.models import Certificate, Event, Node
from tenants.audit import SYSTEM
from tenants.models import AuditEntry
from tests.nodes.test_stream import LIMIT_S, a_register, heard, in_db, refusal, tell
from tests.nodes.test_stream import connected as with_token

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> pki.Authority:
    return pki.open_or_make(tmp_path_factory.mktemp("authority"))[0]


async def admitted(authority: pki.Authority, name: str) -> pki.Issued:
    issued = authority.issue_node(name)
    await in_db(identity.admit_certificate, name=name, serial=issued.serial, expires_at=issued.expires_at, actor=SYSTEM)
    return issued


@asynccontextmanager
async def connected(certificate: pki.Issued) -> AsyncIterator[WebsocketCommunicator]:
    """A stream of which TLS has verified the certificate."""
    link = WebsocketCommunicator(application, protocol.PATH)
    link.scope["extensions"] = {"tls": {"client_cert_chain": [certificate.certificate.decode()]}}
    accepted, _ = await link.connect(timeout=LIMIT_S)
    assert accepted
    try:
        yield link
    finally:
        await link.disconnect(timeout=LIMIT_S)


async def test_a_node_joins_with_its_certificate(authority: pki.Authority) -> None:
    async with connected(await admitted(authority, "one")) as link:
        await tell(link, a_register("one"))
        assert isinstance(await heard(link), protocol.Welcome)
    assert (await Node.objects.aget()).token_digest is None


async def test_another_name_than_the_certificates_is_refused_naming_both(authority: pki.Authority) -> None:
    await admitted(authority, "two")
    async with connected(await admitted(authority, "one")) as link:
        await tell(link, a_register("two"))
        reason = await refusal(link)
    assert "this certificate is node one's, but the agent says it is two" in reason
    assert "or use the certificate of two" in reason
    assert not await Node.objects.exclude(connection="").aexists()


async def test_a_certificate_of_the_authority_that_nobody_admitted_is_refused(authority: pki.Authority) -> None:
    await admitted(authority, "one")
    async with connected(authority.issue_node("one")) as link:
        assert "the certificate of one (serial" in await refusal(link)


async def test_a_second_stream_with_the_same_certificate_replaces_the_first(authority: pki.Authority) -> None:
    issued = await admitted(authority, "one")
    async with connected(issued) as first, connected(issued) as second:
        await tell(first, a_register())
        await heard(first)
        await tell(second, a_register())
        assert isinstance(await heard(second), protocol.Welcome)
        assert await refusal(first) == "another stream speaks for this node now"


async def test_another_machine_with_the_same_certificate_is_refused_and_an_event_raised(
    authority: pki.Authority,
) -> None:
    issued = await admitted(authority, "one")
    async with connected(issued) as first, connected(issued) as second:
        await tell(first, a_register())
        await heard(first)
        await tell(second, a_register(machine_id="copy"))
        assert "machine copy uses its certificate" in await refusal(second)
        assert await first.receive_nothing(timeout=0.1)
    event = await Event.objects.aget(kind="refused")
    assert (event.node, "machine copy uses its certificate" in event.text) == ("one", True)


async def test_a_revoked_certificate_ends_its_stream_at_once_and_proves_nothing_again(authority: pki.Authority) -> None:
    issued = await admitted(authority, "one")
    async with connected(issued) as link:
        await tell(link, a_register())
        await heard(link)
        node = await Node.objects.aget()
        assert await in_db(identity.revoke_certificates, node=node, actor=SYSTEM) == 1
        assert "the certificate of node one was revoked" in await refusal(link)
    async with connected(issued) as link:
        assert "it was revoked, or its node removed; make another with `llmgw node add one`" in await refusal(link)
    assert await in_db(identity.revoke_certificates, node=node, actor=SYSTEM) == 0
    assert [each async for each in AuditEntry.objects.order_by("pk").values_list("action", flat=True)] == [
        "issue certificate",
        "revoke certificates",
    ]


async def test_a_renewed_certificate_voids_the_old_one_and_its_stream(authority: pki.Authority) -> None:
    old, new = await admitted(authority, "one"), await admitted(authority, "one")
    async with connected(old) as link:
        await tell(link, a_register())
        await heard(link)
        node = await Node.objects.aget()
        await in_db(identity.revoke_certificates, node=node, actor=SYSTEM, keep=new.serial)
        assert "was revoked" in await refusal(link)
    async with connected(new) as link:
        await tell(link, a_register())
        assert isinstance(await heard(link), protocol.Welcome)


async def test_revoking_makes_a_stream_that_came_otherwise_prove_itself_anew(authority: pki.Authority) -> None:
    await admitted(authority, "one")
    node = await Node.objects.aget()
    token = await in_db(actions.renew_join_token, node=node, actor=SYSTEM)
    async with with_token(token) as link:
        await tell(link, a_register())
        await heard(link)
        await in_db(identity.revoke_certificates, node=node, actor=SYSTEM)
        assert await refusal(link) == "who speaks for node one must be proven anew"


async def test_a_removed_node_is_forgotten_with_its_certificate_at_once(authority: pki.Authority) -> None:
    issued = await admitted(authority, "one")
    async with connected(issued) as link:
        await tell(link, a_register())
        await heard(link)
        await in_db(actions.remove_node, node=await Node.objects.aget(), actor=SYSTEM, force=True)
        assert "node one was removed" in await refusal(link)
    assert not await Certificate.objects.aexists()
    await in_db(actions.make_node, name="one", actor=SYSTEM)
    async with connected(issued) as link:
        assert "is not known here" in await refusal(link)


async def test_join_tokens_can_be_shut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    token = (await in_db(actions.make_node, name="one", actor=SYSTEM))[1]
    only = settings.LLMGW.model_copy(update={"agents": config.Agents(port=8444, join_tokens=False)})
    monkeypatch.setattr(settings, "LLMGW", only)
    async with with_token(token) as link:
        assert "join tokens are not taken here (agents.join_tokens); come to port 8444" in await refusal(link)


async def test_the_listener_of_agents_serves_nothing_else() -> None:
    answers: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        answers.append(message)

    await application({"type": "http", "path": "/sign-in/"}, asyncio.Queue().get, send)  # type: ignore[typeddict-item,arg-type]
    assert answers[0]["status"] == 404
    link = WebsocketCommunicator(application, "/elsewhere")
    assert (await link.connect(timeout=LIMIT_S))[0] is False


# --- the authority ---------------------------------------------------------------------------------------------------
def test_the_authority_is_made_once_and_its_files_are_its_owners(tmp_path: Path) -> None:
    first, made = pki.open_or_make(tmp_path)
    again, remade = pki.open_or_make(tmp_path)
    assert (made, remade, first.root == again.root) == (True, False, True)
    assert pki.serve_names(first, ("a.example", "10.0.0.1")) == (("a.example", "10.0.0.1"), True)
    assert pki.serve_names(again, ("10.0.0.1",)) == (("a.example", "10.0.0.1"), False)
    assert pki.serve_names(again, ("b.example",)) == (("a.example", "10.0.0.1", "b.example"), True)
    pki.write_node_files(tmp_path / "one", first.issue_node("one"), first.root)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        "ca.key", "ca.crt", "server.key", "server.crt", "node.key", "node.crt",
    }  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_certificates_hold_for_a_bounded_time(authority: pki.Authority) -> None:
    left = authority.issue_node("one").expires_at - timezone.now()
    assert timedelta(days=pki.LEAF_DAYS - 1) < left <= timedelta(days=pki.LEAF_DAYS)


@pytest.mark.parametrize("broken", ["ca.key", "ca.crt"])
def test_an_authority_that_is_not_whole_is_never_replaced(tmp_path: Path, broken: str) -> None:
    pki.open_or_make(tmp_path)
    other, _ = pki.open_or_make(tmp_path / "other")
    (tmp_path / broken).write_bytes((other.directory / broken).read_bytes())
    with pytest.raises(config.ConfigError, match="do not belong together"):
        pki.open_or_make(tmp_path)
    (tmp_path / broken).write_text("nonsense")
    with pytest.raises(config.ConfigError, match="holds no authority that llmgw made"):
        pki.open_or_make(tmp_path)
    (tmp_path / broken).unlink()
    with pytest.raises(config.ConfigError, match="Make the authority: llmgw server ca"):
        pki.open_or_make(tmp_path)


def test_a_name_that_no_certificate_can_hold_is_said(authority: pki.Authority) -> None:
    with pytest.raises(config.ConfigError, match="'bücher' is no host name"):
        authority.issue_server(("bücher",))
