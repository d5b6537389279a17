"""The admin: behind a second factor, every model in it, read-only where the fleet is the truth, actions audited."""

from __future__ import annotations

import re

import pytest
from django.apps import apps
from django.contrib import admin
from django.test import Client
from django.utils import timezone
from django_otp.plugins.otp_totp.models import TOTPDevice

from catalog.models import CatalogVersion, Model
from llmgw.core.admin_site import ReadOnly
from llmgw.core.models import Secret
from nodes.models import Certificate
from tenants.models import AuditEntry, Key, Project, User
from tests import factories
from tests.pages import rows

pytestmark = pytest.mark.django_db
OURS = ("core", "tenants", "catalog", "nodes")
INSIDE_ANOTHER = {"Profile"}
FLEET = {"Node", "Certificate", "Replica", "Shard", "Command", "Event", "Backoff", "ReplicaLoad", "ModelStatus"}
RECORDS = {
    "Usage",
    "UsageSlot",
    "AuditEntry",
    "Key",
    "ApiToken",
    "SignedIn",
    "FirstLink",
    "SignInAttempt",
    "Lease",
    "Revision",
}


@pytest.fixture
def root(client: Client) -> User:
    """An operator who came with a second factor."""
    user = rows.make_operator()
    rows.sign_in_verified(client, user)
    return user


def act(client: Client, room: str, model: str, action: str, *keys: object) -> str:
    response = client.post(
        f"/admin/{room}/{model}/", {"action": action, "_selected_action": [str(key) for key in keys]}, follow=True
    )
    assert response.status_code == 200
    return response.content.decode()


def test_an_operator_without_a_second_factor_is_led_to_enrol(client: Client) -> None:
    client.force_login(rows.make_operator())
    response = client.get("/admin/tenants/key/", follow=True)
    assert response.redirect_chain[-1][0].startswith("/account/two-factor/?next=")
    assert "Enrol a second factor" in response.content.decode()


def test_an_operator_with_one_who_came_without_it_is_asked_for_the_code(client: Client) -> None:
    user = rows.make_operator()
    TOTPDevice.objects.create(user=user, confirmed=True)
    client.force_login(user)
    response = client.get("/admin/", follow=True)
    assert response.redirect_chain[-1][0].startswith("/sign-in/code/")


def test_nobody_comes_in_without_signing_in(client: Client) -> None:
    assert client.get("/admin/", follow=True).redirect_chain[-1][0].startswith("/sign-in/?next=")


def test_every_model_has_its_place() -> None:
    shown = {model for model in admin.site._registry if model._meta.app_label in OURS}
    ours = {model for room in OURS for model in apps.get_app_config(room).get_models()}
    assert {model.__name__ for model in ours - shown} == INSIDE_ANOTHER | {Secret.__name__}


def test_nobody_edits_what_the_fleet_or_a_record_tells() -> None:
    for model, page in admin.site._registry.items():
        if model.__name__ in FLEET | RECORDS:
            assert isinstance(page, ReadOnly), model


def test_every_list_opens_searches_and_shows_a_record(client: Client, root: User) -> None:
    key, _ = factories.make_key(owner=root)
    rows.make_usage(2, key=key)
    rows.make_cluster(1)
    for model in admin.site._registry:
        if model._meta.app_label not in OURS:
            continue
        url = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
        assert client.get(url).status_code == 200, url
        assert client.get(f"{url}?q=node").status_code == 200, url
        added_here = not isinstance(admin.site._registry[model], ReadOnly)
        assert client.get(f"{url}add/").status_code == (200 if added_here else 403), url
        record = model._default_manager.first()
        if record is not None:
            page = client.get(f"{url}{record.pk}/change/")
            assert page.status_code == 200, url
            assert key.digest.encode() not in page.content, url


def test_the_admin_opens_on_the_capacity(client: Client, root: User) -> None:
    factories.make_node("node1")
    page = client.get("/admin/").content.decode()
    assert "of 8 cores" in page


def test_keys_are_revoked_by_the_pages_action(client: Client, root: User) -> None:
    key, _ = factories.make_key()
    assert "1 keys revoked" in act(client, "tenants", "key", "revoke", key.pk)
    key.refresh_from_db()
    assert key.revoked_at
    assert AuditEntry.objects.get(action="revoke key").via == "admin"


def test_nodes_are_cordoned_drained_and_removed(client: Client, root: User) -> None:
    node = factories.make_node("node1")
    act(client, "nodes", "node", "cordon", node.pk)
    act(client, "nodes", "node", "drain", node.pk)
    node.refresh_from_db()
    assert node.cordoned_at
    assert node.draining_at
    act(client, "nodes", "node", "uncordon", node.pk)
    Certificate.objects.create(node=node, serial="1", made_by="root", expires_at=timezone.now())
    assert "node1: certificates revoked" in act(client, "nodes", "node", "revoke", node.pk)
    assert not Certificate.objects.exists()
    assert "/nodes/node1/manage/" in client.get("/admin/nodes/node/node1/change/").content.decode()
    assert "drain it and stop its agent first" in act(client, "nodes", "node", "remove", node.pk)
    type(node).objects.update(state="lost")
    assert "Node node1 removed" in act(client, "nodes", "node", "remove", node.pk)
    assert not type(node).objects.exists()


