"""The pictures of README and documentation, and the script that makes them."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
import zlib
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TERMINAL = ("demo.svg", "certify.svg", "plan.svg")
BY_HAND = ("how-it-works.svg",)
PLOTS = ("controller-cells.svg", "controller-regret.svg", "controller-trace.svg")  # of bench/controller.py
NAMES = ("chat.png", "race.png", "server.png", "report.png", *TERMINAL, *BY_HAND, *PLOTS)
LARGEST = 200 * 1024  # bytes; pictures are part of every clone


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pictures", DOCS / "make_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_every_picture_is_there_and_small(name: str) -> None:
    picture = (DOCS / "pictures" / name).read_bytes()
    assert len(picture) < LARGEST
    assert picture.startswith(b"<svg" if name.endswith("svg") else b"\x89PNG")


def test_every_picture_has_a_source_and_a_page(script: ModuleType) -> None:
    pictures = {path.name for path in (DOCS / "pictures").iterdir()}
    made = {f"{name}.png" for name in (*script.VIEWS, "report")} | {f"{name}.svg" for name in script.COMMANDS}
    assert pictures == set(NAMES) == made | {*BY_HAND, *PLOTS}
    assert all(name in script.__doc__ for name in BY_HAND)
    plots = (DOCS.parent / "bench" / "controller.py").read_text()
    assert all(name in plots for name in PLOTS)
    pages = "".join(page.read_text() for page in (DOCS.parent / "README.md", *DOCS.rglob("*.md")))
    assert not [name for name in pictures if f"pictures/{name}" not in pages]


def test_the_picture_of_a_plan_is_what_the_command_prints(script: ModuleType, tmp_path: Path) -> None:
    script.draw_terminal(tmp_path / "plan.svg", script.COMMANDS["plan"])
    assert (tmp_path / "plan.svg").read_text() == (DOCS / "pictures" / "plan.svg").read_text()


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("svg")])
def test_drawings_load_nothing(name: str) -> None:
    picture = (DOCS / "pictures" / name).read_text()
    assert set(re.findall(r"https?://[\w.]+", picture)) <= {"http://www.w3.org", "https://www.textualize.io"}
    assert "@font-face" not in picture and "url(http" not in picture


def test_a_command_is_drawn_with_its_output(script: ModuleType, tmp_path: Path) -> None:
    script.draw_terminal(tmp_path / "version.svg", "--version")
    words = re.sub(r"<[^>]+>|&#160;|\s", " ", (tmp_path / "version.svg").read_text())
    assert "foretell --version" in " ".join(words.split())


def test_a_failed_command_is_reported(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"failed:\n(.|\n)*no-such-command"):
        script.draw_terminal(tmp_path / "no.svg", "no-such-command")
    assert not (tmp_path / "no.svg").exists()


def test_a_server_that_stops_is_reported_with_its_log(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "FORETELL", [sys.executable, "-c", "raise SystemExit('out of luck')"])
    with pytest.raises(SystemExit, match=r"stopped with exit code 1:\nout of luck"), script.serving():
        pass


def test_a_page_is_closed_when_its_picture_fails(script: ModuleType) -> None:
    browser = MagicMock()
    with pytest.raises(ZeroDivisionError), script.opened(browser, "about:blank"):
        raise ZeroDivisionError
    browser.new_context.return_value.close.assert_called_once_with()


def test_pixels_and_palette_are_written_as_png(script: ModuleType) -> None:
    picture = {"width": 2, "height": 2, "palette": [[1, 2, 3], [4, 5, 6]], "indices": "AAEBAA=="}  # 0 1 / 1 0
    png = script.indexed_png(picture)
    chunks, at = {}, 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        chunks[kind] = png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + chunks[kind])
        at += 12 + size
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (2, 2) and chunks[b"PLTE"] == bytes(range(1, 7))
    assert zlib.decompress(chunks[b"IDAT"]) == bytes([0, 0, 1, 0, 1, 0])
