"""Plans with timed drafters are reused for a few polls, and only while they are valid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.control.acceptance_model import cell
from foretell.control.adaptive import AdaptiveController
from foretell.control.latency_model import StepCostView
from foretell.control.length_optimizer import DrafterOption
from foretell.control.settings import AcceptanceTuning, LengthTuning
from foretell.sampling_params import SamplingParams
from foretell.types import DrafterTraits, Request, Sequence

VIEW = StepCostView(1, 1, [0.03 + 0.001 * rows for rows in range(64)])
REUSE, FAMILIAR = LengthTuning().plan_reuse, int(AcceptanceTuning().familiar)


class PlanCounter:
    """A controller with one timed and one free drafter for one sequence; counts the plans it makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, trials: int, remaining: int = 100) -> None:
        self.controller = AdaptiveController(
            {"timed": DrafterTraits(relative_cost=0.05), "free": DrafterTraits(is_free=True)}
        )
        request = Request("0", (1,), SamplingParams(), 0, remaining + 1, drafters=("timed", "free"))
        self.seq, self.plans, self.view = Sequence(0, request, [1, 2], num_computed_tokens=1), 0, VIEW
        acceptance = self.controller.tracker.request(self.seq)
        for _ in range(trials):
            self.controller.acceptance.rates(acceptance, "timed").count(cell(None, 1), True)
        timed_options = self.controller.optimizer.timed_options

        def counted(view: StepCostView, seq: Sequence) -> list[DrafterOption]:
            self.plans += 1
            return timed_options(view, seq)

        monkeypatch.setattr(self.controller.optimizer, "timed_options", counted)

    def poll(self, free_confidence: float = 0.0) -> int:
        """Return the planned length."""
        self.controller.tracker.set_free_confidence(self.seq, free_confidence)
        return self.controller.plans.best_timed_plan(self.view, self.seq).nodes


def test_a_plan_with_a_familiar_drafter_is_reused_for_a_few_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    familiar = PlanCounter(monkeypatch, 3 * FAMILIAR)
    lengths = {familiar.poll() for _ in range(3 * REUSE)}
    assert familiar.plans == 3 and len(lengths) == 1 and min(lengths) > 0
    new = PlanCounter(monkeypatch, 3)
    for _ in range(REUSE):
        new.poll()
    assert new.plans == REUSE, "each observation of a new drafter counts"


def test_a_plan_is_made_again_when_the_situation_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = PlanCounter(monkeypatch, 3 * FAMILIAR)
    counter.poll()
    counter.poll(free_confidence=0.9)
    assert counter.plans == 2, "free drafts are confident now"
    counter.view = replace(VIEW, num_decoding=2)
    counter.poll(free_confidence=0.9)
    assert counter.plans == 3, "the batch has grown"
    counter.view = replace(counter.view, padded_sizes=(1, 8, 32))
    counter.poll(free_confidence=0.9)
    assert counter.plans == 4, "steps are padded now"
    counter.controller.plans.forget(counter.seq.id)
    counter.poll(free_confidence=0.9)
    assert counter.plans == 5


def test_a_cached_plan_never_exceeds_the_remaining_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = PlanCounter(monkeypatch, 3 * FAMILIAR, remaining=8)
    assert counter.poll() > 2
    counter.seq.tokens += [3] * (counter.seq.remaining_tokens - 3)
    assert counter.poll() == 2 and counter.plans == 2
