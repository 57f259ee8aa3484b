"""Async steps: when the controller allows them, what a late poll does, and what drafts must save."""

from __future__ import annotations

from collections import Counter

import pytest

from foretell.control.adaptive import AdaptiveController
from foretell.control.choice import Choice, DrafterOption, StepCostView, allocate, best_choice
from foretell.control.host_gap import HostGap
from foretell.control.latency_model import CostPrior, DraftPrices, StepCosts
from foretell.control.settings import ControllerSettings
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import OracleDrafter, ScriptedDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.engine.engine import Engine
from foretell.types import Budget, Draft, DrafterTraits, ScheduledSequence, Sequence, StepResult, StepTimes
from tests.control.test_adaptive import basic_traits, generate_all, ticking
from tests.fake_async import FakeAsyncExecutor
from tests.tiny import PROMPTS, VOCAB, World, add, generate, model_drafter, run


def test_the_gap_is_a_median_that_ignores_outliers() -> None:
    gap = HostGap()
    assert gap.seconds(1) == 0 and not gap.outweighs_drafts(1), "nothing was measured yet"
    gap.observe(32, 1.0)
    assert gap.seconds(32) == 1.0
    for seconds in (4e-3, 1e-3, 1e-3, 1e-3, 1.0, 1e-3):
        gap.observe(32, seconds)
    assert gap.seconds(32) == 1e-3
    assert gap.seconds(40) == gap.seconds(8) == gap.seconds(32), "the nearest batch size"


def test_drafts_that_save_more_than_the_gap_prevent_async_steps() -> None:
    gap = HostGap()
    gap.observe(1, 4e-4)
    assert gap.outweighs_drafts(1)
    gap.observe_savings(7e-3)
    assert not gap.outweighs_drafts(1)
    for _ in range(12):
        gap.observe_savings(0.0)
    assert gap.outweighs_drafts(1)


def test_the_gap_is_measured_again_however_long_it_seems() -> None:
    """Async steps have no gap: one long gap at the start must not prevent drafts for ever."""
    gap, num_async = HostGap(), 0
    gap.observe(1, 10.0)
    for _ in range(2000):
        if gap.outweighs_drafts(1):
            num_async += 1
        else:
            gap.observe(1, 1e-3)
        gap.observe_savings(5e-3)
    assert gap.seconds(1) == 1e-3 and num_async < 64


def test_a_known_gap_is_rarely_measured_again() -> None:
    """Without drafts every synchronous step is a loss: at most four of the first 256."""
    gap, num_sync = HostGap(), 1
    gap.observe(32, 1.5e-3)
    for _ in range(255):
        if not gap.outweighs_drafts(32):
            gap.observe(32, 1.5e-3)
            num_sync += 1
        gap.observe_savings(0.0)
    assert num_sync <= 4


def test_the_host_time_that_drafts_add_is_learned_from_the_time_between_steps() -> None:
    """A step of 10 ms, 1 ms of host work without a draft, 3 ms with one, and a pause now and then."""
    gap, now = HostGap(), 0.0
    for step in range(400):
        has_draft = step % 2 == 1
        now += 0.013 if has_draft else 0.011
        now += 5.0 if step % 10 == 9 else 0.0
        gap.observe_step(1, has_draft, now, StepTimes(0.0, 0.01))
    assert gap.host_seconds == pytest.approx(2e-3)
    for _ in range(400):
        now += 0.019
        gap.observe_step(1, True, now, StepTimes(0.0, 0.01, host_gap=1e-3))  # async scheduling: it overlaps
        gap.observe_step(1, True, now, None)
    for step in range(400):
        now += 0.019
        gap.observe_step(step % 2 + 1, True, now, StepTimes(0.0, 0.01))  # sequences come and go
    assert gap.host_seconds == pytest.approx(2e-3)


@pytest.mark.parametrize("num_decoding", [1, 8])
def test_a_draft_must_pay_for_the_gap(num_decoding: int) -> None:
    curve = [3e-3] * 64
    weak = [DrafterOption("ngram", [0.15, 0.02])]
    free, costly = (
        StepCostView(num_decoding, num_decoding, curve),
        StepCostView(num_decoding, num_decoding, curve, host_gap=6e-4),
    )
    assert best_choice(free, weak, 0.01).nodes and not best_choice(costly, weak, 0.01).nodes
    assert free.break_even() == pytest.approx(0) and costly.break_even() == pytest.approx(0.2)
    plans = [best_choice(free, weak, 0.01)] * num_decoding
    if num_decoding > 1:
        assert sum(allocate(free, plans, True, 0.01)[0]) and not sum(allocate(costly, plans, True, 0.01)[0])


def test_drafts_made_on_the_device_hide_part_of_the_gap() -> None:
    """Plain steps and free drafts wait for all host work, those of a draft model for less."""
    gap = HostGap()
    gap.observe(1, 4e-4, device_drafts=True)
    assert (gap.seconds(1), gap.hidden_seconds(1)) == (4e-4, 0.0), "until both cases were measured"
    for _ in range(20):
        gap.observe(1, 6e-4)
    assert (gap.seconds(1), gap.hidden_seconds(1)) == pytest.approx((6e-4, 2e-4))
    gap.observe(32, 2e-3)
    assert gap.hidden_seconds(32) == 0.0, "both cases were not measured at this batch size"


