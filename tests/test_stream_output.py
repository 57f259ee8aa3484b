"""Coloured output: the same text, each token in its drafter's colour, with control characters replaced."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from foretell.cli.stream_output import COLOURS, RESET, Palette, StreamRenderer, wants_colour
from foretell.tokenizer import Tokenizer
from foretell.types import TARGET, Delta

CODES = re.compile(r"\x1b\[[\d;]+m")
TEXT = "naïve 你好, and so on: the quick brown fox"


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.from_files({"tokenizer.json": (tiny_folder / "tokenizer.json").read_text()})


def deltas(tokenizer: Tokenizer, text: str, sizes: list[int]) -> list[Delta]:
    """Split a text into steps of given sizes; all tokens of a step but the last come from one of two drafters."""
    tokens, found, shown = tokenizer.encode(text, add_special=False), [], ""
    for step, size in enumerate(sizes * len(tokens)):
        if not tokens:
            break
        now, tokens = tokens[:size], tokens[size:]
        origins = (*(("ngram", "suffix")[step % 2],) * (len(now) - 1), TARGET)
        read = tokenizer.encode(text, add_special=False)
        decoded = tokenizer.decode(read[: len(read) - len(tokens)]).rstrip("\ufffd")
        found.append(Delta("0", 0, tuple(now), decoded[len(shown) :], origins))
        shown = decoded
    return found


@pytest.mark.parametrize("sizes", [[1], [3], [4, 1, 2], [50]])
def test_the_text_is_unchanged_and_every_draft_token_has_its_colour(tokenizer: Tokenizer, sizes: list[int]) -> None:
    renderer = StreamRenderer(tokenizer, Palette(["ngram", "suffix"]))
    steps = deltas(tokenizer, TEXT, sizes)
    painted = "".join(renderer.render(delta) for delta in steps)
    assert CODES.sub("", painted) == TEXT
    used = [colour for colour in COLOURS if colour in painted]
    origins = {origin for delta in steps for origin in delta.origins} - {TARGET}
    assert used == [COLOURS[i] for i, name in enumerate(("ngram", "suffix")) if name in origins]
    assert painted.count(RESET) == sum(painted.count(colour) for colour in used)


def test_delayed_text_keeps_its_colours(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("the quick brown fox", add_special=False)
    renderer = StreamRenderer(tokenizer, Palette(["ngram"]))
    half = len(tokens) // 2
    first = renderer.render(Delta("0", 0, tuple(tokens[:half]), "th", ("ngram",) * half))
    rest = renderer.render(Delta("0", 0, tuple(tokens[half:]), "e quick brown fox", (TARGET,) * (len(tokens) - half)))
    assert CODES.sub("", first + rest) == "the quick brown fox"
    assert first.startswith(COLOURS[0]) and rest.startswith(COLOURS[0]) and not rest.endswith(RESET)


def test_without_a_palette_there_are_no_colours(tokenizer: Tokenizer) -> None:
    renderer = StreamRenderer(tokenizer, None)
    assert "".join(renderer.render(delta) for delta in deltas(tokenizer, TEXT, [3])) == TEXT
    assert renderer.legend() == ""


@pytest.mark.parametrize("palette", [None, Palette(["ngram"])])
def test_control_characters_are_replaced_on_a_terminal(tokenizer: Tokenizer, palette: Palette | None) -> None:
    hostile = "a\x1b[2Jb\x07c\rd\x9be\n\tf"
    tokens = tuple(tokenizer.encode(hostile, add_special=False))
    shown = StreamRenderer(tokenizer, palette, terminal=True).render(
        Delta("0", 0, tokens, hostile, (TARGET,) * len(tokens))
    )
    assert shown == "a␛[2Jb␇c␍d\ufffde\n\tf"
    assert StreamRenderer(tokenizer, None).render(Delta("0", 0, tokens, hostile, (TARGET,) * len(tokens))) == hostile


def test_the_legend_names_drafters_with_accepted_tokens(tokenizer: Tokenizer) -> None:
    renderer = StreamRenderer(tokenizer, Palette(["prediction", "ngram", "suffix"]))
    for delta in deltas(tokenizer, TEXT, [3])[:1]:
        renderer.render(delta)
    assert CODES.sub("", renderer.legend()) == "ngram: accepted draft tokens; no underline: the target"
    assert COLOURS[1] in renderer.legend(), "its colour among all drafters"


def test_colours_only_on_terminals_that_support_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_colour(Terminal()) and not wants_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())
