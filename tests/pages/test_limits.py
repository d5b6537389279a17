"""Pages of limits and budgets, and their rows in the admin."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from playwright.sync_api import Page
from pytest_django import DjangoAssertNumQueries

from tenants import rollup
from tenants.models import AuditEntry, Budget, Key, Organisation, Price, Project, Role, Team, User
from tests import factories
from tests.pages import rows
from tests.pages.conftest import look
from tests.tenants.test_rollup import of


@pytest.fixture
def project(db: None) -> Project:
    team = factories.make_team("Support desk")
    rows.make_member(team, Role.LEAD, "lea")
    rows.make_member(team, Role.VIEWER, "victor")
    return factories.make_project("bot", team=team)


@pytest.fixture
def lea(client: Client, project: Project) -> Client:
    client.force_login(User.objects.get(username="lea"))
    return client


def text_of(client: Client, url: str) -> str:
    response = client.get(url)
    assert response.status_code == 200, response
    return response.content.decode()


def test_the_page_of_a_project_says_what_holds_and_whose_it_is(lea: Client, project: Project) -> None:
    Organisation.objects.update(requests_per_minute=600, models_allowed=["a", "b"])
    Team.objects.update(tokens_per_minute=200_000, band="batch")
    Project.objects.update(tokens_per_minute=300_000, max_concurrent=32, models_allowed=["b"])
    page = text_of(lea, f"/limits/project/{project.pk}/")
    for words in ("600", "from organisation Default", "200,000", "from team Support desk", "32", "set here", "batch"):
        assert words in page
    assert "set here, from organisation Default" in page
    assert "300,000" not in page


def test_nothing_set_reads_as_not_limited_and_the_next_step_is_there(lea: Client, project: Project) -> None:
    page = text_of(lea, f"/limits/project/{project.pk}/")
    assert page.count("not limited") == 4
    assert "No budget on the path" in page
    assert "Nothing was used this month." in page


def test_a_page_without_common_names_says_that_nothing_is_allowed(lea: Client, project: Project) -> None:
    Team.objects.update(models_allowed=["a"])
    Project.objects.update(models_allowed=["b"])
    assert "none: the lists have nothing in common" in text_of(lea, f"/limits/project/{project.pk}/")


def test_budgets_show_what_is_used_when_they_reset_and_what_they_do_not_count(lea: Client, project: Project) -> None:
    key, _ = factories.make_key(project=project, name="production")
    Budget.objects.create(project=project, unit="money", amount=35 * 10**8, period="month")
    Budget.objects.create(team=project.team, unit="tokens", amount=10, period="total")
    empty = text_of(lea, f"/limits/project/{project.pk}/")
    assert "No price is set for what this may use: it counts nothing." in empty
    Organisation.objects.update(time_zone="Asia/Kathmandu")
    now = timezone.now().timestamp()
    rollup.add([of(key, at=now, cost=310_000_000), of(key, at=now, cost=None)])
    page = text_of(lea, f"/limits/project/{project.pk}/")
    for words in (
        "35.00 EUR a month",
        "3.10 EUR",
        "10 tokens in all",
        "30 tokens",
        "used up",
        "never resets",
        "resets 1 ",
        " 00:00",
        "days begin in Asia/Kathmandu",
    ):
        assert words in page
    assert "1 of 2 requests of this period had no price" in page
    assert "1 of 2 requests had no price and cost nothing here." in page
    assert "<rect" in page
    of_key = text_of(lea, f"/limits/key/{key.pk}/")
    assert "project bot" in of_key
    assert "3.10 EUR" in of_key
    assert "3.10 EUR" in text_of(lea, "/projects/")


def test_a_lead_sets_limits_of_projects_and_keys(lea: Client, project: Project) -> None:
    key, _ = factories.make_key(project=project)
    form = {"requests_per_minute": "60", "band": "low", "models_allowed": "a\n b \n\n"}
    for kind, pk in (("project", project.pk), ("key", key.pk)):
        page = lea.post(f"/limits/{kind}/{pk}/change/", form, follow=True).content.decode()
        assert "are saved" in page
    for row in (Project.objects.get(), Key.objects.get()):
        assert (row.requests_per_minute, row.tokens_per_minute, row.band) == (60, None, "low")
        assert row.models_allowed == ["a", "b"]
    Key.objects.update(band="of old")
    again = text_of(lea, f"/limits/key/{key.pk}/change/")
    assert "a\nb" in again
    assert "of old (gateways know none of that name)" in again
    assert lea.post(f"/limits/team/{project.team_id}/change/", form).status_code == 404
    assert lea.post(f"/limits/planet/{project.team_id}/change/", form).status_code == 404
    told = AuditEntry.objects.filter(action="set limits")
    assert [(entry.actor_name, entry.via) for entry in told] == [("lea", "web")] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests_per_minute": "0"}, "greater than or equal to 1"),
        ({"tokens_per_minute": "many"}, "whole number"),
        ({"band": "high"}, "not one of the available choices"),
        ({"models_allowed": "a\u200bb"}, "characters that can be seen"),
        ({"models_allowed": "\n".join(f"m{number}" for number in range(257))}, "256 are the most"),
    ],
)
def test_a_wrong_limit_is_explained_beside_its_field(
    lea: Client, project: Project, change: dict[str, str], message: str
) -> None:
    response = lea.post(f"/limits/project/{project.pk}/change/", change)
    assert response.status_code == 400
    assert message in response.content.decode()
    assert not AuditEntry.objects.filter(action="set limits").exists()


def test_a_lead_makes_changes_and_removes_budgets(lea: Client, project: Project) -> None:
    form = {"unit": "money", "amount": "350", "period": "month", "stops": "stop"}
    page = lea.post(f"/limits/project/{project.pk}/budgets/", form, follow=True).content.decode()
    assert "350.00 EUR a month" in page
    budget = Budget.objects.get()
    assert 'value="350"' in text_of(lea, f"/budgets/{budget.pk}/")
    changed = {"unit": "tokens", "amount": "1.5", "period": "day", "stops": "warn"}
    assert "Tokens are whole" in lea.post(f"/budgets/{budget.pk}/", changed).content.decode()
    page = lea.post(f"/budgets/{budget.pk}/", {**changed, "amount": "2000"}, follow=True).content.decode()
    assert "2,000 tokens a day" in page
    assert "then only shows" in page
    assert "2,000 tokens a day" in text_of(lea, f"/budgets/{budget.pk}/remove/")
    assert "is removed" in lea.post(f"/budgets/{budget.pk}/remove/", follow=True).content.decode()
    assert not Budget.objects.exists()


def test_a_ninth_budget_is_refused_in_words(lea: Client, project: Project) -> None:
    for _ in range(8):
        Budget.objects.create(project=project, unit="tokens", amount=1, period="day")
    form = {"unit": "tokens", "amount": "5", "period": "day", "stops": "stop"}
    assert "Change or remove one." in lea.post(f"/limits/project/{project.pk}/budgets/", form).content.decode()


def test_somebody_who_only_looks_finds_nothing_to_press(client: Client, project: Project) -> None:
    Budget.objects.create(project=project, unit="tokens", amount=1, period="day")
    client.force_login(User.objects.get(username="victor"))
    page = text_of(client, f"/limits/project/{project.pk}/")
    assert "/change/" not in page
    assert "/budgets/" not in page
    assert client.post(f"/limits/project/{project.pk}/change/", {"band": "x"}).status_code == 404
    assert client.post(f"/budgets/{Budget.objects.get().pk}/remove/").status_code == 404
    assert Budget.objects.exists()


def test_pages_cost_the_same_queries_however_many_projects_keys_and_budgets(
    lea: Client, project: Project, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    for _ in range(20):
        key, _ = factories.make_key(project=project)
        factories.make_project(team=project.team)
        rollup.add([of(key, at=timezone.now().timestamp())])
    for period in ("day", "week", "month", "total"):
        Budget.objects.create(project=project, unit="tokens", amount=1, period=period)
        Budget.objects.create(team=project.team, unit="money", amount=1, period=period)
    with django_assert_max_num_queries(18):
        text_of(lea, f"/limits/project/{project.pk}/")
    with django_assert_max_num_queries(4):
        text_of(lea, "/projects/")


# --- the admin -------------------------------------------------------------------------------------------------------
@pytest.fixture
def root(client: Client, project: Project) -> Client:
    rows.sign_in_verified(client, rows.make_operator())
    return client


def test_the_admin_makes_a_budget_of_exactly_one_subject(root: Client, project: Project) -> None:
    form: dict[str, Any] = {"unit": "money", "amount": "12.5", "period": "week", "stops": "on"}
    assert "A budget has one subject" in root.post("/admin/tenants/budget/add/", form).content.decode()
    both = {**form, "team": project.team_id, "project": project.pk}
    assert "A budget has one subject" in root.post("/admin/tenants/budget/add/", both).content.decode()
    fine = {**form, "team": project.team_id}
    assert root.post("/admin/tenants/budget/add/", fine).status_code == 302
    budget = Budget.objects.get()
    assert (budget.team, budget.amount) == (project.team, 1_250_000_000)
    assert 'value="12.5"' in text_of(root, f"/admin/tenants/budget/{budget.pk}/change/")
    wrong = {**fine, "unit": "tokens"}
    assert "Tokens are whole" in root.post(f"/admin/tenants/budget/{budget.pk}/change/", wrong).content.decode()
    assert AuditEntry.objects.filter(via="admin", action="make budget").exists()
    assert "12.50 a week of Support desk" in text_of(root, "/admin/tenants/budget/")


def test_the_admin_takes_prices_as_people_write_them(root: Client) -> None:
    form = {"model": "m", "valid_from_0": "2026-11-01", "valid_from_1": "00:00:00", "input": "0.15", "output": "0.6"}
    assert (
        "characters that can be seen"
        in root.post("/admin/tenants/price/add/", {**form, "model": "a\u200b"}).content.decode()
    )
    assert root.post("/admin/tenants/price/add/", form).status_code == 302
    price = Price.objects.get()
    assert (price.input, price.cached_input, price.output, price.request) == (15_000_000, None, 60_000_000, 0)
    assert price.valid_from == datetime(2026, 11, 1, tzinfo=UTC)
    assert "0.15" in text_of(root, "/admin/tenants/price/")
    again = {**form, "request": "0.001"}
    assert root.post(f"/admin/tenants/price/{price.pk}/change/", again).status_code == 302
    (entry,) = AuditEntry.objects.filter(action="change price")
    assert entry.after == {"request": "100000"}


def test_the_admin_sets_limits_of_a_team_and_refuses_what_gateways_could_not_read(
    root: Client, project: Project
) -> None:
    team = project.team
    members = {"memberships-TOTAL_FORMS": "0", "memberships-INITIAL_FORMS": "0"}
    form = {"organisation": team.organisation_id, "name": team.name, "slug": "support", **members}
    url = f"/admin/tenants/team/{team.pk}/change/"
    assert root.post(url, {**form, "models_allowed": "5"}).status_code == 200
    assert root.post(url, {**form, "models_allowed": "[]", "band": "batch"}).status_code == 200
    assert root.post(url, {**form, "models_allowed": '["a"]', "max_concurrent": "4"}).status_code == 302
    team.refresh_from_db()
    assert (team.models_allowed, team.max_concurrent) == (["a"], 4)


# --- looked at -------------------------------------------------------------------------------------------------------
@pytest.mark.browser
@pytest.mark.django_db(transaction=True)
def test_pages_of_limits_fit_wide_and_narrow(page: Page) -> None:
    team = factories.make_team("Support desk")
    project = factories.make_project("bot", team=team, requests_per_minute=600, models_allowed=["qwen3-32b", "bge-m3"])
    key, _ = factories.make_key(project=project, name="production")
    factories.make_project("mail triage", team=team)
    Organisation.objects.update(time_zone="Europe/Berlin", tokens_per_minute=200_000)
    Price.objects.create(model="m", valid_from=timezone.now(), input=1, output=1)
    Budget.objects.create(project=project, unit="money", amount=350 * 10**8, period="month")
    Budget.objects.create(team=team, unit="tokens", amount=1_000_000, period="week", stops=False)
    now = timezone.now().timestamp()
    for day in range(28):
        rollup.add([of(key, at=now - 86400 * day, cost=(day % 9 + 3) * 10**8, prompt_tokens=90_000)])
    factories.make_user("lea", is_superuser=True)
    page.goto("/sign-in/?next=/projects/")
    page.fill("input[name=username]", "lea")
    page.fill("input[name=password]", "correct horse")
    page.click("main button.primary, form button.primary")
    page.wait_for_url("**/projects/")
    look(page, "project-list")
    for name, path in (
        ("limits-project", f"limits/project/{project.pk}/"),
        ("limits-key", f"limits/key/{key.pk}/"),
        ("limits-organisation", f"limits/organisation/{team.organisation_id}/"),
        ("limits-change", f"limits/project/{project.pk}/change/"),
        ("budget-make", f"limits/project/{project.pk}/budgets/"),
    ):
        page.goto(f"/{path}")
        look(page, name)
