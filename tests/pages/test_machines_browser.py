"""Pages of machines with cards and networks in a real Chromium, wide and narrow."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests import factories
from tests.pages import machines, rows
from tests.pages.conftest import look
from tests.pages.test_browser import come_in

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_machines_and_fabrics_fit_any_screen(page: Page) -> None:
    operator = rows.make_operator()
    come_in(page, operator)
    page.goto("/fabrics/")
    look(page, "fabrics-0")
    machines.make_fleet()
    rows.make_idle("quiet")
    key, _ = factories.make_key(
        project=factories.make_project(
            "a project with a long name", team=factories.make_team("Support desk of the south")
        )
    )
    rows.make_usage(12, key=key, model="quiet")
    for name in (
        "dashboard",
        "nodes",
        "nodes/gpu-02",
        "nodes/gpu-04",
        "nodes/cpu-01",
        "fabrics",
        "replicas",
        "replicas/deepseek-1",
    ):
        page.goto(f"/{name}/")
        look(page, f"machines-{name.replace('/', '-')}")
    page.goto("/nodes/gpu-02/")
    page.get_by_role("link", name="Fabrics", exact=True).click()
    expect(page.get_by_role("heading", name="Fabrics", level=1)).to_be_visible()
    page.get_by_role("link", name="in no fabric").click()
    expect(page.get_by_text("network 10.0.0.0/24 on ens1f0np0").first).to_be_visible()


def test_a_build_is_chosen_on_a_nodes_page_and_stands_there(page: Page) -> None:
    come_in(page, rows.make_operator())
    machines.make_fleet()
    page.goto("/nodes/gpu-02/")
    page.get_by_role("link", name="Choose builds").click()
    chosen = page.get_by_label("Build of vllm")
    chosen.select_option("none")
    page.get_by_role("row", name="vllm").get_by_role("button", name="Use it").click()
    expect(page.get_by_text("Chosen: node gpu-02 starts no vllm any more; what runs goes on.").first).to_be_visible()
    expect(chosen).to_have_value("none")
    look(page, "node-builds")
    page.goto("/nodes/gpu-02/")
    expect(page.get_by_text("none was chosen")).to_be_visible()
    look(page, "node-builds-told")
