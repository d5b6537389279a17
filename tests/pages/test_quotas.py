"""The cards of a team on its page, on the dashboard and in the admin (TN-6)."""

from __future__ import annotations

import pytest
from django.test import Client
from django.utils import timezone
from playwright.sync_api import Page, expect
from pytest_django import DjangoAssertNumQueries

import catalog.models
from nodes.models import Node
from tenants.models import AuditEntry, CapacityQuota, Role, Team, User
from tests import factories
from tests.pages import rows
from tests.pages.conftest import look
from tests.pages.test_browser import come_in
from tests.worlds import World

pytestmark = pytest.mark.django_db
CARDS = {"name": "gpu", "engine": "vllm", "gpu_class": "h100-80g", "tp": 2, "gpus_per_node": 2}


@pytest.fixture
def team() -> Team:
    team = factories.make_team("Red")
    rows.make_member(team, Role.OWNER, "olga")
    return team


@pytest.fixture
def root(client: Client, team: Team) -> Client:
    rows.sign_in_verified(client, rows.make_operator())
    return client


def text_of(client: Client, url: str) -> str:
    response = client.get(url)
    assert response.status_code == 200, response
    return response.content.decode().replace("&#x27;", "'")


def test_the_teams_page_shows_what_its_models_hold_and_may_hold(root: Client, team: Team) -> None:
    page = text_of(root, f"/limits/team/{team.pk}/")
    assert "Not limited, and none held." in page
    assert f"/teams/{team.pk}/cards/" in page
    world = World()
    world.add_cards("one", cards=8)
    factories.make_model("chat", profiles=(CARDS,), team="red")
    CapacityQuota.objects.create(team=team, gpu_class="h100-80g", cards=3)
    world.run(8)
    for url in (f"/limits/team/{team.pk}/", "/dashboard/"):
        page = text_of(root, url)
        assert "chat 2" in page
        assert "h100-80g" in page
    assert "Cards" not in text_of(root, f"/limits/organisation/{team.organisation_id}/").split("<main")[-1]


def test_operators_set_and_lift_a_quota_on_the_teams_page(root: Client, team: Team) -> None:
    url = f"/teams/{team.pk}/cards/"
    done = root.post(url, {"gpu_class": "h100-80g", "cards": "8"}, follow=True).content.decode()
    assert "The capacity quota of Red is saved. What runs already stays." in done
    assert 'value="8"' in text_of(root, f"{url}?class=h100-80g")
    assert "not a class such as h100-80g" in root.post(url, {"gpu_class": "H100", "cards": "8"}).content.decode()
    assert root.post(url, {"gpu_class": "h100-80g", "cards": "-1"}).status_code == 400
    assert root.get(f"{url}?class=a%00b-8g").status_code == 200
    assert CapacityQuota.objects.get().cards == 8
    root.post(url, {"gpu_class": "h100-80g", "cards": ""})
    assert not CapacityQuota.objects.exists()
    assert AuditEntry.objects.filter(action="set capacity quota", via="web").count() == 2


def test_too_many_quotas_are_refused_beside_the_form(root: Client, team: Team) -> None:
    CapacityQuota.objects.bulk_create(CapacityQuota(team=team, gpu_class=f"c{n}-8g", cards=1) for n in range(100))
    done = root.post(f"/teams/{team.pk}/cards/", {"gpu_class": "h100-80g", "cards": "8"})
    assert (done.status_code, "Lift one of them." in done.content.decode()) == (400, True)


def test_a_team_sees_its_quota_and_does_not_lift_it(client: Client, team: Team) -> None:
    CapacityQuota.objects.create(team=team, gpu_class="h100-80g", cards=3)
    client.force_login(User.objects.get(username="olga"))
    page = text_of(client, f"/limits/team/{team.pk}/")
    assert "h100-80g" in page
    assert "no node reports cards of class h100-80g" in page
    assert f"/teams/{team.pk}/cards/" not in page
    assert client.post(f"/teams/{team.pk}/cards/", {"gpu_class": "h100-80g", "cards": ""}).status_code == 404
    assert CapacityQuota.objects.exists()


@pytest.mark.parametrize("count", [1, 30])
def test_the_teams_page_takes_the_same_queries_however_many_cards_are_held(
    root: Client, team: Team, django_assert_num_queries: DjangoAssertNumQueries, count: int
) -> None:
    rows.make_cluster(count)
    catalog.models.Model.objects.update(team=team.slug)
    for number in range(count):
        CapacityQuota.objects.create(team=team, gpu_class=f"c{number}-8g", cards=1)
    root.get("/account/")
    with django_assert_num_queries(16):
        text_of(root, f"/limits/team/{team.pk}/")


def test_the_admin_sets_a_quota(root: Client, team: Team) -> None:
    form = {"team": team.pk, "gpu_class": "h100-80g", "cards": "4"}
    wrong = root.post("/admin/tenants/capacityquota/add/", {**form, "gpu_class": "H100"})
    assert "not a class such as h100-80g" in wrong.content.decode()
    assert root.post("/admin/tenants/capacityquota/add/", form).status_code == 302
    assert CapacityQuota.objects.get().cards == 4
    assert AuditEntry.objects.filter(via="admin", action="make capacity quota").exists()
    assert "h100-80g" in text_of(root, "/admin/tenants/capacityquota/")


# --- looked at -------------------------------------------------------------------------------------------------------
@pytest.mark.browser
@pytest.mark.django_db(transaction=True)
def test_cards_capacity_and_reasons_fit_wide_and_narrow(page: Page) -> None:
    world = World()
    world.now = timezone.now()
    for name in ("gpu-1", "gpu-2", "gpu-3"):
        world.add_cards(name, cards=8)
    Node.objects.filter(name="gpu-2").update(cordoned_at=world.now)
    world.agents["gpu-3"].broken = "CUDA out of memory: tried to allocate 2.5 GiB of 79.1 GiB"
    team = factories.make_team("Research")
    for gpu_class, cards in (("h100-80g", 4), ("b300-270g", 16)):
        CapacityQuota.objects.create(team=team, gpu_class=gpu_class, cards=cards)
    factories.make_model("chat-70b", profiles=(CARDS,), min=2, max=2, team="research")
    factories.make_model("batch", profiles=({**CARDS, "capacity_class": "spot"},), min=3, max=3, team="research")
    world.run(20)
    come_in(page, rows.make_operator())
    page.goto(f"/limits/team/{team.pk}/")
    expect(page.get_by_role("heading", name="Cards")).to_be_visible()
    look(page, "team-cards")
    page.goto("/models/batch/")
    expect(page.get_by_role("heading", name="Why")).to_be_visible()
    look(page, "model-why")
    page.goto("/dashboard/")
    expect(page.get_by_role("cell", name="b300-270g", exact=True)).to_be_visible()
    look(page, "dashboard-cards")
    page.goto(f"/teams/{team.pk}/cards/?class=h100-80g")
    look(page, "team-cards-form")
