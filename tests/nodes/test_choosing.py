"""A choice of a build is kept here, told until the node goes by it, and respected by placement (AG-32, ND-3)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from agent import protocol
from agent.host import Host
from agent.installer import Installer
from agent.protocol import AUTO, NONE, Ack, SetEngineBuild
from nodes import actions, choosing, commands, passes
from nodes.keeping import NotKept
from nodes.models import Command, Event, ModelStatus, Node, Replica
from tenants.audit import SYSTEM
from tenants.models import AuditEntry
from tests.factories import inventory, make_model, make_node, make_user

pytestmark = pytest.mark.django_db
AWAY = "the node still goes by auto; it is told while it is connected, and its timeline says if it refuses"
HOST = Host(address="127.0.0.1", architecture="x86_64", cores=8)


def register(node: Node, told: dict[str, str] | None, **fields: Any) -> None:
    message = protocol.Register(
        node=node.name,
        agent_version="1",
        machine_id=node.machine_id,
        address="127.0.0.1",
        inventory=inventory(engine_builds=told, **fields),
    )
    actions.register_node(node=node, register=message, connection="c", now=timezone.now())


def choose(node: Node, build: str, engine: str = "llamacpp") -> bool:
    return choosing.choose_build(node=node, engine=engine, build=build, actor=SYSTEM)


def sent(after: timedelta = timedelta()) -> list[protocol.Command]:
    return list(commands.take_due(node="one", connection="c", now=timezone.now() + after))


def texts() -> list[str]:
    return list(Event.objects.filter(node="one").order_by("pk").values_list("text", flat=True))


def test_a_choice_is_kept_told_until_answered_and_made_once() -> None:
    node = make_node("one", connection="c")
    assert choose(node, NONE)
    assert not choose(node, NONE)
    assert Node.objects.get().engine_builds == {"llamacpp": NONE}
    [told] = sent()
    assert told.body == SetEngineBuild(engine="llamacpp", build=NONE)
    assert sent() == []
    assert sent(commands.RESEND_AFTER) == [told]
    actions.acknowledge(node="one", ack=Ack(id=told.id), now=timezone.now())
    assert sent(timedelta(days=1)) == []
    assert texts() == ["Node one starts no llamacpp any more; what runs goes on, as llmgw decided"]
    assert list(AuditEntry.objects.values_list("action", "target", "before", "after")) == [
        ("choose build", "one", {}, {"llamacpp": NONE})
    ]


def test_what_was_chosen_while_the_node_was_away_is_told_once_it_is_back() -> None:
    node = make_node("one", state="lost", connection="")
    assert choose(node, "xllamacpp")
    assert sent() == []
    register(node, {})
    assert [each.body for each in sent()] == [SetEngineBuild(engine="llamacpp", build="xllamacpp")]
    register(node, {})
    assert Command.objects.count() == 1


def test_a_node_that_never_joined_may_be_meant_for_a_build_that_nobody_knows_yet() -> None:
    node = make_node("one", state="joining", inventory={}, machine_id="")
    assert choose(node, "cu13", "vllm")
    assert not choose(node, "cu13", "vllm")
    with pytest.raises(NotKept, match="'a b' is no name of a build"):
        choose(node, "a b", "vllm")
    register(node, {})
    [told] = sent()
    assert told.body == SetEngineBuild(engine="vllm", build="cu13")
    refusal = "This node has no build 'cu13' of vllm; choose auto or none."
    actions.acknowledge(node="one", ack=Ack(id=told.id, ok=False, error=refusal), now=timezone.now())
    assert f"Node one does not do as asked: {refusal}" in texts()
    register(node, {})
    assert [each.body for each in sent()] == [told.body]  # it may have it by now
    [vllm, *_] = choosing.lines_of(Node.objects.get())
    assert vllm.note == AWAY


def test_an_agent_that_lost_its_directory_is_told_again_and_one_that_did_not_costs_no_query(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    node = make_node("one", connection="c", engine_builds={"llamacpp": NONE, "vllm": AUTO})
    register(node, None)
    with CaptureQueriesContext(connection) as without:
        register(node, None)
    with django_assert_num_queries(len(without)):
        register(node, {"llamacpp": NONE})
    assert not Command.objects.exists()
    register(node, {"vllm": "named"})
    assert [each.body for each in sent()] == [
        SetEngineBuild(engine="llamacpp", build=NONE),
        SetEngineBuild(engine="vllm", build=AUTO),
    ]
    assert Node.objects.get().engine_builds == {"llamacpp": NONE, "vllm": AUTO}


def test_a_store_that_forgot_keeps_what_the_node_goes_by_and_says_so() -> None:
    node = make_node("one", connection="c")
    register(node, {"llamacpp": NONE, "magic": "x", "vllm": "not one\tname"})
    assert Node.objects.get().engine_builds == {"llamacpp": NONE}
    assert not Command.objects.exists()
    assert texts()[-1] == (
        "Node one starts no llamacpp any more; what runs goes on: its agent was told so before this store knew it"
    )
    register(node, {"llamacpp": NONE})
    assert Event.objects.filter(kind="choose build").count() == 1
    assert choose(node, AUTO)
    register(node, {"llamacpp": NONE})
    assert [each.body for each in sent()] == [SetEngineBuild(engine="llamacpp", build=AUTO)]


def test_an_earlier_choice_that_was_not_answered_never_comes_after_a_later_one() -> None:
    node = make_node("one", connection="c")
    choose(node, "xllamacpp")
    choose(node, NONE, "vllm")
    earlier, other = sent()
    choose(node, NONE)
    commands.send_again(node="one")
    assert [each.body for each in sent()] == [other.body, SetEngineBuild(engine="llamacpp", build=NONE)]
    actions.acknowledge(node="one", ack=Ack(id=earlier.id, ok=False, error="late"), now=timezone.now())
    assert not any("late" in text for text in texts())


def test_a_choice_that_the_node_refused_is_told_again_when_it_is_made_again() -> None:
    node = make_node("one", connection="c")
    register(node, {})
    choose(node, NONE)
    [told] = sent()
    actions.acknowledge(node="one", ack=Ack(id=told.id, ok=False, error="disk full."), now=timezone.now())
    assert not choose(node, NONE)
    assert [each.body for each in sent()] == [told.body]
    assert AuditEntry.objects.count() == 1


def test_an_agent_that_takes_no_choice_is_told_of_a_new_one_and_not_at_every_register() -> None:
    node = make_node("one", connection="c")
    register(node, None)
    choose(node, NONE)
    [told] = sent()
    refusal = "this agent does not know this command; upgrade it."
    actions.acknowledge(node="one", ack=Ack(id=told.id, ok=False, error=refusal), now=timezone.now())
    register(node, None)
    assert not choose(node, NONE)
    assert sent() == []
    assert "upgrade it." in texts()[-1]


@pytest.mark.parametrize(
    ("engine", "build", "says"),
    [
        ("magic", AUTO, "There is no engine 'magic'; known: vllm, sglang, llamacpp."),
        ("llamacpp", "cu13", "The node reports no build 'cu13' of llamacpp; choose auto, xllamacpp or none."),
    ],
)
def test_what_cannot_be_chosen_is_refused_and_nothing_changes(engine: str, build: str, says: str) -> None:
    node = make_node("one", connection="c")
    with pytest.raises(NotKept) as refused:
        choose(node, build, engine)
    assert str(refused.value) == says
    assert (Node.objects.get().engine_builds, Command.objects.count(), AuditEntry.objects.count()) == ({}, 0, 0)


def test_nothing_is_placed_where_an_engine_is_switched_off_until_it_is_on_again(tmp_path: Path) -> None:
    """By what a real agent reports of its builds."""
    node = make_node("one", connection="c")
    make_model("m")
    installer = Installer(tmp_path)
    assert installer.choose("llamacpp", NONE, HOST) == ""
    register(node, installer.chosen(), builds=installer.present(HOST))
    passes.run_pass(timezone.now())
    assert not Replica.objects.exists()
    why = str(ModelStatus.objects.get().reasons)
    assert "Switched off by the control plane. To use llamacpp again: llmgw ctl engine-build NODE llamacpp auto" in why
    assert installer.choose("llamacpp", AUTO, HOST) == ""
    register(node, installer.chosen(), builds=installer.present(HOST))
    passes.run_pass(timezone.now())
    assert Replica.objects.count() == 1


# --- page and API ----------------------------------------------------------------------------------------------------
@pytest.fixture
def root(client: Client) -> Client:
    client.force_login(make_user("root", is_superuser=True))
    return client


def put(client: Client, engine: str, body: str) -> tuple[int, dict[str, Any]]:
    answer = client.put(f"/api/v1/nodes/one/builds/{engine}", body, content_type="application/json")
    return answer.status_code, answer.json()


def test_the_api_shows_and_changes_a_choice(root: Client) -> None:
    node = make_node("one", connection="c")
    register(node, {})
    assert put(root, "llamacpp", '{"build": "none"}') == (
        200,
        {
            "engine": "llamacpp",
            "chosen": "none",
            "at_node": "auto",
            "options": ["auto", "xllamacpp", "none"],
            "builds": [{"name": "xllamacpp", "version": "0.2", "state": "ready", "reason": ""}],
            "note": AWAY,
        },
    )
    register(node, {"llamacpp": NONE})
    found = root.get("/api/v1/nodes/one/builds").json()
    assert [(line["engine"], line["chosen"], line["at_node"], line["note"]) for line in found] == [
        ("vllm", "auto", "auto", ""),
        ("sglang", "auto", "auto", ""),
        ("llamacpp", "none", "none", ""),
    ]
    assert root.get("/api/v1/nodes/one").json()["engine_builds"] == {"llamacpp": "none"}
    for engine, body, says in (
        ("llamacpp", '{"build": "cu13"}', "choose auto, xllamacpp or none."),
        ("llamacpp", '{"build": 7}', "no build ''"),
        ("magic", '{"build": "auto"}', "no engine 'magic'"),
    ):
        status, told = put(root, engine, body)
        assert (status, told["error"]["code"]) == (400, "invalid")
        assert says in told["error"]["message"]


def test_the_nodes_pages_choose_a_build_and_say_what_is_so(root: Client) -> None:
    node = make_node("one", connection="c")
    register(node, {})
    url = "/nodes/one/manage/"
    assert "<option selected>auto</option><option>xllamacpp</option><option>none</option>" in (
        root.get(url).content.decode()
    )
    page = root.post(url, {"act": "build", "engine": "llamacpp", "build": "none"}, follow=True).content.decode()
    assert "Chosen: node one starts no llamacpp any more; what runs goes on." in page
    assert "none was chosen: the node still goes by auto" in page
    assert "<option selected>none</option>" in page
    refused = root.post(url, {"act": "build", "engine": "llamacpp", "build": "<b>"}, follow=True).content.decode()
    assert "no build &#x27;&lt;b&gt;&#x27; of llamacpp" in refused
    assert "none was chosen" in root.get("/nodes/one/").content.decode()
    off = protocol.Build(engine="llamacpp", name="xllamacpp", version="1", usable=False, reason="Switched off.")
    register(node, {"llamacpp": NONE}, builds=(off,))
    shown = root.get("/nodes/one/").content.decode()
    assert "none was chosen" not in shown
    assert '<div class="note">Switched off.</div></td><td class="num"><span class="state idle">off</span>' in shown


def test_who_only_looks_at_a_team_can_choose_nothing(client: Client) -> None:
    make_node("one", connection="c")
    client.force_login(make_user("vera"))
    act = {"act": "build", "engine": "llamacpp", "build": "none"}
    assert client.post("/nodes/one/manage/", act).status_code == 404
    assert put(client, "llamacpp", '{"build": "none"}')[0] == 404
    assert (Node.objects.get().engine_builds, Command.objects.count()) == ({}, 0)
