"""Drafters whose worth is known beforehand, to hold the controller to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from time import sleep

from foretell.draft.base import Drafter
from foretell.draft.scripted import OracleDrafter
from foretell.types import Budget, Draft, Sequence

from .scenes import ORACLE, USELESS

ORACLE_ERRS = 0.2
USELESS_COSTS = 0.1  # of a plain step, for each token it guesses

Texts = Mapping[tuple[int, ...], Tokens[int]]  # what plain decoding writes after each prompt


class UselessDrafter(OracleDrafter):
    """Knows each text and says another, and takes its time. It does not guess for nothing, so nobody can look first."""

    name = USELESS

    def __init__(self, texts: Texts, vocab: int, seconds: float, rest: Callable[[float], None] = sleep) -> None:
        """`seconds` are those of a guess; texts are guessed side by side, as a model would."""
        super().__init__(texts, vocab, error_rate=1.0)
        self.seconds, self.rest = seconds, rest

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts = super().propose(seqs, budgets)
        longest = max(map(len, drafts), default=0)
        if longest:
            self.rest(longest * self.seconds)
        return drafts


def stand_in(name: str, texts: Texts, vocab: int, step: float) -> Drafter:
    """The one of that name; `step` is what a plain step takes."""
    if name == ORACLE:
        return OracleDrafter(texts, vocab, ORACLE_ERRS)
    assert name == USELESS, f"{name} is no stand-in"
    return UselessDrafter(texts, vocab, USELESS_COSTS * step)
