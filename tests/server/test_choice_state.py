"""The cost of a chunk depends on its new tokens, not on the length of the output."""

from __future__ import annotations

from typing import Any

from foretell.sampling_params import SamplingParams
from foretell.server.choice_state import ChoiceState
from foretell.types import Request

CLOSES = [7, 8]


class Counting(list[int]):
    """A list that counts how often it is sliced."""

    cuts = 0

    def __getitem__(self, place: Any) -> Any:
        self.cuts += 1
        return super().__getitem__(place)


def answer(tokens: list[int]) -> ChoiceState:
    return ChoiceState(Request("a", (1,), SamplingParams(), 0, 10), 0, tokens=tokens)


def test_thoughts_are_counted_up_to_their_end() -> None:
    assert answer([1, 2, 7, 8, 3, 7, 8]).reasoning_tokens(CLOSES) == 4
    assert answer([1, 2, 7, 3, 8]).reasoning_tokens(CLOSES) == 5
    growing = answer([])
    counts = []
    for token in (1, 7, 8, 9, 9):
        growing.tokens.append(token)
        counts.append(growing.reasoning_tokens(CLOSES))
    assert counts == [1, 2, 3, 3, 3]


def test_however_often_one_asks_each_token_is_looked_at_once() -> None:
    tokens = Counting()
    growing = answer(tokens)
    for _ in range(200):
        tokens.append(1)
        growing.reasoning_tokens(CLOSES)
    assert tokens.cuts <= 200
