"""Limits, budgets, prices and rolled-up usage over the API."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from llmgw.core.models import Revision
from tenants import rollup
from tenants.models import AuditEntry, Budget, Key, Organisation, Price, Project, Team, UsageSlot
from tests import factories
from tests.api.cast import NOON, World, client
from tests.tenants.test_rollup import Row, of


def send(asks: Any, method: str, path: str, body: Any = None) -> Any:
    return asks.generic(
        method, f"/api/v1/{path}", json.dumps({} if body is None else body), content_type="application/json"
    )


# --- limits ----------------------------------------------------------------------------------------------------------
def test_limits_say_what_is_set_what_holds_and_whose_it_is(world: World) -> None:
    Organisation.objects.update(requests_per_minute=50, models_allowed=["a", "b"])
    Team.objects.update(band="batch")
    asks = client(world.alice)
    body = {"requests_per_minute": 100, "tokens_per_minute": 9000, "models_allowed": ["b", "c"]}
    answer = send(asks, "PATCH", f"projects/{world.project.pk}/limits", body)
    assert answer.status_code == 200
    organisation = {"subject": "organisation", "id": world.project.team.organisation_id, "name": "Default"}
    project = {"subject": "project", "id": world.project.pk, "name": "Apps"}
    assert answer.json() == {
        **project,
        "own": {**body, "max_concurrent": None, "band": ""},
        "effective": {
            "requests_per_minute": {"value": 50, "of": organisation},
            "tokens_per_minute": {"value": 9000, "of": project},
            "max_concurrent": {"value": None, "of": None},
            "band": {"value": "batch", "of": {"subject": "team", "id": world.project.team_id, "name": "Blue"}},
            "models_allowed": {"value": ["b"], "of": [organisation, project]},
        },
    }
    assert asks.get(f"/api/v1/projects/{world.project.pk}/limits").json() == answer.json()


def test_setting_limits_leaves_one_audit_row_and_rings_once_and_the_same_again_does_neither(world: World) -> None:
    asks, path = client(world.alice), f"keys/{world.key.pk}/limits"
    before = Revision.current()
    send(asks, "PATCH", path, {"max_concurrent": 3, "band": ""})
    send(asks, "PATCH", path, {"max_concurrent": 3})
    entry = AuditEntry.objects.get(action="set limits")
    assert (entry.target, entry.before, entry.after) == (
        f"key {world.key}",
        {"max_concurrent": None},
        {"max_concurrent": 3},
    )
    assert Revision.current() == before + 1
    assert send(asks, "PATCH", path, {"max_concurrent": None}).json()["own"]["max_concurrent"] is None
    (grant,) = Key.objects.snapshot()
    assert grant.limits == ()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"requests_per_minute": 2**31}, "requests_per_minute"),
        ({"tokens_per_minute": "many"}, "tokens_per_minute"),
        ({"max_concurrent": -1}, "max_concurrent"),
        ({"band": "x" * 21}, "band"),
        ({"band": "batch"}, "band"),
        ({"models_allowed": "a"}, "models_allowed"),
        ({"models_allowed": ["a\u200b"]}, "models_allowed"),
        ({"models_allowed": ["x"] * 257}, "models_allowed"),
        ({"models_allowed": [""]}, "models_allowed.0"),
    ],
)
def test_a_wrong_limit_is_named_and_changes_nothing(world: World, body: dict[str, Any], field: str) -> None:
    answer = send(client(world.root), "PATCH", f"teams/{world.project.team_id}/limits", body)
    assert (answer.status_code, list(answer.json()["error"]["fields"])) == (400, [field])
    assert not AuditEntry.objects.filter(action="set limits").exists()


def test_only_operators_limit_teams_and_organisations(world: World) -> None:
    organisation = world.project.team.organisation
    assert (
        send(client(world.root), "PATCH", f"organisations/{organisation.pk}/limits", {"band": "high"}).status_code
        == 200
    )
    refused = send(client(world.alice), "PATCH", f"teams/{world.project.team_id}/limits", {"band": "x"})
    assert "Ask an operator." in refused.json()["error"]["message"]


def test_a_lead_lowers_the_band_and_never_lifts_it_above_what_holds(world: World) -> None:
    asks, path = client(world.alice), f"projects/{world.project.pk}/limits"
    refused = send(asks, "PATCH", path, {"band": "high"})
    assert refused.status_code == 400
    assert "The band high is above normal, which holds here" in refused.json()["error"]["message"]
    assert send(asks, "PATCH", path, {"band": "low"}).status_code == 200
    assert send(asks, "PATCH", path, {"band": "normal"}).status_code == 200
    Team.objects.update(band="low")
    assert send(asks, "PATCH", path, {"band": "normal", "max_concurrent": 1}).status_code == 200  # as it stands
    assert send(asks, "PATCH", f"keys/{world.key.pk}/limits", {"band": "high"}).status_code == 400
    assert send(client(world.root), "PATCH", path, {"band": "high"}).status_code == 200
    assert send(asks, "PATCH", f"keys/{world.key.pk}/limits", {"band": "high"}).status_code == 200
    Project.objects.update(band="of old")
    assert send(asks, "PATCH", f"keys/{world.key.pk}/limits", {"band": "low"}).status_code == 200


# --- budgets ---------------------------------------------------------------------------------------------------------
def test_a_budget_is_made_changed_counted_and_removed(world: World) -> None:
    UsageSlot.objects.all().delete()  # of the request that is there
    asks = client(world.alice)
    Price.objects.create(model="m", valid_from=NOON, input=1, output=1)
    body = {"subject": "key", "subject_id": world.key.pk, "unit": "money", "amount": "3.50", "period": "total"}
    made = send(asks, "POST", "budgets", body)
    assert made.status_code == 201, made.content
    rollup.add([of(world.key, cost=150_000_000), of(world.key, cost=None)])
    found = asks.get(f"/api/v1/budgets/{made.json()['id']}").json()
    assert found == {
        "id": made.json()["id"],
        "subject": "key",
        "subject_id": world.key.pk,
        "name": world.key.name,
        "unit": "money",
        "amount": "3.5",
        "currency": "EUR",
        "period": "total",
        "stops": True,
        "used": "1.5",
        "since": None,
        "resets_at": None,
        "time_zone": "UTC",
        "unpriced": "1 of 2 requests of this period had no price and count nothing.",
    }
    path = f"budgets/{found['id']}"
    assert send(asks, "PATCH", path, {"unit": "tokens"}).json()["error"]["fields"].keys() == {"amount"}
    changed = send(asks, "PATCH", path, {"unit": "tokens", "amount": 40, "period": "day", "stops": False}).json()
    assert (changed["amount"], changed["currency"], changed["stops"]) == ("40", None, False)
    assert changed["resets_at"]
    assert send(asks, "PATCH", path, {"stops": False}).status_code == 200
    assert send(asks, "DELETE", path).status_code == 204
    assert send(asks, "DELETE", path).status_code == 404
    told = AuditEntry.objects.filter(action__contains="budget").order_by("pk")
    assert [(entry.action, entry.before and entry.before["amount"]) for entry in told] == [
        ("make budget", None),
        ("change budget", 350_000_000),
        ("remove budget", 40),
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"amount": 0}, "amount"),
        ({"amount": "1.5"}, "amount"),
        ({"amount": "0.000000001", "unit": "money"}, "amount"),
        ({"amount": "99999999999", "unit": "money"}, "amount"),
        ({"amount": "NaN"}, "amount"),
        ({"unit": "gold"}, "unit"),
        ({"period": "year"}, "period"),
        ({"subject": "world"}, "subject"),
        ({"subject_id": 2**63}, "subject_id"),
    ],
)
def test_a_wrong_budget_is_refused_by_field(world: World, change: dict[str, Any], field: str) -> None:
    body = {"subject": "project", "subject_id": world.project.pk, "unit": "tokens", "amount": 5, "period": "day"}
    answer = send(client(world.alice), "POST", "budgets", {**body, **change})
    assert (answer.status_code, list(answer.json()["error"]["fields"])) == (400, [field])


def test_a_subject_has_a_bounded_number_of_budgets(world: World) -> None:
    asks = client(world.alice)
    body = {"subject": "project", "subject_id": world.project.pk, "unit": "tokens", "amount": 5, "period": "day"}
    answers = [send(asks, "POST", "budgets", body) for _ in range(8)]
    assert [answer.status_code for answer in answers] == [201] * 7 + [409]
    assert "Change or remove one" in answers[-1].json()["error"]["message"]


def test_budgets_are_listed_by_subject_in_pages_of_as_many_queries_whatever_their_number(
    world: World, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    Budget.objects.all().delete()
    Budget.objects.create(team=world.project.team, unit="money", amount=5, period="day")
    Budget.objects.create(team=Team.objects.get(name="Red"), unit="tokens", amount=5, period="day")
    Budget.objects.create(organisation=world.project.team.organisation, unit="tokens", amount=5, period="day")
    for _ in range(4):
        Budget.objects.create(project=world.project, unit="tokens", amount=5, period="day")
    asks = client(world.vera)
    with django_assert_num_queries(6):  # session, person, budgets, tree, slots, prices
        page = asks.get("/api/v1/budgets?limit=5").json()
    rest = asks.get(f"/api/v1/budgets?limit=5&after={page['next']}").json()
    assert [each["subject"] for each in page["results"] + rest["results"]] == ["team", "organisation"] + ["project"] * 4
    assert rest["next"] is None
    assert page["results"][0]["unpriced"] == "No price is set for what this may use: it counts nothing."
    assert len(asks.get("/api/v1/budgets?subject=team").json()["results"]) == 1
    path = f"/api/v1/budgets?subject=project&subject_id={world.project.pk}"
    assert len(asks.get(path).json()["results"]) == 4
    for query in ("subject=x", "subject_id=4", "subject=team&subject_id=x", "after=x"):
        assert asks.get(f"/api/v1/budgets?{query}").status_code == 400


# --- prices ----------------------------------------------------------------------------------------------------------
def test_prices_are_set_from_a_time_on_listed_replaced_and_removed(world: World) -> None:
    asks = client(world.root)
    body = {"model": "m", "input": "0.15", "output": 0.6, "valid_from": "2026-11-01T00:00:00Z"}
    made = send(asks, "POST", "prices", body)
    assert made.status_code == 201, made.content
    pk = made.json()["id"]
    assert made.json() == {
        "id": pk,
        "model": "m",
        "valid_from": "2026-11-01T00:00:00+00:00",
        "currency": "EUR",
        "input": "0.15",
        "cached_input": None,
        "output": "0.6",
        "request": "0",
    }
    again = send(asks, "POST", "prices", {**body, "cached_input": "0.05", "request": "0.001"}).json()
    assert (again["id"], again["cached_input"], again["request"]) == (pk, "0.05", "0.001")
    send(asks, "POST", "prices", {"model": "n", "input": 1, "output": 2})
    assert [each["model"] for each in asks.get("/api/v1/prices").json()["results"]] == ["n", "m"]
    assert len(asks.get("/api/v1/prices?model=m").json()["results"]) == 1
    (price, now) = Price.objects.all().snapshot()
    assert (price.input, price.cached_input, price.output, price.request) == (
        15_000_000,
        5_000_000,
        60_000_000,
        100_000,
    )
    assert abs(now.valid_from - timezone.now().timestamp()) < 60
    assert asks.get(f"/api/v1/prices/{pk}").json() == again
    assert send(asks, "DELETE", f"prices/{pk}").status_code == 204
    assert asks.get(f"/api/v1/prices/{pk}").status_code == 404
    assert AuditEntry.objects.filter(action__contains="price").count() == 4


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "a\u200b"}, "model"),
        ({"input": -1}, "input"),
        ({"output": "1.000000001"}, "output"),
        ({"request": "x"}, "request"),
        ({"valid_from": "soon"}, "valid_from"),
    ],
)
def test_a_wrong_price_is_refused_by_field(world: World, change: dict[str, Any], field: str) -> None:
    answer = send(client(world.root), "POST", "prices", {"model": "m", "input": 1, "output": 1, **change})
    assert (answer.status_code, list(answer.json()["error"]["fields"])) == (400, [field])


# --- usage by hours and days -----------------------------------------------------------------------------------------
def rows_of(asks: Any, query: str) -> list[dict[str, Any]]:
    """All of it, two a page."""
    found, after = [], ""
    while True:
        page = asks.get(f"/api/v1/usage/rollup?{query}&limit=2&after={after}").json()
        found += page["results"]
        after = page["next"]
        if after is None:
            return found


def test_usage_is_summed_by_day_and_hour_and_by_what_is_asked_for(world: World) -> None:
    UsageSlot.objects.all().delete()  # of the request that is there
    times = [datetime(2026, 11, day, hour, 20, tzinfo=UTC).timestamp() for day in (27, 28, 29) for hour in (8, 23)]
    rollup.add([of(world.key, at=at, model=model, cost=7) for at in times for model in ("a", "b", "c")])
    rollup.add([Row(at=times[0], project=factories.make_project().pk)])
    asks, span = client(world.vera), "since=2026-11-01&until=2026-11-30"
    days = rows_of(asks, span)
    assert [(row["at"][:10], row["requests"], row["cost"]) for row in days] == [
        ("2026-11-29", 6, "0.00000042"),
        ("2026-11-28", 6, "0.00000042"),
        ("2026-11-27", 6, "0.00000042"),
    ]
    assert days[0].keys().isdisjoint({"project", "model", "user"})
    local = rows_of(asks, f"{span}&time_zone=Asia/Kathmandu")
    assert [(row["at"], row["requests"]) for row in local] == [
        ("2026-11-30T00:00:00+05:45", 3),
        ("2026-11-29T00:00:00+05:45", 6),
        ("2026-11-28T00:00:00+05:45", 6),
        ("2026-11-27T00:00:00+05:45", 3),
    ]
    hours = rows_of(asks, f"{span}&by=hour&group=model,key,adapter")
    assert len(hours) == 18
    assert [(row["at"][:13], row["model"]) for row in hours[:4]] == [
        ("2026-11-29T23", "a"),
        ("2026-11-29T23", "b"),
        ("2026-11-29T23", "c"),
        ("2026-11-29T08", "a"),
    ]
    assert (hours[0]["key"], hours[0]["adapter"], hours[0]["prompt_tokens"]) == (world.key.pk, None, 10)
    assert sum(row["requests"] for row in rows_of(asks, f"{span}&model=b&project={world.project.pk}")) == 6
    assert sum(row["requests"] for row in rows_of(client(world.root), f"{span}&group=user")) == 19


def test_what_a_person_used_is_for_operators(world: World) -> None:
    rollup.add([of(world.key, user=world.alice.pk)])
    for query in ("group=user", f"user={world.alice.pk}"):
        assert client(world.alice).get(f"/api/v1/usage/rollup?{query}").status_code == 403
    (row,) = rows_of(client(world.root), f"since=2026-11-29&user={world.alice.pk}&group=user")
    assert row["user"] == world.alice.pk


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("by=week", "by"),
        ("group=model,model", "group"),
        ("group=status", "group"),
        ("time_zone=Nowhere", "time_zone"),
        ("key=x", "key"),
        ("since=2020-01-01", "since"),
        ("by=hour&since=2026-01-01", "since"),
        ("after=x", "after"),
        ("after=WzFd&group=model", "after"),
        ("after=WzFlNTBd", "after"),
    ],
)
def test_a_wrong_question_is_named(world: World, query: str, field: str) -> None:
    answer = client(world.alice).get(f"/api/v1/usage/rollup?{query}")
    assert (answer.status_code, list(answer.json()["error"]["fields"])) == (400, [field])


def test_a_page_of_sums_is_one_query_and_counts_nothing(
    world: World, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    UsageSlot.objects.all().delete()  # of the request that is there
    now = timezone.now()
    rollup.add([of(world.key, at=(now - timedelta(hours=hour)).timestamp()) for hour in range(50)])
    assert UsageSlot.objects.count() == 50
    asks = client(world.alice)
    with django_assert_num_queries(3) as asked:  # session, person, the page
        assert len(asks.get("/api/v1/usage/rollup?by=hour&limit=10").json()["results"]) == 10
    assert "COUNT(" not in asked[-1]["sql"].upper()


def test_the_walk_over_the_tree_shows_each_their_own(world: World) -> None:
    assert [row["name"] for row in client(world.vera).get("/api/v1/teams").json()["results"]] == ["Blue"]
    assert len(client(world.root).get("/api/v1/teams").json()["results"]) == 2
    assert len(client(world.charlie).get("/api/v1/organisations").json()["results"]) == 1
    assert client(factories.make_user()).get("/api/v1/organisations").json()["results"] == []
    assert Project.objects.count() == 1
