"""The HTML page of a plan in a browser: desktop and phone, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from foretell.cli.main import main
from tests.browser import DESKTOP, PHONE, browser, expect, open_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]

LINE = "--target llama-3.1-70b --draft llama-3.2-1b --gpu h100 --count 4 --acceptance 0.8 --context 8k --no-plot"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
# Labels at the ends of curves must not overlap.
OVERLAPS = """Array.from(document.querySelectorAll('svg')).flatMap(svg => {
    const boxes = Array.from(svg.querySelectorAll('text[style]')).map(text => text.getBoundingClientRect());
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => a.top + 3 < b.bottom && b.top + 3 < a.bottom));
}).length"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("plan") / "plan.html"
    assert main(["plan", *LINE.split(), "--html", str(path)]) == 0
    return path.as_uri()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_renders(browser: Browser, page: str, size: tuple[int, int], dark: bool) -> None:
    with open_page(browser, page, size, dark) as opened:
        opened.screenshot(f"plan-{size[0]}-{'dark' if dark else 'light'}")
        assert opened.overflow == 0
        assert opened.page.locator("svg polyline").count() == 7
        assert opened.page.locator("table").first.locator("tbody tr").count() == 7
        assert opened.page.evaluate(OVERLAPS) == 0
        assert opened.page.evaluate(BACKGROUND) == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
        opened.page.click("summary")
        expect(opened.page.locator("details pre")).to_be_visible()
        expect(opened.page.locator("details pre")).to_contain_text('"break_even_acceptance"')
    assert not opened.errors and not opened.asked
