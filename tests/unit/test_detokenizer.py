"""Where a text ends."""

from __future__ import annotations

import itertools

import pytest

from foretell.engine import detokenizer as writer_module
from foretell.engine.detokenizer import AppendResult, Detokenizer
from foretell.sampling_params import SamplingParams
from foretell.types import Request

WORDS = dict(enumerate(["<end>", "a", "b", "ab", "c", "<stop>", "ba", "x"]))


class Decoder:
    """Each token is a word."""

    def __init__(self, tokenizer: object, skip_special: bool, context: tuple[int, ...]) -> None:
        self.left = "~" if tokenizer == "holds back" else ""

    def push(self, tokens: list[int]) -> str:
        return "".join(WORDS[token] for token in tokens)

    def flush(self) -> str:
        return self.left


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "StreamDecoder", Decoder)


def make(max_tokens: int = 20, **params: object) -> Detokenizer:
    wanted = SamplingParams(**params)  # type: ignore[arg-type]
    return Detokenizer(Request("r", (1,), wanted, 0, max_tokens, frozenset({0})), object())  # type: ignore[arg-type]


def written(writer: Detokenizer, cuts: list[list[int]]) -> tuple[str, int, str | None]:
    pieces, count = "", 0
    for cut in cuts:
        step = writer.append(cut)
        pieces += writer.pop_text()
        count += step.num_appended
        if step.finish_reason:
            assert pieces == writer.text
            return pieces, count, step.finish_reason
    return pieces, count, None


def every_cut(tokens: list[int]) -> list[list[list[int]]]:
    """All ways of cutting tokens into steps."""
    ways = []
    for marks in itertools.product([False, True], repeat=len(tokens) - 1):
        cuts: list[list[int]] = [[tokens[0]]]
        for token, new in zip(tokens[1:], marks, strict=True):
            if new:
                cuts.append([token])
            else:
                cuts[-1].append(token)
        ways.append(cuts)
    return ways


TOKENS = [3, 4, 1, 3, 6, 0, 7]  # ab c a ab ba <end> x


@pytest.mark.parametrize(
    ("limit", "params", "text", "count", "finish"),
    [
        (20, {}, "abcaabba", 6, "stop"),
        (20, {"ignore_eos": True}, "abcaabba<end>x", 7, None),
        (20, {"stop": "ca"}, "ab", 3, "stop"),
        (20, {"stop": ["bb", "zz"]}, "abcaa", 5, "stop"),
        (20, {"stop": "cab"}, "abcaabba", 6, "stop"),
        (20, {"stop": ["x", "aabba<end>x"], "ignore_eos": True}, "abc", 7, "stop"),
        (20, {"stop_token_ids": [4]}, "ab", 2, "stop"),
        (3, {}, "abca", 3, "length"),
        (3, {"stop": "aab"}, "abca", 3, "length"),
        (6, {}, "abcaabba", 6, "stop"),
    ],
)
def test_a_text_ends_at_the_same_place_however_it_comes(
    limit: int, params: dict[str, object], text: str, count: int, finish: str | None
) -> None:
    for cuts in every_cut(TOKENS):
        assert written(make(limit, **params), cuts) == (text, count, finish)


def test_text_is_given_out_as_soon_as_no_stop_string_can_begin_with_it() -> None:
    writer = make(stop="abx")
    told = []
    for token in (4, 1, 2, 4, 1):
        writer.append([token])
        told.append(writer.pop_text())
    assert told == ["c", "", "", "abc", ""]


def test_a_stop_string_is_found_in_what_the_decoder_held_back() -> None:
    request = Request("r", (1,), SamplingParams(stop="b~"), 0, 2, frozenset({0}))
    writer = Detokenizer(request, "holds back")  # type: ignore[arg-type]
    assert (writer.append([4, 2]), writer.pop_text()) == (AppendResult(2, "stop"), "c")
    writer = Detokenizer(request, "holds back")  # type: ignore[arg-type]
    assert (writer.append([2, 0]), writer.pop_text()) == (AppendResult(2, "stop"), "")


@pytest.mark.parametrize("least", range(8))
@pytest.mark.parametrize("stop", ["ab", "ca", "b", "aab", "abba"])
def test_a_stop_string_before_min_tokens_counts_the_same_however_it_comes(stop: str, least: int) -> None:
    alone = written(make(20, stop=stop, min_tokens=least, ignore_eos=True), [[token] for token in TOKENS])
    for cuts in every_cut(TOKENS):
        assert written(make(20, stop=stop, min_tokens=least, ignore_eos=True), cuts) == alone
