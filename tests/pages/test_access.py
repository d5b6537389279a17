"""Every page as everybody: Alice owns, Victor only looks, Charlie is of another team, Root operates, and nobody."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, reverse

from catalog.models import CatalogVersion
from tenants.models import Budget, Key, Role, User
from tests import factories
from tests.pages import rows

pytestmark = pytest.mark.django_db

OPEN = {"home", "about", "sign-in", "sign-in-code", "first-sign-in", "sign-out"}
OWN = {"account", "password", "two-factor", "two-factor-remove", "backup-codes", "session-end"}
LISTS = {"project-list", "key-list", "key-make", "request-list", "request-export"}
OF_A_PROJECT = {"limits", "key-detail", "key-first-call", "request-detail"}
TO_EDIT = {"key-revoke"}
TO_LEAD = {"limits-change", "budget-make", "budget-change", "budget-remove"}
CLUSTER = {
    "quota-set",
    "dashboard",
    "node-list",
    "node-make",
    "node-detail",
    "node-manage",
    "fabric-list",
    "model-list",
    "model-detail",
    "replica-list",
    "replica-detail",
    "catalog-list",
    "catalog-add",
    "catalog-edit",
    "catalog-adapters",
    "catalog-remove",
    "catalog-text",
    "catalog-version-list",
    "catalog-version",
}
POSTED = {"backup-codes", "session-end", "sign-out"}
MISSING, SIGN_IN, FINE = 404, 302, 200


@dataclass(frozen=True)
class World:
    people: dict[str, User]
    key: Key
    urls: dict[str, str]


@pytest.fixture
def world() -> World:
    team, other = factories.make_team("Research"), factories.make_team("Support")
    people = {
        "alice": rows.make_member(team, Role.OWNER, "alice"),
        "bob": rows.make_member(team, Role.MEMBER, "bob"),
        "victor": rows.make_member(team, Role.VIEWER, "victor"),
        "charlie": rows.make_member(other, Role.OWNER, "charlie"),
        "stranger": factories.make_user("stranger"),
        "root": rows.make_operator(),
    }
    key, _ = factories.make_key(project=factories.make_project("evals", team=team), owner=people["alice"])
    factories.make_project("bot", team=other)
    budget = Budget.objects.create(project=key.project, unit="tokens", amount=1000, period="month")
    rows.make_usage(key=key)
    factories.make_model()
    CatalogVersion.objects.create(number=1, text="models: []", made_by="root")
    factories.make_replica("smollm2-1", node=factories.make_node("node1"))
    arguments: dict[str, list[object]] = {
        "first-sign-in": ["made-up"],
        "key-detail": [key.pk],
        "key-first-call": [key.pk],
        "key-revoke": [key.pk],
        "limits": ["project", key.project_id],
        "limits-change": ["project", key.project_id],
        "quota-set": [team.pk],
        "budget-make": ["key", key.pk],
        "budget-change": [budget.pk],
        "budget-remove": [budget.pk],
        "request-detail": ["req-0"],
        "node-detail": ["node1"],
        "node-manage": ["node1"],
        "model-detail": ["smollm2"],
        "replica-detail": ["smollm2-1"],
        "catalog-edit": ["smollm2"],
        "catalog-adapters": ["smollm2"],
        "catalog-remove": ["smollm2"],
        "catalog-version": [1],
    }
    return World(people, key, {name: reverse(name, args=arguments.get(name)) for name in page_names()})


def page_names(patterns: list[URLPattern | URLResolver] | None = None) -> list[str]:
    """Every named page of ours: the admin and the API have tests of their own."""
    names = []
    for entry in patterns if patterns is not None else get_resolver().url_patterns:
        if isinstance(entry, URLResolver):
            if not str(entry.pattern).startswith(("admin/", "api/")):
                names += page_names(entry.url_patterns)
        elif entry.name:
            names.append(entry.name)
    return names


def test_every_page_has_a_place_in_this_test() -> None:
    assert set(page_names()) == OPEN | OWN | LISTS | OF_A_PROJECT | TO_EDIT | TO_LEAD | CLUSTER


def expected(who: str, name: str) -> int:
    if name == "first-sign-in":
        return MISSING
    if name in OPEN - {"sign-in", "sign-in-code", "sign-out"}:
        return FINE
    if who == "anonymous":
        return SIGN_IN
    if name in OWN | LISTS or who == "root":
        return FINE
    if name in OF_A_PROJECT:
        return FINE if who in ("alice", "bob", "victor") else MISSING
    if name in TO_LEAD:
        return FINE if who == "alice" else MISSING
    return FINE if name in TO_EDIT and who in ("alice", "bob") else MISSING


@pytest.mark.parametrize("who", ["anonymous", "alice", "bob", "victor", "charlie", "stranger", "root"])
def test_everybody_sees_what_is_theirs_and_nothing_else(client: Client, world: World, who: str) -> None:
    if who in world.people:
        client.force_login(world.people[who])
    seen, wanted = {}, {}
    for name, url in world.urls.items():
        if name in {"sign-in", "sign-in-code"} | POSTED:
            continue
        seen[name], wanted[name] = client.get(url).status_code, expected(who, name)
    assert seen == wanted


@pytest.mark.parametrize("who", ["anonymous", "victor", "charlie", "stranger"])
def test_nobody_revokes_what_is_not_theirs_to_revoke(client: Client, world: World, who: str) -> None:
    if who in world.people:
        client.force_login(world.people[who])
    assert client.post(world.urls["key-revoke"]).status_code in (MISSING, SIGN_IN)
    world.key.refresh_from_db()
    assert world.key.revoked_at is None


@pytest.mark.parametrize("who", ["victor", "charlie", "stranger", "root", "bob"])
def test_keys_are_made_only_in_projects_of_ones_own(client: Client, world: World, who: str) -> None:
    client.force_login(world.people[who])
    response = client.post("/keys/make/", {"name": "mine", "project": str(world.key.project_id)})
    made = Key.objects.filter(name="mine", project=world.key.project).exists()
    assert made == (who in ("bob", "root"))
    assert ("sk-" in response.content.decode()) == made


def test_lists_hold_nothing_of_other_teams(client: Client, world: World) -> None:
    client.force_login(world.people["charlie"])
    for url in ("/keys/", "/requests/", "/requests.csv", "/account/", "/"):
        page = client.get(url).getvalue().decode()
        assert world.key.prefix not in page
        assert "req-0" not in page
        assert "evals" not in page


@pytest.mark.parametrize("who", ["alice", "victor", "stranger"])
def test_the_admin_does_not_exist_for_people_who_do_not_operate(client: Client, world: World, who: str) -> None:
    client.force_login(world.people[who])
    assert client.get("/admin/", follow=True).status_code == 404


def test_a_fragment_does_not_fill_with_the_sign_in_page(client: Client, world: World) -> None:
    response = client.get("/dashboard/", headers={"hx-request": "true"})
    assert response.status_code == 204
    assert response["HX-Refresh"] == "true"


def test_posts_need_the_form_of_this_site(world: World) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(world.people["alice"])
    response = client.post(world.urls["key-revoke"])
    assert response.status_code == 403
    assert b"listen.public_url" in response.content


def test_pages_are_not_kept_by_shared_caches(client: Client, world: World) -> None:
    client.force_login(world.people["alice"])
    assert "private" in client.get("/keys/")["Cache-Control"]
    assert "HX-Request" in client.get("/")["Vary"]
    assert "no-store" in client.post("/keys/make/", {"name": "x"})["Cache-Control"]
