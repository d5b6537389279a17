"""What operators set for a node holds over registers, says who and when, and does nothing twice (ND-12)."""

from __future__ import annotations

import pytest
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from agent import protocol
from nodes import actions, commands, keeping, labels, snapshot
from nodes.models import Command, Event, Node
from tenants.audit import SYSTEM
from tenants.models import AuditEntry
from tests.factories import inventory, make_node, make_user

NAMES = st.text("ab-", min_size=0, max_size=3)
LABELS = st.dictionaries(st.from_regex(r"[a-c]{1,2}", fullmatch=True), st.text("xyz", max_size=2), max_size=4)


@given(LABELS, LABELS, st.dictionaries(NAMES, st.none() | st.text("xyz\n", max_size=2), max_size=4))
def test_labels_that_are_set_win_and_a_change_is_taken_whole_or_refused(
    told: dict[str, str], held: dict[str, str], change: dict[str, str | None]
) -> None:
    fault = not_taken(told, held, change)
    if fault:
        assert fault.endswith(".")
        return
    after = labels.changed(told, held, change)
    assert {name: after.get(name) for name in change} == change
    assert {name: value for name, value in after.items() if name not in change} == {
        name: value for name, value in held.items() if name not in change
    }
    assert labels.effective(told, after) == {**told, **after}


def not_taken(told: dict[str, str], held: dict[str, str], change: dict[str, str | None]) -> str:
    try:
        labels.changed(told, held, change)
    except labels.LabelFault as fault:
        return str(fault)
    return ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"a b": "1"}, "'a b' is no label"),
        ({"": "1"}, "'' is no label"),
        ({"x" * 64: "1"}, "is no label"),
        ({"a": "x" * 64}, "must be one line of at most 63 characters"),
        ({"a": "b\nc"}, "must be one line"),
        ({"told": None}, "stands in the node's agent.yaml"),
        ({"gone": None}, "The node has no label gone."),
        ({f"l{number}": "" for number in range(protocol.MAX_LABELS)}, "at most 64 labels"),
    ],
)
def test_labels_that_cannot_be_set_are_refused_naming_them(change: dict[str, str | None], says: str) -> None:
    with pytest.raises(labels.LabelFault, match=says):
        labels.changed({"told": "1"}, {}, change)


def register(node: Node, **told: str) -> None:
    message = protocol.Register(
        node=node.name,
        agent_version="1",
        machine_id=node.machine_id,
        address="127.0.0.1",
        inventory=inventory(),
        labels=told,
    )
    actions.register_node(node=node, register=message, connection="c", now=snapshot.timezone.now())


@pytest.mark.django_db
def test_labels_that_are_set_outlast_a_register_and_those_taken_away_come_back_from_the_agent() -> None:
    node = make_node("one")
    register(node, rack="1", zone="a")
    assert keeping.label_node(node=node, change={"rack": "7", "tier": "gold"}, actor=SYSTEM)
    assert not keeping.label_node(node=node, change={"rack": "7"}, actor=SYSTEM)
    register(node, rack="2")
    assert Node.objects.get().labels == {"rack": "7", "tier": "gold"}
    assert keeping.label_node(node=node, change={"rack": None}, actor=SYSTEM)
    assert dict(snapshot.take(snapshot.timezone.now()).nodes[0].labels) == {"rack": "2", "tier": "gold"}
    assert AuditEntry.objects.filter(action="label node", target="one").count() == 2
    assert Event.objects.filter(node="one", kind="label node").first().text == (  # type: ignore[union-attr]
        "Labels of node one were changed by llmgw: rack taken away"
    )


@pytest.mark.django_db
def test_cores_and_engines_reach_placement_and_say_who() -> None:
    node = make_node("one")
    assert keeping.reserve_cores(node=node, cores=2, actor=SYSTEM)
    assert not keeping.reserve_cores(node=node, cores=2, actor=SYSTEM)
    assert keeping.disable_engines(node=node, engines=["vllm", "vllm"], actor=SYSTEM)
    assert not keeping.disable_engines(node=node, engines=["vllm"], actor=SYSTEM)
    [seen] = snapshot.take(snapshot.timezone.now()).nodes
    assert (seen.reserved_cores, seen.disabled_engines) == (2, {"vllm"})
    assert keeping.disable_engines(node=node, engines=[], actor=SYSTEM)
    assert [each.text for each in Event.objects.order_by("pk")] == [
        "2 cores of node one were reserved by llmgw: no replica is counted on them",
        "Node one gets no new replicas of vllm, as llmgw decided",
        "Node one gets replicas of every engine, as llmgw decided",
    ]
    assert list(AuditEntry.objects.order_by("pk").values_list("action", "before", "after"))[:2] == [
        ("reserve cores", {"reserved_cores": 0.0}, {"reserved_cores": 2}),
        ("disable engines", {"disabled_engines": []}, {"disabled_engines": ["vllm"]}),
    ]


@pytest.mark.django_db
def test_what_makes_no_sense_is_refused_in_words() -> None:
    node = make_node("one")
    with pytest.raises(keeping.NotKept, match="Reserve 0 to 4096 cores"):
        keeping.reserve_cores(node=node, cores=float("nan"), actor=SYSTEM)
    with pytest.raises(keeping.NotKept, match="There is no engine 'magic'; known: vllm, sglang, llamacpp"):
        keeping.disable_engines(node=node, engines=["magic"], actor=SYSTEM)
    with pytest.raises(keeping.NotKept, match="no engine"):
        keeping.install_ahead(node=node, engine="magic", actor=SYSTEM)
    for source in ("", "a\nb", "x" * 1001):
        with pytest.raises(keeping.NotKept, match="A source is one line"):
            keeping.fetch_ahead(node=node, source=source, actor=SYSTEM)
    assert not AuditEntry.objects.exists()


