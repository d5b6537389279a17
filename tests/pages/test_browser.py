"""The main journeys in a real Chromium: sign in, second factor, keys, dashboard at several sizes."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from django.utils import timezone
from django_otp.oath import TOTP
from django_otp.plugins.otp_totp.models import TOTPDevice
from playwright.sync_api import Page, expect

from nodes.models import Event
from tenants import rollup, sign_in
from tenants.models import AuditEntry, Key, User
from tests import factories
from tests.pages import machines, rows
from tests.pages.conftest import look
from tests.tenants.test_rollup import of

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PASSWORD = "correct horse"


def code_of(device: TOTPDevice, steps: int = 0) -> str:
    """What the person's authenticator shows, `steps` of thirty seconds from now."""
    clock = TOTP(device.bin_key, device.step, device.t0, device.digits)
    clock.time = time.time() + 30 * steps
    return f"{clock.token():06d}"


def come_in(page: Page, user: User) -> None:
    page.goto("/sign-in/")
    page.get_by_label("Username").fill(user.username)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()


def test_an_operator_comes_by_the_first_link_and_is_led_to_the_admin(page: Page) -> None:
    operator = rows.make_operator()
    page.goto(sign_in.make_first_link(operator))
    look(page, "first-sign-in")
    page.get_by_role("button", name="Sign in").click()
    look(page, "password")
    page.get_by_label("New password", exact=True).fill("a much longer phrase")
    page.get_by_label("New password confirmation").fill("a much longer phrase")
    page.get_by_role("button", name="Save password").click()
    expect(page.get_by_role("heading", name="Enrol a second factor")).to_be_visible()
    look(page, "two-factor")
    page.goto("/admin/")
    expect(page.get_by_role("heading", name="Enrol a second factor")).to_be_visible()
    page.get_by_role("textbox", name="Code").fill(code_of(TOTPDevice.objects.get()))
    page.get_by_role("button", name="Enrol").click()
    expect(page.get_by_role("heading", name="Backup codes")).to_be_visible()
    backup = page.locator(".copy code").inner_text().split()
    assert len(backup) == 10
    look(page, "backup-codes")
    page.get_by_role("link", name="I have kept them").click()
    expect(page).to_have_url(re.compile(r"/admin/$"))
    expect(page.get_by_role("heading", name="Capacity").first).to_be_visible()
    look(page, "admin")

    page.goto("/account/")
    look(page, "account")
    page.get_by_role("button", name="Sign out", exact=True).first.click()
    page.goto("/sign-in/?next=/account/")
    page.get_by_label("Username").fill("root")
    page.get_by_label("Password").fill("a much longer phrase")
    page.get_by_role("button", name="Sign in").click()
    look(page, "sign-in-code")
    page.get_by_role("textbox", name="Code").fill(backup[0])
    page.get_by_role("button", name="Go on").click()
    expect(page).to_have_url(re.compile(r"/account/$"))
    expect(page.get_by_text("9 left")).to_be_visible()


def test_a_member_makes_a_key_sees_its_first_call_arrive_and_revokes_it(page: Page, live_server: Any) -> None:
    team = factories.make_team("Research")
    project = factories.make_project("evals", team=team)
    member = rows.make_member(team, rows.Role.MEMBER, "bob")
    factories.make_model()
    factories.make_replica("smollm2-1", node=factories.make_node("node1"))
    page.goto("/")
    look(page, "landing")
    page.goto("/sign-in/")
    look(page, "sign-in")
    come_in(page, member)
    expect(page.get_by_text("Make a key", exact=True)).to_be_visible()
    look(page, "home-new")
    page.get_by_role("link", name="New key").click()
    look(page, "key-make")
    page.get_by_label("Name").fill("laptop")
    page.get_by_role("button", name="Make key").click()
    secret = page.locator(".secret code").inner_text()
    key = Key.objects.get()
    assert secret.startswith(key.prefix)
    assert key.project == project
    expect(page.locator(".tab:visible")).to_contain_text(f"Bearer {secret}")
    page.get_by_text("Python", exact=True).click()
    expect(page.locator(".tab:visible")).to_contain_text('model="smollm2"')
    expect(page.get_by_text("Waiting for the first call")).to_be_visible()
    look(page, "key-made")
    rows.make_usage(key=key)
    expect(page.get_by_text("Latest answer: 20 tokens, 285 ms")).to_be_visible()
    assert page.locator("#first-call[hx-get]").count() == 0
    page.goto("/keys/")
    look(page, "key-list")
    page.get_by_role("link", name="Revoke", exact=True).click()
    look(page, "key-revoke")
    page.get_by_role("button", name="Revoke key").click()
    expect(page.get_by_text("is revoked")).to_be_visible()
    key.refresh_from_db()
    assert key.revoked_at is not None
    assert AuditEntry.objects.filter(action="revoke key", actor=member).exists()


