"""`llmgw ctl` and `llmgw node` on nodes, against a real server on a real port."""

from __future__ import annotations

import json

import pytest
from django.utils import timezone

from nodes import identity
from nodes.models import Certificate, Command, Node
from tenants.audit import SYSTEM
from tenants.models import AuditEntry
from tests import factories
from tests.cli.conftest import Ctl


def test_a_node_is_drained_and_forgotten_only_by_force_while_it_is_there(llmgw: Ctl) -> None:
    factories.make_node("box")
    assert "Undo: llmgw ctl uncordon box" in llmgw("ctl", "drain", "box").stdout
    refused = llmgw("ctl", "remove", "box")
    assert (refused.exit_code, "node box is ready; drain it and stop its agent first" in refused.stderr) == (1, True)
    assert "box is forgotten" in llmgw("ctl", "remove", "box", "--force").stdout
    assert not Node.objects.exists()
    assert AuditEntry.objects.get(action="remove node").via == "cli"


def test_a_lost_node_is_forgotten_by_either_command(llmgw: Ctl) -> None:
    for words in (("ctl", "remove"), ("node", "remove")):
        factories.make_node("box", state="lost")
        assert json.loads(llmgw(*words, "box", "--json").stdout) == {"removed": "box"}
    assert not Node.objects.exists()


def test_labels_cores_and_engines_are_kept(llmgw: Ctl) -> None:
    factories.make_node("box", told_labels={"zone": "a"}, labels={"zone": "a"})
    assert llmgw("ctl", "label", "box", "rack=7", "tier=").stdout == "Labels of box: rack=7, tier=, zone=a\n"
    assert llmgw("ctl", "label", "box", "rack-", "tier-").stdout == "Labels of box: zone=a\n"
    assert "2 cores of box are kept" in llmgw("ctl", "reserve", "box", "2").stdout
    assert (
        "no new replicas of vllm, sglang"
        in llmgw("ctl", "engines", "box", "--disable", "vllm", "--disable", "sglang").stdout
    )
    node = Node.objects.get()
    assert (node.reserved_cores, node.disabled_engines) == (2, ["sglang", "vllm"])
    assert "replicas of every engine" in llmgw("ctl", "engines", "box").stdout


def test_an_address_is_pinned_and_unpinned(llmgw: Ctl) -> None:
    factories.make_node("box")
    assert llmgw("ctl", "address", "box", "10.0.0.9").stdout == "box is reached at 10.0.0.9.\n"
    node = Node.objects.get()
    assert (node.pinned_address, node.address) == ("10.0.0.9", "10.0.0.9")
    assert "where its agent says, once it registers" in llmgw("ctl", "address", "box").stdout
    assert Node.objects.get().pinned_address == ""


def test_weights_and_engines_are_brought_ahead_of_need(llmgw: Ctl) -> None:
    factories.make_node("box")
    assert "llmgw ctl events --node box" in llmgw("ctl", "fetch", "box", "/x.gguf").stdout
    assert "box installs llamacpp" in llmgw("ctl", "install", "box", "llamacpp").stdout
    assert [row.body for row in Command.objects.order_by("pk")] == [
        {"type": "fetch", "source": "/x.gguf"},
        {"type": "install_engine", "engine": "llamacpp"},
    ]


def test_certificates_are_listed_and_revoked(llmgw: Ctl) -> None:
    assert "llmgw node add NAME" in llmgw("ctl", "cert", "list").stdout
    identity.admit_certificate(name="box", serial="abc1", expires_at=timezone.now(), actor=SYSTEM)
    assert "abc1" in llmgw("ctl", "cert", "list").stdout
    assert "No certificate proves box any more" in llmgw("ctl", "cert", "revoke", "box").stdout
    assert not Certificate.objects.exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("label", "box", "x"), 2, "x is no label: write NAME=VALUE, or NAME- to take one away."),
        (("label", "box", "gone-"), 1, "The node has no label gone."),
        (("reserve", "box", "5000"), 1, "Reserve 0 to 4096 cores."),
        (("engines", "box", "--disable", "magic"), 1, "There is no engine 'magic'"),
        (("address", "box", "0.0.0.0"), 1, "'0.0.0.0' is no host name and no IP address of a machine."),
        (("install", "box", "magic"), 1, "There is no engine 'magic'"),
        (("drain", "nope"), 1, "There is no node nope. See them: llmgw ctl nodes"),
        (("remove", "nope"), 1, "There is no node nope. See them: llmgw ctl nodes"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_next_step(
    llmgw: Ctl, words: tuple[str, ...], code: int, says: str
) -> None:
    factories.make_node("box")
    done = llmgw("ctl", *words)
    assert (done.exit_code, says in done.stderr) == (code, True), done.stderr
