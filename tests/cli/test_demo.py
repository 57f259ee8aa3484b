"""foretell demo: the comparison, its styles and its legend."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from foretell import LLM
from foretell.cli import demo
from foretell.cli.main import main
from foretell.cli.stream_output import COLOURS
from foretell.tokenizer import StreamDecoder
from foretell.types import TARGET
from tests.folder import Shape, write_tiny_folder

STYLED = re.compile(r"\x1b\[([\d;]+)m([^\x1b]*)\x1b\[0m|([^\x1b]+)")
LEGEND = ": accepted draft tokens; no underline: the target\n"
RED = {"31", "91", "41", "101"}


@pytest.fixture(scope="module")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for the demo's prompts."""
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "roomy", shape=Shape(context=2048))


def pretend_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make captured output look like a terminal of 80 columns."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


def styles(text: str) -> list[tuple[str, str]]:
    """Return each character with its style; empty for none."""
    return [(char, style) for style, styled, plain in STYLED.findall(text) for char in styled or plain]


def test_the_demo_compares_three_prompts(capsys: pytest.CaptureFixture[str], roomy_folder: Path) -> None:
    assert main(["demo", "--model", str(roomy_folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out, "no styles where it is not a terminal"
    heading, *rows = (line.split() for line in out[out.index("prompt  ") :].splitlines() if line[:1] not in "─")
    assert heading == ["prompt", "same", "text", "tokens", "tokens/step", "plain", "speculative", "ratio"]
    assert [row[:2] for row in rows[:3]] == [["chat", "yes"], ["code", "yes"], ["edit", "yes"]]
    assert main(["demo", "--model", str(roomy_folder), "--json"]) == 0
    prompts = json.loads(capsys.readouterr().out)["prompts"]
    assert [(each["prompt"], each["same_text"]) for each in prompts] == [("chat", True), ("code", True), ("edit", True)]


def test_each_token_has_the_style_that_the_legend_gives_its_drafter(
    capsys: pytest.CaptureFixture[str], roomy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(roomy_folder, num_speculative_tokens=4, quiet=True)
    pretend_terminal(monkeypatch)
    comparisons = demo.show(llm)
    out = capsys.readouterr().out
    (legend,) = (line for line in out.splitlines(keepends=True) if line.endswith(LEGEND))
    by_drafter = {name: style for style, name, _ in STYLED.findall(legend) if style}
    assert list(by_drafter) == demo.possible_origins(llm) != list(llm.engine.drafter.drafters)
    seen = set()
    for each in comparisons:
        decoder = StreamDecoder(llm.tokenizer)
        expected = [
            (char, "" if origin == TARGET else by_drafter[origin])
            for token, origin in zip(each.speculative.tokens, each.speculative.origins, strict=True)
            for char in decoder.push([token])
        ]
        seen |= {style for _, style in expected}
        assert is_part(expected, styles(out)), each.name
    assert seen == {"", *by_drafter.values()}, "draft tokens of each drafter are accepted"


def is_part(part: list[tuple[str, str]], whole: list[tuple[str, str]]) -> bool:
    """Return whether `part` occurs in `whole`; control characters are shown as symbols and compared by style alone."""
    clean = [(char if char.isprintable() or char in "\n\t" else "", style) for char, style in part]
    for start in range(len(whole) - len(clean) + 1):
        window = whole[start : start + len(clean)]
        if all(
            style == shown and char in ("", seen) for (char, style), (seen, shown) in zip(clean, window, strict=True)
        ):
            return True
    return False


def test_the_demo_fits_eighty_columns_and_can_do_without_colour(
    capsys: pytest.CaptureFixture[str], roomy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(roomy_folder, drafter="auto", quiet=True)
    pretend_terminal(monkeypatch)
    monkeypatch.setattr(demo, "PROMPTS", {"chat": demo.QUESTION, "edit": demo.EDIT})
    monkeypatch.setattr(demo, "MAX_TOKENS", 8)
    monkeypatch.setenv("NO_COLOR", "1")
    demo.show(llm)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = [line for line in out.splitlines() if line.startswith(("chat", "edit", "prompt"))]
    assert len(lines) == 5 and all(len(line) <= 80 for line in lines)


def test_styles_are_readable_without_colours_and_do_not_look_like_errors() -> None:
    codes = [set(colour.strip("\x1b[m").split(";")) for colour in COLOURS]
    assert all("4" in code for code in codes), "underlined"
    assert not any(code & RED for code in codes)
    assert len(set(COLOURS)) == len(COLOURS)
    marks = [frozenset(code & {"1", "3"}) for code in codes]
    assert len(set(marks[:4])) == 4, "bold and italic tell the first four drafters apart"


@pytest.mark.weights
def test_the_default_model_performs_the_edit_and_writes_the_class() -> None:
    llm = LLM(quiet=True)
    edit, code = (demo.compare(llm, name, quiet=True) for name in ("edit", "code"))
    assert edit.same_text and edit.speculative.text == demo.EDITED != demo.LETTER
    assert edit.speculative.accepted_per_step > 4, "most of the letter is drafted"
    assert code.same_text and code.speculative.finish == "stop"
    (definition,) = ast.parse(code.speculative.text.split("```")[1].removeprefix("python\n")).body
    assert isinstance(definition, ast.ClassDef) and definition.name == "Stack"
    methods = {each.name for each in definition.body if isinstance(each, ast.FunctionDef)}
    assert methods >= {"push", "pop", "peek", "is_empty"}
