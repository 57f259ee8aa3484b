"""Drives the page in a browser, against a real server with a key and a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import DESKTOP, Opened, open_page
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser

KEY = "a-key-of-the-page"
TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
FLAGS = ("--num-speculative-tokens", "4", "--prompt-lookup-min", "1", "--drafter", "ngram,suffix")

# Elements whose contrast with their background is below 4.5.
FAINT = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const background = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const found = rgba(getComputedStyle(e).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const faint = new Set();
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest("[disabled]")) continue;
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(background(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.add(`${element.tagName}.${element.className} ${contrast.toFixed(2)}`);
  }
  return [...faint];
}"""
# Things to be used that have no name for those who cannot see them.
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, [role=img], [role=region]")]
  .filter((e) => e.checkVisibility() && !e.labels?.length && !e.getAttribute("aria-label") && !e.textContent.trim())
  .map((e) => e.id || e.className)"""


@pytest.fixture(scope="module")
def keyed(folder: Path, browser: Browser) -> Iterator[ServerProcess]:
    """Start a server with a key, only if there is a browser."""
    with ServerProcess(folder, *FLAGS, "--api-key", KEY) as process:
        yield process


@contextmanager
def page_of(
    browser: Browser, server: ServerProcess, size: tuple[int, int] = DESKTOP, dark: bool = False
) -> Iterator[Opened]:
    """Open the page and enter the key; the only error allowed is the first 401."""
    with open_page(browser, f"{server.url}/", size, dark) as opened:
        opened.page.fill("#key", KEY)
        opened.page.press("#key", "Enter")
        opened.page.wait_for_selector("#set-rule option[value=match]", state="attached")
        opened.errors.clear()  # that it came without a key is logged by the browser
        yield opened
    assert not opened.errors
    assert all(address.startswith(server.url) for address in opened.asked)


def ask(opened: Opened, text: str = TEXT, tokens: int = 40) -> Any:
    """Send a message and wait for the complete response."""
    page = opened.page
    before = page.locator(".answer").count()
    if not page.locator("#set-tokens").is_visible():
        page.click("#settings summary")
    page.fill("#set-tokens", str(tokens))
    page.fill("#message", text)
    page.press("#message", "Enter")
    answer = page.locator(".answer").nth(before)
    answer.wait_for()
    page.wait_for_selector(".answer.writing", state="detached")
    return answer


def event_stream(*chunks: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `route.fulfill` for a complete stream of these chunks."""
    events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    return {"content_type": "text/event-stream", "body": "".join(f"data: {event}\n\n" for event in events)}
