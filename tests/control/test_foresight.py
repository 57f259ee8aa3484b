"""Plans with drafters that are asked are kept for a few looks, and no longer than they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.control.acceptance_model import FAMILIAR, cell
from foretell.control.adaptive import AdaptiveController
from foretell.control.drafter_options import LOOKS
from foretell.control.length_optimizer import DrafterOption, StepCostView
from foretell.sampling_params import SamplingParams
from foretell.types import DrafterTraits, Request, Sequence

MARKET = StepCostView(1, 1, [0.03 + 0.001 * rows for rows in range(64)])


class Counting:
    """A controller with one drafter that takes time, for one text; counts how often it thinks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tries: int, room: int = 100) -> None:
        self.controller = AdaptiveController(
            {"asked": DrafterTraits(relative_cost=0.05), "free": DrafterTraits(is_free=True)}
        )
        request = Request("0", (1,), SamplingParams(), 0, room + 1, drafters=("asked", "free"))
        self.seq, self.thoughts, self.market = Sequence(0, request, [1, 2], cached=1), 0, MARKET
        ledger = self.controller.lessons.ledger(self.seq)
        for _ in range(tries):
            self.controller.acceptance.rates(ledger, "asked").count(cell(None, 1), True)
        foretold = self.controller.prospects.foretold

        def counted(market: StepCostView, seq: Sequence) -> list[DrafterOption]:
            self.thoughts += 1
            return foretold(market, seq)

        monkeypatch.setattr(self.controller.prospects, "foretold", counted)

    def look(self, beside: float = 0.0) -> int:
        """Nodes that are planned."""
        self.controller.lessons.look(self.seq, beside)
        return self.controller.foresight.plan(self.market, self.seq).nodes


def test_of_a_drafter_that_is_known_one_thought_does_for_a_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Counting(monkeypatch, 3 * int(FAMILIAR))
    nodes = {known.look() for _ in range(3 * LOOKS)}
    assert known.thoughts == 3 and len(nodes) == 1 and min(nodes) > 0
    new = Counting(monkeypatch, 3)
    for _ in range(LOOKS):
        new.look()
    assert new.thoughts == LOOKS, "of one that is new each lesson counts"


def test_what_changes_is_thought_over(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Counting(monkeypatch, 3 * int(FAMILIAR))
    known.look()
    known.look(beside=0.9)
    assert known.thoughts == 2, "others are sure now"
    known.market = replace(MARKET, writers=2)
    known.look(beside=0.9)
    assert known.thoughts == 3, "another text has come"
    known.market = replace(known.market, sizes=(1, 8, 32))
    known.look(beside=0.9)
    assert known.thoughts == 4, "steps are filled up now"
    known.controller.foresight.forget(known.seq.id)
    known.look(beside=0.9)
    assert known.thoughts == 5


def test_near_a_texts_end_no_plan_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Counting(monkeypatch, 3 * int(FAMILIAR), room=8)
    planned = known.look()
    assert planned > 2
    known.seq.tokens += [3] * (known.seq.remaining_tokens - 3)
    assert known.look() == 2 and known.thoughts == 2
