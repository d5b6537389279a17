"""Capacity quotas over the API (TN-6)."""

from __future__ import annotations

import pytest
from django.test import Client

from tenants.models import AuditEntry, CapacityQuota, Team
from tests import factories
from tests.api.cast import World, client
from tests.worlds import World as Fleet

CARDS = {"name": "gpu", "engine": "vllm", "gpu_class": "h100-80g", "tp": 2, "gpus_per_node": 2}


@pytest.fixture
def blue(world: World) -> Team:
    return Team.objects.get(name="Blue")


@pytest.fixture
def asks(world: World) -> Client:
    return client(world.root, "read", "write")


def put(asks: Client, team: Team, gpu_class: str, cards: object) -> tuple[int, object]:
    path = f"/api/v1/teams/{team.pk}/quotas/{gpu_class}"
    answer = asks.put(path, {"cards": cards}, content_type="application/json")
    return answer.status_code, answer.json()


def test_a_quota_is_set_shown_with_what_is_held_and_lifted(asks: Client, blue: Team) -> None:
    fleet = Fleet()
    fleet.add_cards("one", cards=8)
    factories.make_model("chat", profiles=(CARDS,), team="blue")
    fleet.run(8)
    line = {
        "team": blue.pk,
        "team_name": "Blue",
        "team_slug": "blue",
        "gpu_class": "h100-80g",
        "cards": 4,
        "held": 2,
        "models": ["chat 2"],
        "note": "",
    }
    assert put(asks, blue, "h100-80g", 4) == (200, line)
    assert asks.get("/api/v1/quotas").json() == {"results": [line], "next": None}
    assert asks.get("/api/v1/quotas?team=red").json()["results"] == []
    lifted = asks.delete(f"/api/v1/teams/{blue.pk}/quotas/h100-80g")
    assert lifted.json() == {**line, "cards": None}
    assert not CapacityQuota.objects.exists()
    assert {entry.via for entry in AuditEntry.objects.filter(action="set capacity quota")} == {"api"}


def test_lists_come_in_pages(asks: Client, blue: Team) -> None:
    for gpu_class in ("a-1g", "b-1g", "c-1g"):
        put(asks, blue, gpu_class, 1)
    first = asks.get("/api/v1/quotas?limit=2").json()
    rest = asks.get("/api/v1/quotas", {"limit": 2, "after": first["next"]}).json()
    assert [each["gpu_class"] for each in first["results"] + rest["results"]] == ["a-1g", "b-1g", "c-1g"]
    assert rest["next"] is None


@pytest.mark.parametrize(("gpu_class", "cards"), [("H100", 4), ("h100-80g", -1), ("h100-80g", "x"), ("h100-80g", None)])
def test_what_is_no_quota_is_refused(asks: Client, blue: Team, gpu_class: str, cards: object) -> None:
    status, answer = put(asks, blue, gpu_class, cards)
    assert status == 400, answer
    assert not CapacityQuota.objects.exists()


@pytest.mark.parametrize("gpu_class", ["H100", "x" * 50 + "-8g"])
def test_what_is_no_class_cannot_be_lifted_either(asks: Client, blue: Team, gpu_class: str) -> None:
    assert asks.delete(f"/api/v1/teams/{blue.pk}/quotas/{gpu_class}").status_code == 400


def test_too_many_are_refused_in_words(asks: Client, blue: Team) -> None:
    CapacityQuota.objects.bulk_create(CapacityQuota(team=blue, gpu_class=f"c{n}-8g", cards=1) for n in range(100))
    status, answer = put(asks, blue, "h100-80g", 1)
    assert (status, "Lift one of them" in str(answer)) == (409, True)


def test_people_see_the_quotas_of_their_teams_only(world: World, asks: Client, blue: Team) -> None:
    put(asks, blue, "h100-80g", 4)
    seen = {who.username: client(who).get("/api/v1/quotas").json()["results"] for who in (world.alice, world.charlie)}
    assert [line["cards"] for line in seen["alice"]] == [4]
    assert seen["charlie"] == []
