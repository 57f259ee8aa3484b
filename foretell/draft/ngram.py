"""Copies what followed the last time the text ended like this."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from foretell.types import Budget, Draft, Sequence

from .base import Drafter


@dataclass
class _Index:
    """For each run of tokens the place after its latest occurrence; a run that ends the text is not in it yet."""

    read: int = 0  # tokens of the sequence, which only ever grows
    places: dict[tuple[int, ...], int] = field(default_factory=dict)


class NGramDrafter(Drafter):
    """Prompt lookup: the longest match wins, the most recent one among equals."""

    name = "ngram"
    free = True

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        self._indexes: dict[int, _Index] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [
            self._guess(seq, budget.nodes) if budget.nodes else Draft()
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def _guess(self, seq: Sequence, nodes: int) -> Draft:
        index = self._catch_up(seq)
        for length in self.lengths:
            place = index.places.get(tuple(seq.tokens[-length:]))
            if place is not None and length < len(seq.tokens):
                copied = Draft.chain(_copy(seq.tokens, place, nodes), self.name)
                return replace(copied, confidence=(length / (self.lengths[0] + 1),) * nodes)
        return Draft()

    def _catch_up(self, seq: Sequence) -> _Index:
        """Bring the index up to the sequence."""
        index = self._indexes.setdefault(seq.id, _Index())
        for end in range(index.read, len(seq.tokens) - 1):
            for length in self.lengths:
                if length <= end + 1:
                    index.places[tuple(seq.tokens[end + 1 - length : end + 1])] = end + 1
        index.read = len(seq.tokens) - 1
        return index

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq.id, None)


def _copy(tokens: list[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on; where the text ends, the copy goes on with itself, as a repetition would."""
    found = tokens[place : place + count]
    period = len(tokens) - place
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
