"""A drafter whose guesses stand at a set rate: it measures the engine and no model."""

from __future__ import annotations

import random
from collections.abc import Iterator

from foretell.draft.scripted import OracleDrafter
from foretell.types import Budget, Draft, Sequence

from .stand_ins import Texts
from .synthetic import Mode

STRATA = 16


class SetRateOracle(OracleDrafter):
    """Knows each text. Each guess stands with the set rate, as far as those before it do.

    How many do is spread evenly over that law, text by text, so that little is left to luck: in any sixteen drafts of
    a text each sixteenth of the law comes up once, in an order of its own.
    """

    def __init__(self, texts: Texts, vocab: int, rate: float, mode: Mode = "sequence") -> None:
        super().__init__(texts, vocab)
        self.rate, self.mode = rate, mode
        self._draws: dict[int, Iterator[float]] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        standing = [self._stand(seq, budget.nodes) for seq, budget in zip(seqs, budgets, strict=True)]
        if self.mode == "batch":
            fewest = min(count for count, budget in zip(standing, budgets, strict=True) if budget.nodes)
            standing = [fewest] * len(seqs)
        return [self._draft(*each) for each in zip(seqs, budgets, standing, strict=True)]

    def forget(self, seq: Sequence) -> None:
        self._draws.pop(seq.id, None)

    def _stand(self, seq: Sequence, nodes: int) -> int:
        """How many of so many guesses stand."""
        if not nodes:
            return 0
        drawn = next(self._draws.setdefault(seq.id, even_draws(str(seq.request.prompt))))
        count, chance = 0, self.rate
        while count < nodes and drawn < chance:
            count, chance = count + 1, chance * self.rate
        return count

    def _draft(self, seq: Sequence, budget: Budget, standing: int) -> Draft:
        text = list(self.texts[seq.request.prompt][seq.written : seq.written + budget.nodes])
        if standing < len(text):
            text[standing] = (text[standing] + 1) % self.vocab
        return Draft.chain(text, self.name)


def even_draws(seed: str) -> Iterator[float]:
    """Numbers from 0 to 1, sixteen at a time one from each sixteenth."""
    rng = random.Random(seed)
    while True:
        for stratum in rng.sample(range(STRATA), STRATA):
            yield (stratum + rng.random()) / STRATA
