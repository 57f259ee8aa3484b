"""A real browser for tests of pages: headless Chromium, the system's own, driven by Playwright.

    from tests.browser import DESKTOP, PHONE, browser, expect, open_page  # a fixture is imported where it is used

    def test_a_page(browser: Browser) -> None:  # playwright.sync_api.Browser, a name for the type checker only
        with open_page(browser, "file:///tmp/page.html", PHONE, dark=True) as opened:
            opened.page.click("text=Prompts")
            expect(opened.page.locator("#prompts")).to_be_visible()  # waits; `assert ... .is_visible()` does not
            opened.screenshot("phone-dark")
            assert not opened.overflow
        assert not opened.errors and not opened.asked

`browser` lives as long as a module's tests, and skips them, with the reason, where Playwright or Chromium is missing
(Debian: `apt-get install chromium`; elsewhere FORETELL_CHROMIUM names the binary). While it is open no `asyncio.run`
works in the same thread: start servers as processes. Screenshots are kept in `.artefacts/screenshots` of the checkout,
which git ignores; FORETELL_SCREENSHOTS names another folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, LocatorAssertions, Page

TIMEOUT_MS = 60_000  # milliseconds that waiting assertions wait, on a busy machine
BINARIES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = (1280, 900), (390, 844)  # width and height; a phone's is that of most that are sold
SCREENSHOTS = Path(__file__).parents[1] / ".artefacts" / "screenshots"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def find_chromium() -> str | None:
    """Return the path of this machine's Chromium, or None."""
    named = os.environ.get("FORETELL_CHROMIUM")
    return named or next((found for name in BINARIES if (found := shutil.which(name))), None)


def expect(target: Locator) -> LocatorAssertions:
    """Return Playwright's waiting assertions: a page changes after the event, not during it."""
    from playwright.sync_api import expect as expect_of

    return expect_of(target)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a browser for the tests of a module."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    binary = find_chromium()
    if binary is None:
        pytest.skip("no Chromium here: apt-get install chromium, or name one with FORETELL_CHROMIUM")
    playwright.expect.set_options(timeout=TIMEOUT_MS)
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=binary, args=["--disable-gpu", "--font-render-hinting=none"])
        yield opened
        opened.close()


@dataclass
class Opened:
    """An open page, with its errors and its requests to other hosts."""

    page: Page
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # addresses beyond the page's own

    @property
    def overflow(self) -> int:
        """Return the pixels by which the page is wider than its window; it should never scroll sideways."""
        found: int = self.page.evaluate(OVERFLOW)
        return found

    def screenshot(self, name: str) -> Path:
        """Save a screenshot of the whole page."""
        folder = Path(os.environ.get("FORETELL_SCREENSHOTS") or SCREENSHOTS)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        self.page.screenshot(path=path, full_page=True)
        return path


@contextmanager
def open_page(browser: Browser, url: str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> Iterator[Opened]:
    """Open a page in a window of this size, in light or dark colours."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        device_scale_factor=2 if size == PHONE else 1,
    )
    opened = Opened(context.new_page())
    opened.page.set_default_timeout(TIMEOUT_MS)
    _watch(opened, url)
    try:
        opened.page.goto(url)
        yield opened
    finally:
        context.close()


def _watch(opened: Opened, url: str) -> None:
    def note(message: Any) -> None:
        if message.type == "error":
            opened.errors.append(message.text)

    def asked(request: Any) -> None:
        if request.url != url and not request.url.startswith(("data:", "blob:")):
            opened.asked.append(request.url)

    opened.page.on("console", note)
    opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
    opened.page.on("request", asked)
