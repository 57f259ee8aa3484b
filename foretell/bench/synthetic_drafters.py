"""Synthetic drafters of known quality, to test the controller and the engine with."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Tokens
from time import sleep

from foretell.draft.base import Drafter
from foretell.draft.scripted import OracleDrafter
from foretell.types import Budget, Draft, Sequence, StepResult

from .never_slower_grid import ORACLE, USELESS
from .synthetic import SyntheticCase

ORACLE_ERROR_RATE = 0.2  # of its draft tokens
USELESS_TOKEN_COST = 0.1  # fraction of a plain step per draft token

Outputs = Mapping[tuple[int, ...], Tokens[int]]  # outputs of plain decoding by prompt


class UselessDrafter(OracleDrafter):
    """A slow drafter that is always wrong. Its drafts are not free, so the controller cannot poll them."""

    name = USELESS

    def __init__(self, outputs: Outputs, vocab: int, seconds: float, wait: Callable[[float], None] = sleep) -> None:
        """`seconds` is the time per draft token; sequences are drafted in a batch, as a model would."""
        super().__init__(outputs, vocab, error_rate=1.0)
        self.seconds, self.wait = seconds, wait

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts = super().propose(seqs, budgets)
        longest = max(map(len, drafts), default=0)
        if longest:
            self.wait(longest * self.seconds)
        return drafts


def synthetic_drafter(name: str, outputs: Outputs, vocab: int, step_seconds: float) -> Drafter:
    """Return the synthetic drafter of that name; `step_seconds` is the time of a plain step."""
    if name == ORACLE:
        return OracleDrafter(outputs, vocab, ORACLE_ERROR_RATE)
    assert name == USELESS, f"{name} is not a synthetic drafter"
    return UselessDrafter(outputs, vocab, USELESS_TOKEN_COST * step_seconds)


GOLDEN_RATIO = (5**0.5 - 1) / 2  # additive recurrence with the lowest discrepancy
SEED = 0  # equal in every round


class SetRateOracle(OracleDrafter):
    """An oracle whose draft tokens are accepted at a given rate, each if those before it are.

    In `sequence` mode the accepted lengths follow a low-discrepancy sequence, which leaves little variance. In `batch`
    mode sequences must be independent of each other, so they are random. `drafts` counts full-length drafts by accepted
    tokens; in `batch` mode only those of steps with all sequences.
    """

    def __init__(self, outputs: Outputs, vocab: int, case: SyntheticCase, batch: int) -> None:
        super().__init__(outputs, vocab)
        self.case, self.batch = case, batch
        self.drafts: Counter[int] = Counter()
        self._random = uniforms()
        self._full_length = low_discrepancy() if case.mode == "sequence" else self._random

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        accepted = [self._num_accepted(budget.depth) for budget in budgets]
        if self.case.mode == "batch":
            fewest = min(count for count, budget in zip(accepted, budgets, strict=True) if budget.depth)
            accepted = [fewest] * len(seqs)
        return [self._draft(*each) for each in zip(seqs, budgets, accepted, strict=True)]

    def observe(self, results: list[StepResult]) -> None:
        full = [each.verify_result for each in results if len(each.draft) == self.case.length]
        if self.case.mode == "sequence" or len(full) == self.batch:
            self.drafts.update(len(result.accepted_path) for result in full if result is not None)

    def _num_accepted(self, nodes: int) -> int:
        """Sample how many of `nodes` draft tokens are accepted."""
        if not nodes:
            return 0
        uniform = next(self._full_length if nodes == self.case.length else self._random)
        count, probability = 0, self.case.rate
        while count < nodes and uniform < probability:
            count, probability = count + 1, probability * self.case.rate
        return count

    def _draft(self, seq: Sequence, budget: Budget, accepted: int) -> Draft:
        tokens = list(self.outputs[seq.request.prompt][seq.num_output_tokens : seq.num_output_tokens + budget.depth])
        if accepted < len(tokens):
            tokens[accepted] = (tokens[accepted] + 1) % self.vocab
        return Draft.chain(tokens, self.name)


def low_discrepancy() -> Iterator[float]:
    """Yield a low-discrepancy sequence in [0, 1): every interval gets its share at any time."""
    value = 0.5
    while True:
        value = (value + GOLDEN_RATIO) % 1
        yield value


def uniforms() -> Iterator[float]:
    """Yield independent uniforms in [0, 1)."""
    rng = random.Random(SEED)
    while True:
        yield rng.random()
