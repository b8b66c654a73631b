"""Chromium, and pages of stores in it. Without either, tests are skipped with the reason."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ARGUMENTS = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
DEADLINE = 180_000  # ms: only a test that fails waits for so long
SERVER_ENDED = re.compile("net::ERR_(INCOMPLETE_CHUNKED_ENCODING|EMPTY_RESPONSE|CONNECTION_)")
Open = Callable[..., "Page"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not os.environ.get("CKPTSYNC_TEST_BROWSER"):
        pytest.skip("tests in a browser are run by `make test-web`")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Open a page, and fail where it wrote an error, or showed a dialog, before the test's end."""
    contexts, errors = [], list[str]()

    def open_url(url: str, *, strict: bool = True, **options: object) -> Page:
        settings: dict[str, Any] = {
            "locale": "en-US",
            "viewport": {"width": 1280, "height": 900},
            **options,
        }
        context = browser.new_context(**settings)
        contexts.append(context)
        context.set_default_timeout(DEADLINE)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
        if strict:
            page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.goto(url)
        page.wait_for_selector("main h1", state="attached")
        return page

    yield open_url
    for context in contexts:
        context.close()
    assert not [error for error in errors if not SERVER_ENDED.search(error)]
