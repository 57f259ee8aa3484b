"""A drafter whose guesses stand at a set rate: it measures the engine and no model."""

from __future__ import annotations

import random
from collections.abc import Iterator

from foretell.draft.scripted import OracleDrafter
from foretell.types import Budget, Draft, Sequence

from .stand_ins import Texts
from .synthetic import Mode

STRATA = 16
SEED = 0  # every round draws the same


class SetRateOracle(OracleDrafter):
    """Knows each text. Each guess stands with the set rate, as far as those before it do.

    Where texts are apart, how many stand is spread evenly over that law, so that little is left to luck: of any sixteen
    drafts in a row each has its own sixteenth of the law. In step, texts must be independent of each other, and luck
    stays.
    """

    def __init__(self, texts: Texts, vocab: int, rate: float, mode: Mode = "sequence") -> None:
        super().__init__(texts, vocab)
        self.rate, self.mode = rate, mode
        self._draws = even_draws(SEED) if mode == "sequence" else free_draws(SEED)

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        standing = [self._stand(budget.nodes) for budget in budgets]
        if self.mode == "batch":
            fewest = min(count for count, budget in zip(standing, budgets, strict=True) if budget.nodes)
            standing = [fewest] * len(seqs)
        return [self._draft(*each) for each in zip(seqs, budgets, standing, strict=True)]

    def _stand(self, nodes: int) -> int:
        """How many of so many guesses stand."""
        if not nodes:
            return 0
        drawn, count, chance = next(self._draws), 0, self.rate
        while count < nodes and drawn < chance:
            count, chance = count + 1, chance * self.rate
        return count

    def _draft(self, seq: Sequence, budget: Budget, standing: int) -> Draft:
        text = list(self.texts[seq.request.prompt][seq.written : seq.written + budget.nodes])
        if standing < len(text):
            text[standing] = (text[standing] + 1) % self.vocab
        return Draft.chain(text, self.name)


def even_draws(seed: int) -> Iterator[float]:
    """Numbers from 0 to 1, sixteen at a time one from each sixteenth."""
    rng = random.Random(seed)
    while True:
        for stratum in rng.sample(range(STRATA), STRATA):
            yield (stratum + rng.random()) / STRATA


def free_draws(seed: int) -> Iterator[float]:
    """Numbers from 0 to 1 that know nothing of each other."""
    rng = random.Random(seed)
    while True:
        yield rng.random()