@pytest.mark.django_db
def test_errands_are_commands_and_their_end_stands_on_the_nodes_timeline_once() -> None:
    node = make_node("one", connection="c")
    now = snapshot.timezone.now()
    first = keeping.fetch_ahead(node=node, source="https://x/a.gguf", actor=SYSTEM)
    second = keeping.install_ahead(node=node, engine="llamacpp", actor=SYSTEM)
    sent = commands.take_due(node="one", connection="c", now=now)
    assert [each.body for each in sent] == [
        protocol.Fetch(source="https://x/a.gguf"),
        protocol.InstallEngine(engine="llamacpp"),
    ]
    actions.acknowledge(node="one", ack=protocol.Ack(id=first.pk), now=now)
    actions.acknowledge(node="one", ack=protocol.Ack(id=second.pk, ok=False, error="no room."), now=now)
    assert Command.objects.filter(acknowledged_at=None).count() == 0
    running = protocol.Errand(command=first.pk, what="https://x/a.gguf")
    failed = protocol.Errand(command=9, what="llamacpp", state="failed", reason="no disk")
    done = protocol.Errand(command=first.pk, what="https://x/a.gguf", state="done")
    for told in ((running,), (running, failed), (done, failed), (done, failed)):
        actions.heartbeat(node="one", connection="c", load=protocol.NodeLoad(), changed=(), now=now, errands=told)
    assert [each.text for each in Event.objects.order_by("pk")] == [
        "Node one is to get https://x/a.gguf, for llmgw",
        "Node one is to get llamacpp, for llmgw",
        "Node one does not do as asked: no room.",
        "Node one lacks llamacpp: no disk",
        "Node one has https://x/a.gguf now",
    ]


@pytest.fixture
def root(client: Client, db: None) -> Client:
    client.force_login(make_user("root", is_superuser=True))
    return client


def patch(client: Client, body: str) -> tuple[int, dict[str, object]]:
    answer = client.patch("/api/v1/nodes/one", body, content_type="application/json")
    return answer.status_code, answer.json()


def test_the_api_keeps_all_of_a_change_or_nothing(root: Client) -> None:
    make_node("one")
    status, told = patch(root, '{"labels": {"rack": "7"}, "reserved_cores": 1.5, "disabled_engines": ["sglang"]}')
    assert (status, told["labels"], told["reserved_cores"], told["disabled_engines"]) == (
        200,
        {"rack": "7"},
        1.5,
        ["sglang"],
    )
    status, told = patch(root, '{"labels": {"rack": null}, "disabled_engines": ["magic"]}')
    assert (status, told["error"]["message"]) == (  # type: ignore[index]
        400,
        "There is no engine 'magic'; known: vllm, sglang, llamacpp.",
    )
    assert Node.objects.get().set_labels == {"rack": "7"}
    status, told = patch(root, '{"labels": {"gone": null}}')
    assert (status, told["error"]["fields"]) == (400, {"labels": ["The node has no label gone."]})  # type: ignore[index]


def test_the_api_drains_forgets_and_sends_errands(root: Client) -> None:
    make_node("one")
    assert root.post("/api/v1/nodes/one/drain").json()["draining_at"]
    refused = root.delete("/api/v1/nodes/one")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "in_use")
    sent = root.post("/api/v1/nodes/one/fetch", {"source": "/x"}, content_type="application/json")
    assert (sent.status_code, sent.json()["command"]) == (202, Command.objects.get().pk)
    wrong = root.post("/api/v1/nodes/one/install", {"engine": 7}, content_type="application/json")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid")
    assert root.delete("/api/v1/nodes/one?force=true").status_code == 204
    assert not Node.objects.exists()


def test_the_page_does_the_same_and_says_so(root: Client) -> None:
    node = make_node("one")
    url = "/nodes/one/manage/"
    assert "Drain: move its replicas" in root.get(url).content.decode()
    for act, says in (("cordon", "gets no new replicas"), ("drain", "is being drained"), ("uncordon", "gets replicas")):
        assert says in root.post(url, {"act": act}, follow=True).content.decode()
    form = {"labels": "rack=7\n\n tier = gold", "reserved_cores": "2", "disabled_engines": ["vllm"]}
    assert "Node one is kept so." in root.post(url, form, follow=True).content.decode()
    node.refresh_from_db()
    assert (node.set_labels, node.reserved_cores, node.disabled_engines) == ({"rack": "7", "tier": "gold"}, 2, ["vllm"])
    assert "rack=7" in root.get(url).content.decode()
    assert "a is no label: write NAME=VALUE." in root.post(url, form | {"labels": "a"}).content.decode()
    assert "&#x27;a b&#x27; is no label" in root.post(url, form | {"labels": "a b=1"}).content.decode()
    assert "is no host name" in root.post(url, form | {"pinned_address": "a b"}).content.decode()
    root.post(url, form | {"pinned_address": "10.0.0.9"})
    node.refresh_from_db()
    assert (node.pinned_address, node.address) == ("10.0.0.9", "10.0.0.9")
    assert "10.0.0.9" in root.get(url).content.decode()
    root.post(url, {"labels": "tier=gold", "reserved_cores": "0"})
    node.refresh_from_db()
    assert (node.set_labels, node.disabled_engines, node.pinned_address) == ({"tier": "gold"}, [], "")
    assert "stop its agent first" in root.post(url, {"act": "remove"}, follow=True).content.decode()
    assert "is forgotten" in root.post(url, {"act": "remove", "force": "on"}, follow=True).content.decode()
    assert not Node.objects.exists()
    assert set(AuditEntry.objects.values_list("via", "actor_name")) == {("web", "root")}
