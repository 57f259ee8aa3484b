"""The page's conversation in a real browser: Markdown, hostile output, copy, regenerate, and what a reload keeps."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import PHONE, Opened, browser, expect
from tests.server.page_driver import FAINT, NAMELESS, ask, event_stream, keyed, page_of
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser", "keyed"]
CHAT = "**/v1/chat/completions"

DOCUMENT = """# Title with *emphasis*

A paragraph with **strong**, `code *x*`, snake_case_name, ~~gone~~ and [a link](https://example.org/a_(b)).
Its second line, 2 * 3 * 4.

1. one
   - nested

   more of one
2. two

| name | count |
|------|------:|
| `x`  | 1 |

> quoted

```python
def f(a_b):
    return "*"
```
The end.
"""

HOSTILE = [
    "<script>window.hacked=1</script>",
    "<img src=x onerror='window.hacked=1'>",
    "[click](javascript:window.hacked=1)",
    "[click](JaVaScRiPt:window.hacked=1)",
    "[click](data:text/html,<script>window.hacked=1</script>)",
    "[click](vbscript:x) [click](//evil.example/x) [click](/v1/models) [click](blob:x)",
    "![picture](https://evil.example/pixel.png)",
    "![](https://evil.example/pixel.png)",
    "[![x](https://evil.example/a.png)](https://evil.example/b)",
    '```"><script>window.hacked=1</script>\n</code></pre><img src=x onerror=window.hacked=1>\n```',
    "| <img src=x onerror=window.hacked=1> | b |\n|---|---|\n| <svg onload=window.hacked=1> | [c](javascript:1) |",
    '[x](https://evil.example/"onmouseover="window.hacked=1)',
    "<a href='javascript:window.hacked=1'>x</a> <iframe src='//evil.example'></iframe> <style>*{display:none}</style>",
    "# <b onclick=window.hacked=1>bold</b>",
    "${window.hacked=1} {{constructor.constructor('window.hacked=1')()}}",
]


def chunk(text: str, origin: str = "ngram", finish_reason: str | None = None) -> dict[str, Any]:
    """Return a chunk of one round that generated this text as one token."""
    detail = {"id": 1, "text": text, "origin": origin, "probability": 0.5, "draft_confidence": 0.5, "rejected": []}
    rounds = [{"tokens": 1, "drafted": 1, "accepted": 1, "drafter": "ngram", "skipped": None, "at_ms": 1}]
    choice = {"delta": {"content": text}, "token_details": [detail], "rounds": rounds, "finish_reason": finish_reason}
    return {"choices": [choice]}


@contextmanager
def generating(opened: Opened, *texts: str, finish_reason: str | None = None) -> Iterator[None]:
    """Let the server generate these tokens."""
    chunks = [chunk(text) for text in texts[:-1]] + [chunk(texts[-1], finish_reason=finish_reason)]
    opened.page.route(CHAT, lambda route: route.fulfill(**event_stream(*chunks)))
    yield
    opened.page.unroute(CHAT)


def pieces(text: str, seed: int) -> list[str]:
    """Cut a text into random pieces of up to eight characters, as tokens do."""
    draw = random.Random(seed)
    found = []
    while text:
        size = draw.randint(1, 8)
        found.append(text[:size])
        text = text[size:]
    return found


def test_markdown_is_rendered_and_every_token_keeps_its_colour(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        with generating(opened, *pieces(DOCUMENT, seed=1)):
            body = ask(opened).locator("> .text")
        expect(body.locator("> h3 > em")).to_have_text("emphasis")
        expect(body.locator("> p").first).to_have_text(
            "A paragraph with strong, code *x*, snake_case_name, gone and a link.\nIts second line, 2 * 3 * 4."
        )
        for selector, text in {
            "p > strong": "strong", "p > code": "code *x*", "p > s": "gone", "ol > li > ul > li": "nested",
            "ol > li:nth-child(2)": "two", "td:first-child > code": "x", "blockquote > p": "quoted",
            ".code-head > span": "python", "pre > code": 'def f(a_b):\n    return "*"', "> p:last-child": "The end.",
        }.items():  # fmt: skip
            expect(body.locator(selector)).to_have_text(text)
        expect(body.locator("th").last).to_have_attribute("data-align", "right")
        link = body.locator("a")
        expect(link).to_have_attribute("href", "https://example.org/a_(b)")
        expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")
        loose = "e => [...e.querySelectorAll(':is(p, li, h3, td, th, code)')].flatMap(x => [...x.childNodes])"
        assert body.evaluate(f"e => ({loose})(e).filter(n => n.nodeType === 3).map(n => n.data)") == []
        opened.screenshot("markdown")
        opened.page.uncheck("#markdown")
        assert body.evaluate("e => e.textContent") == DOCUMENT
        opened.page.check("#markdown")
        expect(body.locator("> h3 > em")).to_have_text("emphasis")


def test_a_stream_is_rendered_like_the_complete_text(browser: Browser, keyed: ServerProcess) -> None:
    """Only the last blocks are parsed again with each chunk; that must not show."""
    compare = """async ([whole, cuts]) => {
      const { MarkdownView } = await import("./page/markdown_view.js");
      const view = () => new MarkdownView(document.createElement("div"), (into, text) => into.append(text));
      const [complete, streamed] = [view(), view()];
      complete.draw(whole);
      let shown = "";
      for (const cut of cuts) streamed.draw((shown += cut));
      return [complete.element.isEqualNode(streamed.element), complete.element.children.length];
    }"""
    lists = "- a\n\n1. b\n\n2. c\n   \n  d\n\ne\n- f\n***\na | b\n-|-\nc | d\n\n\n> q\n\n    x\n~~~\n```\n~~~\ny"
    with page_of(browser, keyed) as opened:
        for text in (DOCUMENT, lists):
            for seed in range(20):
                equal, blocks = opened.page.evaluate(compare, [text, pieces(text, seed)])
                assert equal and blocks > 5, seed


def test_no_output_runs_a_script_or_loads_anything(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        for hostile in HOSTILE:
            with generating(opened, *pieces(hostile, seed=2)):
                body = ask(opened).locator("> .text")
            expect(body.locator("img, script, iframe, style, svg, b")).to_have_count(0)
            for link in body.locator("a").all():
                assert (link.get_attribute("href") or "").startswith(
                    "https://evil.example/"
                )  # followed on a click only
            attributes = "e => [...e.querySelectorAll('*')].flatMap(x => x.getAttributeNames())"
            assert not [name for name in body.evaluate(attributes) if name.startswith("on") or name == "style"]
        assert page.evaluate("window.hacked") is None
        assert not [address for address in opened.asked if "evil" in address]


def test_no_repeated_mark_stops_the_page(browser: Browser, keyed: ServerProcess) -> None:
    """A parser that is quadratic in one of them would take minutes."""
    with page_of(browser, keyed) as opened:
        for mark in ("*", "_a *_b* ", "[", "[a](", "`", "> ", "- ", "|", "~", "\\", "  - ", "**a"):
            with generating(opened, mark * (30_000 // len(mark))):
                answer = ask(opened)
            expect(answer.locator(".foot")).to_contain_text("1 token in 1 step")
            opened.page.click("#clear")


def test_a_response_and_its_code_are_copied(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        with generating(opened, *pieces(DOCUMENT, seed=3)):
            answer = ask(opened)
        answer.get_by_role("button", name="Copy the response").click()
        expect(answer.get_by_role("button", name="Copy the response")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == DOCUMENT
        answer.get_by_role("button", name="Copy the code").click()
        expect(answer.get_by_role("button", name="Copy the code")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == 'def f(a_b):\n    return "*"'


def test_copying_works_without_https(browser: Browser, keyed: ServerProcess) -> None:
    """Over plain HTTP from another machine, browsers have no navigator.clipboard."""
    with page_of(browser, keyed) as opened:
        page = opened.page
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        with generating(opened, "copied *text*"):
            answer = ask(opened)
        answer.get_by_role("button", name="Copy the response").click()
        expect(answer.get_by_role("button", name="Copy the response")).to_have_text("Copied")
        page.focus("#message")
        page.keyboard.press("Control+V")
        expect(page.locator("#message")).to_have_value("copied *text*")


def test_the_last_response_is_regenerated_with_the_present_settings(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        bodies: list[dict[str, Any]] = []
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        with generating(opened, "first"):
            ask(opened, "one")
        with generating(opened, "second"):
            ask(opened, "two")
        expect(page.locator(".regenerate:visible")).to_have_count(1)
        page.fill("#set-temperature", "0.7")
        with generating(opened, "another"):
            page.click(".regenerate:visible")
            page.wait_for_selector(".answer:has-text('another'):not(.writing)")
        expect(page.locator(".answer > .text")).to_have_text(["first", "another"])
        assert [message["content"] for message in bodies[-1]["messages"]] == ["one", "first", "two"]
        assert bodies[-1]["temperature"] == 0.7
        page.fill("#set-temperature", "-1")
        page.click(".regenerate:visible")
        page.wait_for_selector("#banner:not([hidden])")
        expect(page.locator(".answer > .text")).to_have_text(["first", "another"])  # the old one stays
        opened.errors.clear()  # a refusal is logged by the browser


def test_a_response_at_the_token_limit_says_so(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        with generating(opened, "cut", finish_reason="length"):
            answer = ask(opened)
        expect(answer.locator(".note")).to_contain_text("Cut at the token limit")


def test_a_reload_keeps_the_conversation_and_new_chat_removes_it(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        answer = ask(opened)
        page.uncheck("#markdown")
        before = answer.locator("> .text").evaluate("e => [...e.children].map(x => [x.className, x.textContent])")
        foot = answer.locator(".foot").inner_text()
        page.reload()
        page.wait_for_selector(".answer:not(.writing)")
        page.uncheck("#markdown")
        answer = page.locator(".answer")
        assert (
            answer.locator("> .text").evaluate("e => [...e.children].map(x => [x.className, x.textContent])") == before
        )
        expect(answer.locator(".foot")).to_have_text(foot)
        answer.locator(".token").first.hover()
        expect(page.locator("#card")).to_contain_text("step 1")
        bodies: list[dict[str, Any]] = []
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        ask(opened, "and then?")
        assert [message["role"] for message in bodies[0]["messages"]] == ["user", "assistant", "user"]
        page.click("#clear")
        page.reload()
        page.wait_for_selector("#set-rule option[value=match]", state="attached")
        expect(page.locator(".answer")).to_have_count(0)
        expect(page.locator("#welcome")).to_be_visible()


def test_what_is_kept_is_bounded_and_damage_is_ignored(browser: Browser, keyed: ServerProcess) -> None:
    with page_of(browser, keyed) as opened:
        page = opened.page
        page.uncheck("#markdown")
        for name in ("oldest", "middle", "newest"):
            with generating(opened, f"{name} " * (250_000 // len(name))):
                ask(opened, name)
        size = page.evaluate("localStorage.getItem('foretell.conversation').length")
        assert size <= 1_000_000
        page.reload()
        page.wait_for_selector(".answer")
        expect(page.locator(".question")).to_have_text(["newest"])
        for damage in ("{", "[1]", json.dumps([{"question": "x"}])):
            page.evaluate("text => localStorage.setItem('foretell.conversation', text)", damage)
            page.reload()
            page.wait_for_selector("#set-rule option[value=match]", state="attached")
            expect(page.locator("#welcome")).to_be_visible()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_markdown_fits_a_phone_and_has_enough_contrast(browser: Browser, keyed: ServerProcess, dark: bool) -> None:
    row = "| " + " | ".join(f"column{i}" for i in range(12)) + " |"
    wide = f"{DOCUMENT}\n{row}\n|{'---|' * 12}\n{row}\n\n```\n{'x = ' * 60}1\n```\n\n`{'y' * 200}`\n"
    with page_of(browser, keyed, PHONE, dark) as opened:
        with generating(opened, *pieces(wide, seed=4)):
            answer = ask(opened)
        expect(answer.locator("pre")).to_have_count(2)
        opened.screenshot(f"phone-markdown-{'dark' if dark else 'light'}")
        assert opened.overflow == 0, "wide code and tables scroll by themselves"
        assert opened.page.evaluate(FAINT) == [] and opened.page.evaluate(NAMELESS) == []
