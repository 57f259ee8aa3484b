"""Our own engine with guesses that stand at a set rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from foretell.draft.base import Drafter
from foretell.llm import LLM

from .batches import EngineBatches
from .measure import Arm
from .plan import Plan
from .seats import Seats
from .set_rates import SetRateOracle
from .synthetic import Setting


class SyntheticBatches(EngineBatches):
    """Arms that are settings: each has an oracle of its own."""

    def __init__(self, llm: LLM, seats: Seats, plan: Plan, settings: Mapping[str, Setting]) -> None:
        super().__init__(llm, seats, plan)
        self._settings = settings

    def _drafter(self, arm: Arm) -> Drafter:
        setting = self._settings[arm.name]
        vocab = self.llm.engine.runner.model.config.vocab
        return SetRateOracle(self._texts, vocab, setting.rate, setting.mode)

    def take_drafts(self, arm: Arm) -> Counter[tuple[int, int]]:
        return self._seats[arm.name].drafter.take_drafts()
