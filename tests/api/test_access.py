"""Every route as everybody (TN-2): a new route without a line here fails the first test."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta

import pytest
from django.test import Client
from django.urls import URLPattern
from django.utils import timezone

from llmgw.api_urls import v1
from tenants.models import ApiToken, Key, User
from tests import factories
from tests.api.cast import World, client


@dataclass(frozen=True)
class Route:
    """`read` and `write`: what Alice (owns), Vera (looks) and Charlie (a stranger) get."""

    path: str
    read: tuple[int, int, int] | None = None
    write: tuple[int, int, int] | None = None
    body: str = "{}"
    method: str = "POST"


HIDDEN = (404, 404, 404)
SELF = (200, 200, 200)
OURS = (200, 200, 404)
KEY = '{"project": PROJECT, "name": "n"}'
BUDGET = '{"subject": "project", "subject_id": PROJECT, "unit": "tokens", "amount": 5, "period": "day"}'
LIMIT = '{"max_concurrent": 4}'
ROUTES = {
    "api-me": Route("me", read=SELF),
    "api-tokens": Route("tokens", read=SELF, write=(201, 201, 201), body='{"name": "n"}'),
    "api-token-revoke": Route("tokens/999/revoke", write=(404, 404, 404)),
    "api-projects": Route("projects", read=SELF),
    "api-project": Route("projects/PROJECT", read=OURS),
    "api-keys": Route("keys", read=SELF, write=(201, 403, 404), body=KEY),
    "api-key": Route("keys/KEY", read=OURS),
    "api-key-revoke": Route("keys/KEY/revoke", write=(200, 403, 404)),
    "api-organisations": Route("organisations", read=SELF),
    "api-teams": Route("teams", read=SELF),
    "api-organisation-limits": Route(  # Charlie's team is of it too
        "organisations/ORGANISATION/limits", read=SELF, write=(403, 403, 403), body=LIMIT, method="PATCH"
    ),
    "api-team-limits": Route("teams/TEAM/limits", read=OURS, write=(403, 403, 404), body=LIMIT, method="PATCH"),
    "api-project-limits": Route(
        "projects/PROJECT/limits", read=OURS, write=(200, 403, 404), body=LIMIT, method="PATCH"
    ),
    "api-key-limits": Route("keys/KEY/limits", read=OURS, write=(200, 403, 404), body=LIMIT, method="PATCH"),
    "api-quotas": Route("quotas", read=SELF),
    "api-quota": Route("teams/TEAM/quotas/h100-80g", write=(403, 403, 404), body='{"cards": 4}', method="PUT"),
    "api-budgets": Route("budgets", read=SELF, write=(201, 403, 404), body=BUDGET),
    "api-budget": Route("budgets/ONE", read=OURS, write=(204, 403, 404), method="DELETE"),
    "api-prices": Route("prices", read=HIDDEN, write=HIDDEN),
    "api-price": Route("prices/1", read=HIDDEN, write=HIDDEN, method="DELETE"),
    "api-usage-rollup": Route("usage/rollup?project=PROJECT", read=OURS),
    "api-usage": Route("usage?project=PROJECT", read=OURS),
    "api-usage-totals": Route("usage/totals?project=PROJECT", read=OURS),
    "api-requests": Route("requests?project=PROJECT", read=OURS),
    "api-request": Route("requests/req-1", read=OURS),
    "api-catalog": Route("catalog", read=HIDDEN, write=HIDDEN, method="PUT"),
    "api-catalog-versions": Route("catalog/versions", read=HIDDEN),
    "api-catalog-version": Route("catalog/versions/1", read=HIDDEN),
    "api-catalog-roll-back": Route("catalog/versions/1/roll-back", write=HIDDEN),
    "api-models": Route("models", read=HIDDEN),
    "api-adapters": Route("models/smollm2/adapters", read=HIDDEN, write=HIDDEN, body='{"name": "x", "source": "/x"}'),
    "api-model": Route("models/smollm2", read=HIDDEN, write=HIDDEN, method="DELETE"),
    "api-summary": Route("summary", read=HIDDEN),
    "api-fabrics": Route("fabrics", read=HIDDEN),
    "api-nodes": Route("nodes", read=HIDDEN, write=HIDDEN, body='{"name": "x"}'),
    "api-node": Route("nodes/box", read=HIDDEN, write=HIDDEN, method="DELETE"),
    "api-node-drain": Route("nodes/box/drain", write=HIDDEN),
    "api-node-fetch": Route("nodes/box/fetch", write=HIDDEN, body='{"source": "x"}'),
    "api-node-install": Route("nodes/box/install", write=HIDDEN, body='{"engine": "llamacpp"}'),
    "api-node-builds": Route("nodes/box/builds", read=HIDDEN),
    "api-node-build": Route("nodes/box/builds/llamacpp", write=HIDDEN, body='{"build": "none"}', method="PUT"),
    "api-node-revoke-certificates": Route("nodes/box/revoke-certificates", write=HIDDEN),
    "api-certificates": Route("certificates", read=HIDDEN),
    "api-node-token": Route("nodes/box/token", write=HIDDEN),
    "api-node-cordon": Route("nodes/box/cordon", write=HIDDEN),
    "api-node-uncordon": Route("nodes/box/uncordon", write=HIDDEN),
    "api-replicas": Route("replicas", read=HIDDEN),
    "api-replica": Route("replicas/smollm2-1", read=HIDDEN),
    "api-events": Route("events", read=HIDDEN),
}
NAMES = sorted(ROUTES)


def place(world: World, text: str) -> str:
    """With the numbers of what Alice owns."""
    team = world.project.team
    rows = {"PROJECT": world.project, "KEY": world.key, "TEAM": team, "ORGANISATION": team.organisation}
    for word, row in {**rows, "ONE": world.budget}.items():
        text = text.replace(word, str(row.pk))
    return text


def test_every_route_is_walked() -> None:
    assert sorted(pattern.name for pattern in v1 if isinstance(pattern, URLPattern) and pattern.name) == NAMES


@pytest.mark.parametrize("by", ["session", "token"])
@pytest.mark.parametrize("name", NAMES)
def test_a_route_shows_people_what_is_theirs_and_nothing_else(world: World, name: str, by: str) -> None:
    route = ROUTES[name]
    factories.make_model("smollm2")
    factories.make_node("box")
    path, body = place(world, f"/api/v1/{route.path}"), place(world, route.body)
    scopes = ("read", "write") if by == "token" else ()
    anonymous = client(None)
    for number, person in enumerate((world.charlie, world.vera, world.alice)):  # who changes something comes last
        asks = client(person, *scopes)
        if route.read:
            assert asks.get(path).status_code == route.read[2 - number], person
        if route.write:
            answer = asks.generic(route.method, path, body, content_type="application/json")
            assert answer.status_code == route.write[2 - number], (person, answer.content)
    for method in ("GET", route.method):
        answer = anonymous.generic(method, path, body, content_type="application/json")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "not_authenticated"


@pytest.mark.parametrize("name", NAMES)
def test_a_token_without_the_scope_is_told_which_it_lacks(world: World, name: str) -> None:
    route = ROUTES[name]
    reads, writes = client(world.root, "read"), client(world.root, "write")
    path = place(world, f"/api/v1/{route.path}")
    if route.write:
        answer = reads.generic(route.method, path, "{}", content_type="application/json")
        assert answer.status_code == 403
        assert answer.json()["error"]["message"] == "This token's scopes are read; this needs write."
    if route.read:
        answer = writes.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")


@pytest.mark.parametrize("path", ["/api/schema/", "/api/docs/"])
def test_schema_and_docs_are_for_people_who_are_signed_in(world: World, path: str) -> None:
    assert client(None).get(path).status_code == 401
    answer = client(world.charlie).get(path)
    assert answer.status_code == 200
    assert b"https://" not in answer.content.replace(b"https://provider", b"")


def test_an_unknown_route_answers_as_an_api(world: World) -> None:
    answer = client(world.root).get("/api/v1/nonsense")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert client(None).post("/api/v1/nonsense").status_code == 401


# --- who tries more than that ----------------------------------------------------------------------------------------
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND")
WRITES = sorted(name for name, route in ROUTES.items() if route.write)
EXACT = {
    "api-tokens", "api-keys", "api-budgets", "api-prices", "api-nodes", "api-adapters", "api-catalog", "api-quota",
    "api-organisation-limits", "api-team-limits", "api-project-limits", "api-key-limits",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_no_method_shows_or_does_what_another_may_not(world: World, name: str) -> None:
    """What a stranger gets is decided by who asks: whichever method, nothing is done, found out or broken."""
    factories.make_model("smollm2")
    factories.make_node("box")
    route, stranger, nobody = ROUTES[name], client(world.charlie), client(None)
    for asks in (stranger, nobody):
        asks.raise_request_exception = False
    path, shown = place(world, f"/api/v1/{route.path}"), route.read and route.read[2] == 200
    for method in METHODS:
        if not (route.write and method == route.method and route.write[2] < 300):
            answer = stranger.generic(method, path, "[]", content_type="application/json")
            allowed = (200, 400, 403, 404, 405) if method in ("GET", "HEAD", "OPTIONS") else (400, 403, 404, 405)
            assert answer.status_code in allowed, method
            if method in ("GET", "HEAD") and not shown:
                assert answer.status_code in (404, 405), method
            if method == "OPTIONS" and route.read == HIDDEN:
                assert answer.status_code == 404
        assert nobody.generic(method, path, "[]", content_type="application/json").status_code == 401, method


@pytest.mark.parametrize("name", WRITES)
def test_a_session_changes_nothing_for_another_site(world: World, name: str) -> None:
    route, browser = ROUTES[name], Client(enforce_csrf_checks=True)
    browser.force_login(world.root)
    path, body = place(world, f"/api/v1/{route.path}"), place(world, route.body)
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        for headers in ({}, {"Authorization": "Basic eDp4"}, {"X-HTTP-Method-Override": "GET"}):
            assert browser.generic(route.method, path, body, content_type=kind, headers=headers).status_code == 403
    tried = browser.generic(
        route.method, path, body, content_type="application/json", headers={"Authorization": "Bearer x"}
    )
    assert tried.status_code == 401


@pytest.mark.parametrize("name", sorted(EXACT))
def test_a_field_that_there_is_not_is_named_and_nothing_is_done(world: World, name: str) -> None:
    factories.make_model("smollm2")
    route, root = ROUTES[name], client(world.root)
    for field in ("id", "owner", "is_superuser", "expires", "model_allowed"):
        sent = {**json.loads(place(world, route.body)), field: 1}
        path = place(world, f"/api/v1/{route.path}")
        answer = root.generic(route.method, path, json.dumps(sent), content_type="application/json")
        assert answer.status_code == 400, answer.content
        assert field in answer.content.decode()
    assert not Key.objects.filter(name="n").exists()


@pytest.mark.parametrize("end", ["revoked", "expired", "inactive"])
def test_a_token_that_has_ended_opens_nothing(world: World, end: str) -> None:
    asks, now = client(world.root, "read", "write"), timezone.now()
    if end == "inactive":
        User.objects.filter(pk=world.root.pk).update(is_active=False)
    else:
        ApiToken.objects.update(**{"revoked_at" if end == "revoked" else "expires_at": now})
    for name in NAMES:
        route = ROUTES[name]
        for method in {"GET", route.method}:
            path = place(world, f"/api/v1/{route.path}")
            answer = asks.generic(method, path, place(world, route.body), content_type="application/json")
            assert answer.status_code == 401, (name, method)


def test_a_token_hands_on_no_more_time_than_it_has(world: World) -> None:
    asks, end = client(world.alice, "read", "write"), timezone.now() + timedelta(hours=1)
    ApiToken.objects.update(expires_at=end)
    for later in (None, (end + timedelta(seconds=1)).isoformat()):
        answer = asks.post("/api/v1/tokens", {"name": "n", "expires_at": later}, content_type="application/json")
        assert answer.status_code == 403
        assert "name an expires_at up to then" in answer.json()["error"]["message"]
    sent = {"name": "n", "expires_at": end.isoformat()}
    assert asks.post("/api/v1/tokens", sent, content_type="application/json").status_code == 201