@pytest.mark.parametrize("num_decoding", [1, 4])
def test_a_draft_pays_for_the_gap_less_its_hidden_part(num_decoding: int) -> None:
    curve, prices = [3.4e-3] * 64, DraftPrices(1e-4, 1e-4)
    full = StepCostView(num_decoding, num_decoding, curve, host_gap=6e-4)
    part = StepCostView(num_decoding, num_decoding, curve, host_gap=6e-4, hidden_gap=2e-4)
    both = [view.sequence_seconds(2, prices, 2) for view in (full, part)]
    assert both[0] - both[1] == pytest.approx(2e-4 / num_decoding)
    assert full.sequence_seconds(2) == part.sequence_seconds(2), "a free draft waits for all of it"


def test_the_gap_is_hidden_once_whatever_the_number_of_drafters() -> None:
    none, some = (StepCostView(2, 2, [3.4e-3] * 64, host_gap=1.5e-3, hidden_gap=hidden) for hidden in (0.0, 1.4e-3))
    plans = [Choice(name, 2, 1.5, (0.8, 0.6), 0, DraftPrices(1e-4 * i, 1e-5)) for i, name in enumerate("ab", 1)]
    speeds = [allocate(view, plans, True, 0.01)[1] for view in (none, some)]
    assert (2 + 2.8) * (1 / speeds[0] - 1 / speeds[1]) == pytest.approx(1.4e-3)


def test_gaps_before_timed_drafts_are_measured_apart() -> None:
    controller = AdaptiveController({"model": DrafterTraits(needs_prefill=True), "ngram": DrafterTraits(is_free=True)})
    (state, *_) = add(World().engine(None), "0", PROMPTS[0])
    for drafter, seconds in (("", 6e-4), ("ngram", 6e-4), ("model", 4e-4)):
        result = StepResult(ScheduledSequence.of(state.seq, 1, Budget(2 if drafter else 0, drafter)))
        controller.observe([result], StepTimes(0.0, 3.4e-3, 0.0, False, seconds))
    assert (controller.host_gap.seconds(1), controller.host_gap.hidden_seconds(1)) == pytest.approx((6e-4, 2e-4))


class FixedTimes(AdaptiveController):
    """A controller that is given the step times of a large model on a GPU instead of the measured ones."""

    def observe(self, results: list[StepResult], times: StepTimes) -> None:
        rows = sum(result.scheduled.num_new_tokens + len(result.draft) for result in results)
        drafted = any(result.scheduled.budget.nodes for result in results)
        host_gap = None if times.host_gap is None else 4e-4
        propose_seconds = 8e-4 if drafted else 0.0
        super().observe(
            results, StepTimes(propose_seconds, 3.4e-3 * (1 + 0.004 * rows), propose_seconds, False, host_gap)
        )


def async_engine(drafter: MixDrafter | ScriptedDrafter | OracleDrafter) -> tuple[Engine, FakeAsyncExecutor, FixedTimes]:
    engine = World().engine(drafter)
    executor = engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
    traits = {name: basic_traits(each) for name, each in engine.drafter.drafters.items()}
    costs = StepCosts(CostPrior(row=0.002))
    controller = engine.controller = FixedTimes(traits, ControllerSettings(), costs, clock=ticking())
    return engine, executor, controller


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_is_the_same_and_steps_without_drafts_are_async(temperature: float) -> None:
    expected = generate(temperature=temperature, max_tokens=60)
    engine, executor, controller = async_engine(
        MixDrafter([NGramDrafter(1, 3), SuffixDrafter(offset=2), model_drafter(seed=5)])
    )
    assert generate_all(engine, temperature=temperature, max_tokens=60) == expected
    assert controller.host_gap.seconds(5) == pytest.approx(4e-4)
    assert executor.sent or not temperature, "greedy outputs repeat themselves"


def test_useless_drafts_are_soon_given_up_and_useful_ones_made() -> None:
    """Each step is decided once, and with useless drafts nearly all steps are async."""
    shares = {}
    for rate in (0.0, 1.0):
        expected = generate(max_tokens=100, ignore_eos=True)
        known = {tuple(p): t for p, t in zip(PROMPTS, expected, strict=True)}
        engine, executor, controller = async_engine(OracleDrafter(known, VOCAB, 1 - rate))
        for i, prompt in enumerate(PROMPTS):
            add(engine, str(i), prompt, max_tokens=100, ignore_eos=True)
        run(engine)
        shares[rate] = executor.sent / engine.stats.forwards
        counts = Counter(controller.decisions.counts)
        assert sum(counts.values()) <= engine.stats.speculation.steps
    assert shares[1.0] < 0.1 < 0.7 < shares[0.0]


def test_a_probe_that_is_due_in_a_late_poll_runs_in_the_next_step() -> None:
    """A drafter that is never right is probed, though all steps are async."""
    probed: list[int] = []

    def wrong(seq: Sequence, budget: Budget) -> Draft:
        probed.append(len(seq.tokens))
        return Draft.chain([(seq.tokens[-1] + 1) % VOCAB] * budget.nodes)

    engine, executor, controller = async_engine(ScriptedDrafter(wrong))
    for i in range(3):
        add(engine, str(i), PROMPTS[i], max_tokens=200, ignore_eos=True)
        run(engine)
    assert executor.sent > 0.7 * engine.stats.forwards
    late = [n for n in probed if n > 60]
    assert late, "also while steps are async"
    assert any("trial" in reason for _, _, reason in controller.decisions.counts)
