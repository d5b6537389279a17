"""`llmgw ctl engine-build` against a real server on a real port; page and API say the same as it."""

from __future__ import annotations

import json

import msgspec
from django.test import Client

from agent.protocol import Build
from nodes.models import Command, Node
from tenants.models import AuditEntry, User
from tests import factories
from tests.cli.conftest import Ctl

BUILDS = (
    Build(engine="llamacpp", name="xllamacpp", version="2026.10"),
    Build(engine="vllm", name="named", version="-", usable=False, reason="llmgw installs no vllm yet."),
)


def make_box(**chosen: str) -> Node:
    told = factories.inventory(builds=BUILDS, engine_builds=chosen)
    return factories.make_node("box", inventory=msgspec.to_builtins(told))


def test_builds_are_shown_chosen_and_shown_chosen(llmgw: Ctl) -> None:
    make_box()
    shown = llmgw("ctl", "engine-build", "box").stdout
    lines = {line.split()[0]: line.split() for line in shown.splitlines()}
    assert lines["llamacpp"] == ["llamacpp", "auto", "xllamacpp", "2026.10", "ready"]
    assert lines["vllm"][:4] == ["vllm", "auto", "named", "-"]
    assert lines["sglang"] == ["sglang", "auto", *"–––"]
    done = llmgw("ctl", "engine-build", "box", "llamacpp", "none").stdout
    assert done.splitlines()[1].split()[:3] == ["llamacpp", "none", "xllamacpp"]
    note = "llamacpp: the node still goes by auto; it is told while it is connected"
    assert note in " ".join(done.split())
    assert [row.body for row in Command.objects.all()] == [
        {"type": "set_engine_build", "engine": "llamacpp", "build": "none"}
    ]
    assert AuditEntry.objects.get(action="choose build").via == "cli"
    assert "vllm" not in llmgw("ctl", "engine-build", "box", "llamacpp").stdout


def test_what_cannot_be_chosen_is_said_with_what_can(llmgw: Ctl) -> None:
    make_box()
    for words, says in (
        (("llamacpp", "cu13"), "The node reports no build 'cu13' of llamacpp; choose auto, xllamacpp or none."),
        (("magic", "auto"), "There is no engine 'magic'; known: vllm, sglang, llamacpp."),
        (("magic",), "There is no engine magic; known: vllm, sglang, llamacpp."),
    ):
        refused = llmgw("ctl", "engine-build", "box", *words)
        assert refused.exit_code != 0
        assert says in " ".join(refused.stderr.split())
    assert llmgw("ctl", "engine-build", "nowhere").exit_code != 0
    assert not Command.objects.exists()


def test_page_api_and_command_line_tell_the_same(llmgw: Ctl, root: User) -> None:
    make_box()
    assert json.loads(llmgw("ctl", "engine-build", "box", "llamacpp", "xllamacpp", "--json").stdout)["chosen"] == (
        "xllamacpp"
    )
    by_command = json.loads(llmgw("ctl", "engine-build", "box", "--json").stdout)
    client = Client()
    client.force_login(root)
    assert client.get("/api/v1/nodes/box/builds").json() == by_command
    page = client.get("/nodes/box/manage/").content.decode()
    for line in by_command:
        shown = page.split(f"<tr><th>{line['engine']}</th>")[1].split("</tr>")[0]
        assert f"<option selected>{line['chosen']}</option>" in shown
        assert shown.count("<option") == len(line["options"])
        for build in line["builds"]:
            assert f"{build['name']} {build['version']}" in shown
            assert f">{build['state']}</span>" in shown
            assert build["reason"] in shown
        assert line["note"] in shown
