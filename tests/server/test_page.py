"""The served page: complete, without external resources, and public."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import foretell.server
from foretell.control import decision_log as decisions
from foretell.server.choice_state import FIRST, LAST, NO_DRAFT, OFF, USER
from tests.server.process import ServerProcess

FOLDER = Path(foretell.server.__file__).parent / "page"
SCRIPTS = sorted(FOLDER.glob("*.js"))
# Ways to have text read as HTML or run as a script.
READERS = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|createContextualFragment|DOMParser|eval\(|Function\("
)


def test_the_page_is_at_the_root_and_needs_no_key(strict_server: ServerProcess) -> None:
    reply = strict_server.http.get("/")
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    for rule in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"):
        assert rule in policy.split("; ")
    assert "unsafe" not in policy and reply.headers["x-content-type-options"] == "nosniff"


def test_all_it_asks_for_is_there(strict_server: ServerProcess) -> None:
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', (FOLDER / "index.html").read_text()))
    named |= {f"page/{name}" for script in SCRIPTS for name in re.findall(r'from "\./([^"]+)"', script.read_text())}
    assert {f"page/{path.name}" for path in FOLDER.iterdir()} == named | {"page/index.html"}, "and nothing is left over"
    for path in named:
        reply = strict_server.http.get(f"/{path}")
        assert reply.status_code == 200 and reply.headers["content-security-policy"]
        again = strict_server.http.get(f"/{path}", headers={"If-None-Match": reply.headers["etag"]})
        assert again.status_code == 304 and not again.content


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/..%2f..%2fservice.py", "/page/../service.py"])
def test_nothing_else_is_given_out(strict_server: ServerProcess, path: str) -> None:
    reply = strict_server.http.get(path)
    assert reply.status_code in (401, 404) and "error" in reply.json()


def test_it_runs_no_script_and_asks_for_no_file_but_its_own() -> None:
    html = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script[^>]*>", html) == ['<script type="module" src="page/main.js">']
    assert not re.search(r"<style|\sstyle=|\son\w+=", html)
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), f"{path.name} names a place outside"
        assert "@import" not in text and "url(" not in text
        assert len(text.splitlines()) < 300


def test_every_skip_reason_has_a_description() -> None:
    """Every reason of the controller and of a response has a description."""
    words = (FOLDER / "format.js").read_text()
    known = set(re.findall(r"^  (\w+): \"", words[words.index("REASONS = {") : words.index("};")], re.M))
    decided = {value for name, value in vars(decisions).items() if name.isupper() and isinstance(value, str)}
    assert known == decided - {decisions.DRAFTED, decisions.SKIPPED} | {USER, OFF, NO_DRAFT, FIRST, LAST}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_string_is_parsed_as_html(script: Path) -> None:
    assert not READERS.search(script.read_text())
