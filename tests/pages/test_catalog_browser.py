"""An operator adds a model, scales it, gives it an adapter, breaks a text and goes back, in a real Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from pytest_django.live_server_helper import LiveServer

from catalog.models import CatalogVersion, Model
from tests.pages import rows
from tests.pages.conftest import look
from tests.pages.test_browser import come_in
from tests.stubs import tiny_gguf

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_an_operator_keeps_the_catalog_in_a_browser(page: Page, tmp_path: Path) -> None:
    source = str(tiny_gguf.write_model(tmp_path / "tiny.gguf"))
    come_in(page, rows.make_operator())
    page.get_by_role("link", name="Catalog").click()
    look(page, "catalog-empty")
    page.get_by_role("link", name="Add a model").first.click()
    look(page, "catalog-add")
    page.locator("#id_name").fill("org/tiny")
    page.get_by_label("Source").fill(source)
    page.get_by_label("Kept up").fill("2")
    page.get_by_label("At most").fill("1")
    page.locator("#id_profiles-0-name").fill("cpu")
    page.get_by_label("Engine").select_option("llamacpp")
    page.get_by_label("Arguments").fill("--ctx-size 4096\n--temp 0.2")
    page.get_by_role("button", name="Add").click()
    expect(page.get_by_text("max 1 is below min 2; raise max or lower min.")).to_be_visible()
    expect(page.get_by_label("Arguments").first).to_have_value("--ctx-size 4096\n--temp 0.2")
    look(page, "catalog-add-refused")
    page.get_by_label("At most").fill("3")
    page.get_by_role("button", name="Add").click()
    expect(page.get_by_text("org/tiny is saved.")).to_be_visible()
    (model,) = Model.objects.snapshot()
    assert model.profiles[0].args == ("--ctx-size", "4096", "--temp", "0.2")
    assert (model.scaling.min, model.scaling.max) == (2, 3)

    page.goto("/catalog/edit/org/tiny/")
    look(page, "catalog-edit")
    page.get_by_label("Requests at once").first.fill("8")
    page.get_by_text("Environment, placement, limits").first.click()
    page.get_by_label("Free disk in GB").first.fill("2.5")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("org/tiny is saved.")).to_be_visible()
    profile = Model.objects.snapshot()[0].profiles[0]
    assert (profile.weight, profile.min_disk_gb) == (8, 2.5)

    page.goto("/catalog/adapters/org/tiny/")
    other = str(tiny_gguf.write_adapter(tmp_path / "other.gguf", architecture="qwen2"))
    for name, path, says in (
        ("blue", other, "It was made for qwen2, and the model is llama."),
        ("red", str(tiny_gguf.write_adapter(tmp_path / "red.gguf")), "red is an adapter of org/tiny."),
    ):
        page.get_by_label("Name").fill(name)
        page.get_by_label("Source").fill(path)
        page.get_by_role("button", name="Add adapter").click()
        expect(page.get_by_text(says)).to_be_visible()
        look(page, f"catalog-adapters-{name}")

    page.goto("/catalog/")
    expect(page.get_by_text("kept up: 2 to 3")).to_be_visible()
    look(page, "catalog")
    page.get_by_role("link", name="As text").click()
    text = page.get_by_label("The catalog as YAML")
    text.fill(text.input_value().replace("max: 3", "maxx: 3"))
    page.get_by_role("button", name="Check only").click()
    expect(page.get_by_text("The key maxx is unknown. Did you mean max?")).to_be_visible()
    look(page, "catalog-text")
    text.fill(text.input_value().replace("maxx: 3", "max: 5"))
    page.get_by_label("Why").fill("more room")
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_text("changed: org/tiny")).to_be_visible()

    page.get_by_role("link", name="Versions").click()
    expect(page.get_by_text("more room")).to_be_visible()
    look(page, "catalog-versions")
    page.get_by_role("link", name="2", exact=True).click()
    look(page, "catalog-version")
    page.get_by_role("button", name="Make it the catalog again").click()
    expect(page.get_by_text("The catalog is as in version 2 again.")).to_be_visible()
    (model,) = Model.objects.snapshot()
    assert (model.scaling.max, model.adapters) == (3, ())
    assert [version.made_by for version in CatalogVersion.objects.all()] == ["root"] * 5


def test_the_forms_work_without_javascript(browser: Browser, live_server: LiveServer) -> None:
    context = browser.new_context(base_url=live_server.url, java_script_enabled=False)
    plain = context.new_page()
    come_in(plain, rows.make_operator())
    plain.goto("/catalog/add/")
    plain.locator("#id_name").fill("m")
    plain.get_by_label("Source").fill("/m/m.gguf")
    plain.locator("#id_profiles-0-name").fill("cpu")
    plain.get_by_label("Engine").select_option("llamacpp")
    plain.get_by_role("button", name="Add").click()
    expect(plain).to_have_url(re.compile(r"/models/m/$"))
    context.close()
    assert Model.objects.get().name == "m"
