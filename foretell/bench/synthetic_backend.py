"""Our own engine with guesses that stand at a set rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from foretell.draft.base import Drafter
from foretell.llm import LLM

from .batch_result import Batch
from .batches import EngineBatches
from .drafter_slots import DrafterSlots
from .measure import Variant
from .plan import Plan
from .prompt import BenchPrompt
from .synthetic import Setting
from .synthetic_drafters import SetRateOracle


class SyntheticBatches(EngineBatches):
    """Arms that are settings: each has an oracle of its own."""

    def __init__(self, llm: LLM, seats: DrafterSlots, plan: Plan, settings: Mapping[str, Setting]) -> None:
        super().__init__(llm, seats, plan)
        self._settings = settings
        self._oracles: dict[str, SetRateOracle] = {}
        self._batch = 1

    def prepare(self, items: Sequence[BenchPrompt], temperature: float, batch: int, batches: int) -> list[Batch]:
        self._batch = batch
        self._oracles.clear()
        return super().prepare(items, temperature, batch, batches)

    def _drafter(self, arm: Variant) -> Drafter:
        vocab = self.llm.engine.runner.model.config.vocab
        oracle = SetRateOracle(self._texts, vocab, self._settings[arm.name], self._batch)
        self._oracles[arm.name] = oracle
        return oracle

    def take_drafts(self, arm: Variant) -> Counter[int]:
        if arm.name not in self._oracles:
            return Counter()
        oracle = self._oracles[arm.name]
        drafts, oracle.drafts = oracle.drafts, Counter()
        return drafts