@pytest.mark.parametrize("count", [0, 1, 50, 1000])
def test_the_cluster_pages_hold_any_number_of_rows(page: Page, count: int) -> None:
    operator = rows.make_operator()
    (rows.make_large_cluster if count > 100 else rows.make_cluster)(count)
    if count:
        key, _ = factories.make_key()
        rows.make_usage(count, key=key)
        rows.make_usage(1, key=key, status=503, error_code="no_capacity", completion_tokens=None, first_token_ms=None)
        Event.objects.create(
            kind="ready", node="node-0000", model="model-0000", text="model-0000-1 is ready on node-0000"
        )
    come_in(page, operator)
    for name in ("dashboard", "nodes", "models", "replicas", "requests"):
        page.goto(f"/{name}/")
        look(page, f"{name}-{count}")
    if count == 50:
        for name in ("nodes/node-0000", "models/model-0004", "replicas/model-0004-1", "requests/req-0"):
            page.goto(f"/{name}/")
            look(page, name.replace("/", "-"))


def test_pages_of_machines_with_cards_fit_a_laptop(page: Page) -> None:
    machines.make_fleet()
    rows.make_idle("quiet")
    project = factories.make_project("a rather long name of a project", team=factories.make_team("Research"))
    key, _ = factories.make_key(project=project)
    rows.make_usage(9, key=key, ended=timezone.now())
    rollup.add([of(key, at=timezone.now().timestamp(), cost=123_456_700_000_000) for _ in range(9)])
    come_in(page, rows.make_operator())
    page.set_viewport_size({"width": 1280, "height": 900})
    for name in ("dashboard", "nodes", "models", "replicas", "fabrics"):
        page.goto(f"/{name}/")
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert not wide, f"{name} scrolls sideways by {wide} px"


def test_the_dashboard_refreshes_itself_and_rests_while_hidden(page: Page) -> None:
    come_in(page, rows.make_operator())
    asked: list[str] = []
    page.on("request", lambda sent: asked.append(sent.url) if sent.headers.get("hx-request") else None)
    page.goto("/dashboard/")
    expect(page.get_by_text("No node yet")).to_be_visible()
    factories.make_node("gpu-01")
    expect(page.get_by_role("link", name="gpu-01")).to_be_visible()
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    before = len(asked)
    page.wait_for_timeout(3500)
    assert len(asked) == before
    with page.expect_request(lambda sent: "hx-request" in sent.headers):
        page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")


def test_the_theme_switch_lasts_and_the_pages_work_by_keyboard(page: Page) -> None:
    come_in(page, rows.make_operator())
    page.emulate_media(color_scheme="light")
    page.goto("/dashboard/")
    page.get_by_role("button", name="Light / dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_reading_and_forms_work_without_javascript(page: Page, browser: Any, live_server: Any) -> None:
    team = factories.make_team("Research")
    factories.make_project("evals", team=team)
    member = rows.make_member(team, rows.Role.MEMBER, "bob")
    context = browser.new_context(base_url=live_server.url, java_script_enabled=False)
    plain = context.new_page()
    come_in(plain, member)
    plain.goto("/keys/make/")
    plain.get_by_label("Name").fill("laptop")
    plain.get_by_role("button", name="Make key").click()
    expect(plain.locator(".secret code")).to_contain_text("sk-")
    plain.get_by_role("link", name="See whether the first call arrived").click()
    expect(plain.get_by_role("heading", name="laptop")).to_be_visible()
    context.close()
