"""A real Chromium on the live server, people to be, and rows to look at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from pytest_django.live_server_helper import LiveServer

CHROMIUM = "/usr/bin/chromium"
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
SHOTS = Path(__file__).parent / "shots"
WITHIN_MS = 40_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Playwright's loop runs in this thread, which Django takes for asynchronous code that must not touch the database.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        expect.set_options(timeout=WITHIN_MS)
        yield chromium
        chromium.close()
    del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture
def page(browser: Browser, live_server: LiveServer) -> Iterator[Page]:
    """A page of a fresh profile; the test fails on any script error and on any request that leaves this server."""
    context = browser.new_context(base_url=live_server.url, viewport={"width": 1440, "height": 1000})
    context.set_default_timeout(WITHIN_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"script error: {error}"))
    page.on("console", lambda line: wrong.append(line.text) if "Content Security Policy" in line.text else None)
    page.on(
        "request",
        lambda sent: None if sent.url.startswith((live_server.url, "data:")) else wrong.append(f"outside: {sent.url}"),
    )
    yield page
    context.close()
    assert not wrong


def look(page: Page, name: str) -> None:
    """Nothing scrolls sideways, wide or narrow. With LLMGW_SHOTS set, pictures in both themes to be looked at."""
    for width, height in ((390, 844), (1440, 1000)):
        page.set_viewport_size({"width": width, "height": height})
        fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert page.evaluate(fits), f"{name} scrolls sideways at {width} px"
        if os.environ.get("LLMGW_SHOTS"):
            SHOTS.mkdir(exist_ok=True)
            for theme in ("dark", "light"):
                page.emulate_media(color_scheme=theme)
                page.screenshot(path=SHOTS / f"{name}-{width}-{theme}.png", full_page=True)
