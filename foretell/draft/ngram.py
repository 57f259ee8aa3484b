"""Copies what followed the last time the text ended like this."""

from __future__ import annotations

from foretell.types import Budget, Draft, Sequence

from .base import Drafter
from .ngram_index import NGramIndex, chain, copied

NOTHING = Draft()


class NGramDrafter(Drafter):
    """Prompt lookup: the longest match wins, the most recent one among equals."""

    name = "ngram"
    free = True

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self.shortest, self.longest = shortest, longest
        self._kept: dict[int, NGramIndex] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [
            self._guess(seq, budget.depth) if budget.nodes else NOTHING
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def prepare(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._caught_up(seq)

    def _caught_up(self, seq: Sequence) -> NGramIndex:
        known = self._kept.get(seq.id)
        if known is None:
            known = self._kept[seq.id] = NGramIndex(seq.tokens)
        known.catch_up()
        return known

    def _guess(self, seq: Sequence, nodes: int) -> Draft:
        known = self._caught_up(seq)
        length, place = self._match(known)
        if length < self.shortest:
            return NOTHING
        sure = 1 - 1 / (1 + length)
        return chain(copied(seq.tokens, place, nodes), [sure] * nodes, self.name)

    def _match(self, known: NGramIndex) -> tuple[int, int]:
        """How many tokens agree, and the place behind them."""
        best, behind = 0, 0
        if self.longest > 1:
            for agree, place in known.matches(known.tokens, len(known)):
                if agree >= self.longest:
                    return agree, place
                if agree > best:
                    best, behind = agree, place
        if not best and (place := known.latest(known.tokens[-1])):
            return 1, place
        return best, behind

    def forget(self, seq: Sequence) -> None:
        self._kept.pop(seq.id, None)
