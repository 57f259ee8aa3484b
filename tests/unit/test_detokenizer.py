"""Where a sequence ends, and which text is emitted when."""

from __future__ import annotations

import itertools

import pytest

from foretell.engine import detokenizer as module
from foretell.engine.detokenizer import AppendResult, Detokenizer
from foretell.sampling_params import SamplingParams
from foretell.types import Request

WORDS = dict(enumerate(["<end>", "a", "b", "ab", "c", "<stop>", "ba", "x"]))


class Decoder:
    """A decoder for which each token is a word."""

    def __init__(self, tokenizer: object, skip_special: bool, context: tuple[int, ...]) -> None:
        self.left = "~" if tokenizer == "holds back" else ""

    def push(self, tokens: list[int]) -> str:
        return "".join(WORDS[token] for token in tokens)

    def flush(self) -> str:
        return self.left


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "StreamDecoder", Decoder)


def make(max_tokens: int = 20, **params: object) -> Detokenizer:
    wanted = SamplingParams(**params)  # type: ignore[arg-type]
    return Detokenizer(Request("r", (1,), wanted, 0, max_tokens, frozenset({0})), object())  # type: ignore[arg-type]


def decoded(detokenizer: Detokenizer, steps: list[list[int]]) -> tuple[str, int, str | None]:
    text, count = "", 0
    for tokens in steps:
        result = detokenizer.append(tokens)
        text += detokenizer.pop_text()
        count += result.num_appended
        if result.finish_reason:
            assert text == detokenizer.text
            return text, count, result.finish_reason
    return text, count, None


def every_split(tokens: list[int]) -> list[list[list[int]]]:
    """Return all ways to split tokens into steps."""
    splits = []
    for marks in itertools.product([False, True], repeat=len(tokens) - 1):
        steps: list[list[int]] = [[tokens[0]]]
        for token, new in zip(tokens[1:], marks, strict=True):
            if new:
                steps.append([token])
            else:
                steps[-1].append(token)
        splits.append(steps)
    return splits


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
def test_a_sequence_ends_at_the_same_token_however_it_is_split_into_steps(
    limit: int, params: dict[str, object], text: str, count: int, finish: str | None
) -> None:
    for steps in every_split(TOKENS):
        assert decoded(make(limit, **params), steps) == (text, count, finish)


def test_text_is_emitted_as_soon_as_no_stop_string_can_start_with_it() -> None:
    detokenizer = make(stop="abx")
    emitted = []
    for token in (4, 1, 2, 4, 1):
        detokenizer.append([token])
        emitted.append(detokenizer.pop_text())
    assert emitted == ["c", "", "", "abc", ""]


def test_a_stop_string_is_found_in_what_the_decoder_held_back() -> None:
    request = Request("r", (1,), SamplingParams(stop="b~"), 0, 2, frozenset({0}))
    detokenizer = Detokenizer(request, "holds back")  # type: ignore[arg-type]
    assert (detokenizer.append([4, 2]), detokenizer.pop_text()) == (AppendResult(2, "stop"), "c")
    detokenizer = Detokenizer(request, "holds back")  # type: ignore[arg-type]
    assert (detokenizer.append([2, 0]), detokenizer.pop_text()) == (AppendResult(2, "stop"), "")


@pytest.mark.parametrize("min_tokens", range(8))
@pytest.mark.parametrize("stop", ["ab", "ca", "b", "aab", "abba"])
def test_a_stop_string_before_min_tokens_is_ignored_however_it_is_split(stop: str, min_tokens: int) -> None:
    alone = decoded(make(20, stop=stop, min_tokens=min_tokens, ignore_eos=True), [[token] for token in TOKENS])
    for steps in every_split(TOKENS):
        assert decoded(make(20, stop=stop, min_tokens=min_tokens, ignore_eos=True), steps) == alone
