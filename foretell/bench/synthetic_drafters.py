"""Drafters whose worth is known beforehand, to hold the controller to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Tokens
from time import sleep

from foretell.bench.never_slower_grid import ORACLE, USELESS
from foretell.bench.synthetic import Setting
from foretell.draft.base import Drafter
from foretell.draft.scripted import OracleDrafter
from foretell.types import Budget, Draft, Sequence, StepResult

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


GOLDEN = (5**0.5 - 1) / 2  # of all steps along a circle the one that leaves the smallest gaps
SEED = 0  # every round draws the same


class SetRateOracle(OracleDrafter):
    """Knows each text. Each guess stands with the set rate, as far as those before it do.

    Where texts are apart, how many stand is spread evenly over that law, draft by draft, so that little is left to
    luck. In step, texts must be independent of each other, and luck stays. `drafts` counts whole drafts by how far they
    stood; in step those made while all texts were there.
    """

    def __init__(self, texts: Texts, vocab: int, setting: Setting, batch: int) -> None:
        super().__init__(texts, vocab)
        self.setting, self.batch = setting, batch
        self.drafts: Counter[int] = Counter()
        self._free = free_draws()
        self._whole = even_draws() if setting.mode == "sequence" else self._free

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        standing = [self._stand(budget.depth) for budget in budgets]
        if self.setting.mode == "batch":
            fewest = min(count for count, budget in zip(standing, budgets, strict=True) if budget.depth)
            standing = [fewest] * len(seqs)
        return [self._draft(*each) for each in zip(seqs, budgets, standing, strict=True)]

    def observe(self, outcomes: list[StepResult]) -> None:
        whole = [each.verify_result for each in outcomes if len(each.draft) == self.setting.length]
        if self.setting.mode == "sequence" or len(whole) == self.batch:
            self.drafts.update(len(verdict.accepted_path) for verdict in whole if verdict is not None)

    def _stand(self, nodes: int) -> int:
        """How many of so many guesses stand."""
        if not nodes:
            return 0
        drawn = next(self._whole if nodes == self.setting.length else self._free)
        count, chance = 0, self.setting.rate
        while count < nodes and drawn < chance:
            count, chance = count + 1, chance * self.setting.rate
        return count

    def _draft(self, seq: Sequence, budget: Budget, standing: int) -> Draft:
        text = list(self.outputs[seq.request.prompt][seq.num_output_tokens : seq.num_output_tokens + budget.depth])
        if standing < len(text):
            text[standing] = (text[standing] + 1) % self.vocab
        return Draft.chain(text, self.name)


def even_draws() -> Iterator[float]:
    """Numbers from 0 to 1, as many in any part of it as is its length, whenever they are counted."""
    value = 0.5
    while True:
        value = (value + GOLDEN) % 1
        yield value


def free_draws() -> Iterator[float]:
    """Numbers from 0 to 1 that know nothing of each other."""
    rng = random.Random(SEED)
    while True:
        yield rng.random()
