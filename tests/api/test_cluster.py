from __future__ import annotations

import msgspec
import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from nodes import identity, snapshot
from nodes.models import Event, Node
from nodes.summary import Summary
from tenants.keys import digest
from tenants.models import AuditEntry
from tests import factories
from tests.api.cast import World, client


@pytest.fixture
def asks(world: World) -> Client:
    return client(world.root, "read", "write")


def test_a_node_is_made_with_a_join_token_shown_once(asks: Client) -> None:
    answer = asks.post("/api/v1/nodes", {"name": "gpu1.rack"}, content_type="application/json")
    assert answer.status_code == 201
    token = answer.json()["join_token"]
    assert Node.objects.get().token_digest == digest(token)
    assert token not in asks.get("/api/v1/nodes/gpu1.rack").content.decode()
    assert "token_digest" not in asks.get("/api/v1/nodes/gpu1.rack").json()
    again = asks.post("/api/v1/nodes", {"name": "gpu1.rack"}, content_type="application/json")
    assert (again.status_code, again.json()["error"]["fields"]["name"]) == (
        409,
        [
            "There is a node gpu1.rack already; choose another name, or renew its token: "
            "llmgw ctl node-token gpu1.rack --renew"
        ],
    )


def test_a_renewed_join_token_is_shown_once_and_voids_the_old_one(asks: Client) -> None:
    old = asks.post("/api/v1/nodes", {"name": "box"}, content_type="application/json").json()["join_token"]
    answer = asks.post("/api/v1/nodes/box/token")
    assert (answer.status_code, list(answer.json())) == (201, ["token"])
    new = answer.json()["token"]
    assert identity.node_of_token(old) is None
    assert identity.node_of_token(new) == Node.objects.get()
    assert new not in asks.get("/api/v1/nodes/box").content.decode()
    entry = AuditEntry.objects.get(action="renew join token")
    assert (entry.target, entry.actor_name, new in str(entry.__dict__)) == ("box", "root", False)
    assert asks.post("/api/v1/nodes/gone/token").status_code == 404


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "ä", "x" * 121])
def test_a_node_needs_a_name_that_a_certificate_can_carry(asks: Client, name: str) -> None:
    answer = asks.post("/api/v1/nodes", {"name": name}, content_type="application/json")
    assert (answer.status_code, list(answer.json()["error"]["fields"])) == (400, ["name"])
    assert not Node.objects.exists()


def test_a_node_is_cordoned_and_uncordoned(asks: Client) -> None:
    factories.make_node("box")
    assert asks.post("/api/v1/nodes/box/cordon").json()["cordoned_at"]
    assert asks.post("/api/v1/nodes/box/cordon").status_code == 200
    assert asks.post("/api/v1/nodes/box/uncordon").json()["cordoned_at"] is None
    assert asks.post("/api/v1/nodes/gone/cordon").status_code == 404


def test_nodes_come_by_name_in_pages(asks: Client) -> None:
    for name in ("c", "a", "b"):
        factories.make_node(name)
    first = asks.get("/api/v1/nodes?limit=2").json()
    rest = asks.get(f"/api/v1/nodes?limit=2&after={first['next']}").json()
    assert [node["name"] for node in first["results"] + rest["results"]] == ["a", "b", "c"]


def test_replicas_come_with_their_shards(asks: Client, django_assert_num_queries: DjangoAssertNumQueries) -> None:
    node = factories.make_node("box")
    for number in range(5):
        factories.make_replica(f"smollm2/{number}", node=node)
    asks.get("/api/v1/me")
    with django_assert_num_queries(3):  # token, replicas, shards
        found = asks.get("/api/v1/replicas?model=smollm2").json()["results"]
    assert [each["name"] for each in found] == [f"smollm2/{number}" for number in range(5)]
    assert found[0]["shards"][0]["node"] == "box"
    assert asks.get("/api/v1/replicas?model=other").json()["results"] == []
    assert asks.get("/api/v1/replicas/smollm2/3").json()["state"] == "ready"


def test_events_come_newest_first_and_by_what_they_are_about(asks: Client) -> None:
    for number in range(3):
        Event.objects.create(at=timezone.now(), kind="ready", model=f"m{number % 2}", text=f"event {number}")
    assert [event["text"] for event in asks.get("/api/v1/events").json()["results"]] == [
        "event 2",
        "event 1",
        "event 0",
    ]
    assert [event["text"] for event in asks.get("/api/v1/events?model=m1").json()["results"]] == ["event 1"]


def test_the_summary_is_the_one_that_pages_show(asks: Client) -> None:
    factories.make_model("smollm2")
    factories.make_replica(node=factories.make_node("box"))
    answer = asks.get("/api/v1/summary")
    assert answer["Content-Type"] == "application/json"
    whole = msgspec.convert(answer.json(), Summary)
    now = snapshot.current_summary()
    assert (whole.models, whole.capacity, whole.usage_today) == (now.models, now.capacity, now.usage_today)
    assert [line.name for line in whole.nodes] == ["box"]
