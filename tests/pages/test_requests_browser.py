"""The list of requests and one request's page in a real Chromium."""

from __future__ import annotations

import msgspec
import pytest
from playwright.sync_api import Page, expect

from tenants.models import Role
from tests import factories
from tests.pages import rows
from tests.pages.conftest import look
from tests.pages.test_browser import come_in
from tests.pages.test_requests import WHY

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_a_member_narrows_the_list_finds_one_by_its_id_and_reads_its_story(page: Page) -> None:
    team = factories.make_team("Research")
    key, _ = factories.make_key(project=factories.make_project("evals", team=team), name="laptop")
    factories.make_project("a project with quite a long name", team=team)
    come_in(page, rows.make_member(team, Role.MEMBER, "bob"))
    page.goto("/requests/")
    look(page, "requests-0")
    factories.make_model()
    rows.make_usage(30, key=key)
    rows.make_usage(2, key=key, status=429, error_code="rate_limited", replica="", node="", first_token_ms=None)
    rows.make_usage(1, key=key, status=502, error_code="engine_failed")
    rows.make_usage(1, key=key, status=499, error_code="client_left")
    rows.make_usage(
        1,
        key=key,
        request_id="req-0123456789abcdef-0000002a",
        queue_ms=120.0,
        first_token_ms=161.0,
        streamed=True,
        band="interactive",
        explained=msgspec.to_builtins(WHY),
    )
    page.goto("/requests/")
    expect(page.locator("#live tbody tr")).to_have_count(35)
    look(page, "requests")

    page.get_by_role("link", name="refused", exact=True).click()
    expect(page.locator("#live tbody tr")).to_have_count(2)
    page.get_by_label("Error code").fill("engine_failed")
    page.get_by_label("From (UTC)").fill("2026-01-31T12:00")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_text("No request fits.")).to_be_visible()
    expect(page.get_by_label("From (UTC)")).to_have_value("2026-01-31T12:00")
    page.get_by_label("Key").fill("sk-none")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_text("There is no key sk-none that you can see.")).to_be_visible()
    look(page, "requests-problem")
    page.get_by_role("link", name="no filter").click()

    page.get_by_label("Request id").press_sequentially("req-0123")
    expect(page.locator("#live tbody tr")).to_have_count(1)
    page.get_by_label("Request id").press_sequentially("x")
    expect(page.get_by_text("has an id that begins with")).to_be_visible()
    page.get_by_label("Request id").fill("req-0123456789abcdef-0000002a")
    page.get_by_label("Request id").press("Enter")
    expect(page.get_by_role("heading", name="What happened")).to_be_visible()
    expect(page.get_by_text("So its fallback, model smollm2, got it.")).to_be_visible()
    look(page, "request")
    page.goto("/requests/req-0/")
    look(page, "request-without-explanation")


def test_what_is_typed_into_the_search_is_not_swept_away_by_the_list_that_refreshes(page: Page) -> None:
    come_in(page, rows.make_operator())
    rows.make_usage(5)
    page.goto("/requests/")
    with page.expect_response(lambda answer: "id=req-3" in answer.url):
        page.get_by_label("Request id").fill("req-3")
    expect(page.locator("#live tbody tr")).to_have_count(1)
    with page.expect_response(lambda answer: "id=req-3" in answer.url, timeout=20_000):
        page.get_by_label("Request id").blur()  # the next refresh of the list asks for the same
    expect(page.locator("#live tbody tr")).to_have_count(1)
    page.get_by_label("Request id").fill("")
    expect(page.locator("#live tbody tr")).to_have_count(5)