def test_models_are_switched_through_the_catalogs_actions(client: Client, root: User) -> None:
    model = factories.make_model()
    assert "catalog version" in act(client, "catalog", "model", "switch_off", model.pk)
    assert Model.objects.get().scaling_max == 0
    act(client, "catalog", "model", "keep_up", Model.objects.get().pk)
    assert Model.objects.get().scaling_min == 1
    act(client, "catalog", "model", "remove", Model.objects.get().pk)
    assert not Model.objects.exists()
    before = CatalogVersion.objects.order_by("-number")[1]
    act(client, "catalog", "catalogversion", "make_current", before.pk)
    assert Model.objects.get().name == "smollm2"
    assert "Choose one version" in act(
        client, "catalog", "catalogversion", "make_current", *CatalogVersion.objects.values_list("pk", flat=True)
    )


def test_changes_made_here_are_audited_without_secrets(client: Client, root: User) -> None:
    project = factories.make_project("evals")
    form = {"team": project.team_id, "name": "evaluations", "slug": "evals", "models_allowed": "[]"}
    assert client.post(f"/admin/tenants/project/{project.pk}/change/", form).status_code == 302
    assert Project.objects.get().name == "evaluations"
    entry = AuditEntry.objects.get(action="change project")
    assert (entry.before, entry.after) == ({"name": "evals"}, {"name": "evaluations"})
    inline = {"memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}
    new = {
        "username": "dora",
        "password1": "a much longer phrase",
        "password2": "a much longer phrase",
        "usable_password": "true",
        **inline,
    }
    assert client.post("/admin/tenants/user/add/", new).status_code == 302
    assert User.objects.filter(username="dora").exists()
    assert AuditEntry.objects.get(action="make user").after == {"username": "dora"}
    dora = User.objects.get(username="dora")
    assert dora.check_password("a much longer phrase")
    form = {"username": "dora", "is_active": "on", "email": "dora@example.org", **inline}
    assert client.post(f"/admin/tenants/user/{dora.pk}/change/", form).status_code == 302
    assert AuditEntry.objects.get(action="change user").after == {"email": "dora@example.org"}


def test_a_lost_phone_is_helped_by_an_operator(client: Client, root: User) -> None:
    alice = factories.make_user("alice")
    TOTPDevice.objects.create(user=alice, confirmed=True)
    act(client, "tenants", "user", "remove_second_factor", alice.pk)
    assert not TOTPDevice.objects.filter(user=alice).exists()
    act(client, "tenants", "user", "sign_out_everywhere", alice.pk)
    assert AuditEntry.objects.filter(action="remove second factor", actor=root).exists()


def test_deleting_leaves_a_trace(client: Client, root: User) -> None:
    team = factories.make_team("Gone")
    client.post(f"/admin/tenants/team/{team.pk}/delete/", {"post": "yes"})
    assert AuditEntry.objects.filter(action="delete team", target="Gone").exists()


def test_a_key_cannot_be_made_or_edited_here(client: Client, root: User) -> None:
    key, _ = factories.make_key()
    assert client.get("/admin/tenants/key/add/").status_code == 403
    assert client.post(f"/admin/tenants/key/{key.pk}/change/", {"name": "x"}).status_code == 403
    assert Key.objects.get().name == key.name


@pytest.mark.parametrize(
    "query",
    [
        "user/?password__startswith=argon2",
        "key/?digest__startswith=a",
        "key/?owner__password__startswith=a",
        "apitoken/?digest__gt=a",
        "apitoken/?user__password__startswith=a",
        "signedin/?session_key__startswith=a",
        "firstlink/?digest__contains=a",
        "usage/?key__digest__startswith=a",
    ],
)
def test_no_address_asks_for_a_secret_letter_by_letter(client: Client, root: User, query: str) -> None:
    assert client.get(f"/admin/tenants/{query}").status_code == 400


@pytest.mark.parametrize(
    "query",
    [
        "p=999999999",
        "p=-1",
        "p=abc",
        "o=99.-99.x",
        "o=%00",
        "q=%00",
        "q=' OR 1=1--",
        f"q={'x' * 20_000}",
        "all=",
        "revoked_at__isempty=%00",
        "project__id__exact=%00",
        "project__id__exact=abc",
        "_facets=True",
    ],
)
def test_odd_addresses_break_no_list(client: Client, root: User, query: str) -> None:
    factories.make_key()
    assert client.get(f"/admin/tenants/key/?{query}", follow=True).status_code == 200


@pytest.mark.parametrize("text", ["5", '{"a": 1}', "[1]", '"smollm2"', '["a\\u0000b"]', "[[]]", '["\\ud800"]'])
def test_models_allowed_is_a_list_of_names_or_is_not_taken(client: Client, root: User, text: str) -> None:
    project = factories.make_project("evals")
    key, _ = factories.make_key(project=project)
    form = {"team": project.team_id, "name": "evals", "slug": "evals", "models_allowed": text}
    page = client.post(f"/admin/tenants/project/{project.pk}/change/", form)
    assert page.status_code == 200
    assert re.search("Write a list of names|A name has 1 to 200", page.content.decode())
    assert [grant.digest for grant in Key.objects.snapshot()] == [key.digest]


def test_a_time_zone_that_is_none_is_not_taken(client: Client, root: User) -> None:
    organisation = factories.make_team().organisation
    url = f"/admin/tenants/organisation/{organisation.pk}/change/"
    form = {"name": "Default", "slug": "default", "time_zone": "Mars/Olympus"}
    assert "is no time zone" in client.post(url, form).content.decode()
    assert client.post(url, form | {"time_zone": "Europe/Berlin"}).status_code == 302
