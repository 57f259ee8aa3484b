"""Steps that begin early: when the controller lets them, what it makes of a late look, what guesses have to bring."""

from __future__ import annotations

from collections import Counter

import pytest

from foretell.control.adaptive import AdaptiveController
from foretell.control.draft_latency import Drafting
from foretell.control.latency_model import CostPrior, HostGap, StepCosts
from foretell.control.length_optimizer import DrafterOption, DraftPlan, StepCostView, best_plan, break_even, share_out
from foretell.control.settings import ControllerSettings, DrafterTraits
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import OracleDrafter, ScriptedDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.engine.engine import Engine
from foretell.types import Budget, Draft, ScheduledSequence, Sequence, StepResult, StepTimes
from tests.control.test_adaptive import ticking, write
from tests.outruns import Outruns
from tests.tiny import PROMPTS, VOCAB, World, add, generate, model_drafter, run


def test_what_is_usual_is_known_after_a_few_and_a_hiccup_does_not_tell() -> None:
    waits = HostGap()
    assert waits.seconds(1) == 0 and not waits.outweigh_guesses(1), "who never waited saves nothing"
    waits.observe(32, 1.0)
    assert waits.seconds(32) == 1.0
    for seconds in (4e-3, 1e-3, 1e-3, 1e-3, 1.0, 1e-3):
        waits.observe(32, seconds)
    assert waits.seconds(32) == 1e-3
    assert waits.seconds(40) == waits.seconds(8) == waits.seconds(32), "the nearest there is"


def test_guesses_that_are_worth_more_than_the_wait_keep_steps_from_beginning_early() -> None:
    waits = HostGap()
    waits.observe(1, 4e-4)
    assert waits.outweigh_guesses(1)
    waits.hope(7e-3)
    assert not waits.outweigh_guesses(1)
    for _ in range(12):
        waits.hope(0.0)
    assert waits.outweigh_guesses(1)


def test_a_wait_is_seen_again_however_long_it_is_believed_to_be() -> None:
    """Steps that begin early see none: one long wait at the beginning must not keep guesses off for ever."""
    waits, early = HostGap(), 0
    waits.observe(1, 10.0)
    for _ in range(2000):
        if waits.outweigh_guesses(1):
            early += 1
        else:
            waits.observe(1, 1e-3)
        waits.hope(5e-3)
    assert waits.seconds(1) == 1e-3 and early < 64


def test_what_is_known_is_seldom_looked_at_again() -> None:
    """Where nobody guesses every wait is for nothing: of the first 256 steps no more than three and the first."""
    waits, waited = HostGap(), 1
    waits.observe(32, 1.5e-3)
    for _ in range(255):
        if not waits.outweigh_guesses(32):
            waits.observe(32, 1.5e-3)
            waited += 1
        waits.hope(0.0)
    assert waited <= 4


@pytest.mark.parametrize("writers", [1, 8])
def test_a_guess_must_pay_for_the_wait(writers: int) -> None:
    curve = [3e-3] * 64
    weak = [DrafterOption("ngram", [0.15, 0.02])]
    free, dear = StepCostView(writers, writers, curve), StepCostView(writers, writers, curve, waiting=6e-4)
    assert best_plan(free, weak, 0.01).nodes and not best_plan(dear, weak, 0.01).nodes
    assert break_even(free) == 0 and break_even(dear) == pytest.approx(0.2)
    plans = [best_plan(free, weak, 0.01)] * writers
    if writers > 1:
        assert sum(share_out(free, plans, 0.0, True, 0.01)) and not sum(share_out(dear, plans, 0.0, True, 0.01))


def test_what_is_sent_while_a_device_guesses_is_not_waited_for() -> None:
    """Plain steps and free guesses wait for all that the host does, a draft model's for less, seldom as it is asked."""
    waits = HostGap()
    waits.observe(1, 4e-4, guessing=True)
    assert (waits.seconds(1), waits.hidden(1)) == (4e-4, 0.0), "as long as no more is known"
    for _ in range(20):
        waits.observe(1, 6e-4)
    assert (waits.seconds(1), waits.hidden(1)) == (6e-4, pytest.approx(2e-4))
    waits.observe(32, 2e-3)
    assert waits.hidden(32) == 0.0, "of so many nobody has seen both"


@pytest.mark.parametrize("writers", [1, 4])
def test_a_draft_pays_for_the_wait_less_what_is_hidden_behind_it(writers: int) -> None:
    traits = {"model": DrafterTraits(reads=True, whole=True)}
    drafting, curve = Drafting(traits), [3.4e-3] * 64
    whole = StepCostView(writers, writers, curve, waiting=6e-4)
    part = StepCostView(writers, writers, curve, waiting=6e-4, hidden=2e-4)
    (track, *_) = add(World().engine(None), "0", PROMPTS[0])
    both = [drafting.for_one(market, track.seq, "model", on_trial=False)(2, 2) for market in (whole, part)]
    assert both[0] - both[1] == pytest.approx(2e-4 / writers)
    plans = [DraftPlan("model", 2, 1.5, (0.8, 0.6))] * writers
    assert drafting.for_all(whole, plans) - drafting.for_all(part, plans) == pytest.approx(2e-4)


def test_what_is_hidden_is_hidden_once_whoever_guesses() -> None:
    drafting = Drafting({name: DrafterTraits(whole=True) for name in ("model", "eagle")})
    none, some = (StepCostView(2, 2, [3.4e-3] * 64, waiting=1.5e-3, hidden=hidden) for hidden in (0.0, 1.4e-3))
    plans = [DraftPlan(arm, 2, 1.5, (0.8, 0.6)) for arm in ("model", "eagle")]
    assert drafting.for_all(none, plans) - drafting.for_all(some, plans) == pytest.approx(1.4e-3)
    assert drafting.for_all(some, []) == 0.0


def test_waits_before_drafts_that_take_time_are_told_from_others() -> None:
    controller = AdaptiveController({"model": DrafterTraits(reads=True), "ngram": DrafterTraits(free=True)})
    (track, *_) = add(World().engine(None), "0", PROMPTS[0])
    for arm, seconds in (("", 6e-4), ("ngram", 6e-4), ("model", 4e-4)):
        outcome = StepResult(ScheduledSequence.of(track.seq, 1, Budget(2 if arm else 0, arm)))
        controller.observe([outcome], StepTimes(0.0, 3.4e-3, 0.0, False, seconds))
    assert (controller.waits.seconds(1), controller.waits.hidden(1)) == (6e-4, pytest.approx(2e-4))


class Priced(AdaptiveController):
    """One to which steps take what they take on a large model's GPU; what the host did meanwhile does not count."""

    def observe(self, outcomes: list[StepResult], times: StepTimes) -> None:
        rows = sum(outcome.scheduled.num_new_tokens + len(outcome.draft) for outcome in outcomes)
        drafted = any(outcome.scheduled.budget.nodes for outcome in outcomes)
        waiting = None if times.host_gap is None else 4e-4
        proposing = 8e-4 if drafted else 0.0
        super().observe(outcomes, StepTimes(proposing, 3.4e-3 * (1 + 0.004 * rows), proposing, False, waiting))


def outrunning(drafter: MixDrafter | ScriptedDrafter | OracleDrafter) -> tuple[Engine, Outruns, Priced]:
    engine = World().engine(drafter)
    executor = engine.runner.executor = Outruns(engine.runner.executor)
    arms = {name: DrafterTraits(arm.free, arm.reads, arm.cost_share) for name, arm in drafter.drafters.items()}
    costs = StepCosts(CostPrior(row=0.002))
    controller = engine.controller = Priced(arms, ControllerSettings(), costs, clock=ticking())
    return engine, executor, controller


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_and_steps_begin_early_where_nothing_is_guessed(temperature: float) -> None:
    truth = generate(temperature=temperature, max_tokens=60)
    engine, executor, controller = outrunning(
        MixDrafter([NGramDrafter(1, 3), SuffixDrafter(offset=2), model_drafter(seed=5)])
    )
    assert write(engine, temperature=temperature, max_tokens=60) == truth
    assert controller.waits.seconds(5) == pytest.approx(4e-4)
    assert executor.sent or not temperature, "greedy, these repeat themselves"


def test_useless_guesses_are_soon_left_alone_and_useful_ones_are_made() -> None:
    """Each step is decided once, and in a text of useless guesses nearly all begin early."""
    shares = {}
    for rate in (0.0, 1.0):
        truth = generate(max_tokens=100, ignore_eos=True)
        known = {tuple(p): t for p, t in zip(PROMPTS, truth, strict=True)}
        engine, executor, controller = outrunning(OracleDrafter(known, VOCAB, 1 - rate))
        for i, prompt in enumerate(PROMPTS):
            add(engine, str(i), prompt, max_tokens=100, ignore_eos=True)
        run(engine)
        shares[rate] = executor.sent / engine.stats.forwards
        noted = Counter(controller.decision_counts)
        assert sum(noted.values()) <= engine.stats.speculation.steps
    assert shares[1.0] < 0.1 < 0.7 < shares[0.0]


def test_a_trial_that_falls_due_in_a_late_look_is_made_in_the_next_step() -> None:
    """A drafter that never guesses right is tried now and then, though all steps begin early."""
    tried: list[int] = []

    def wrong(seq: Sequence, budget: Budget) -> Draft:
        tried.append(len(seq.tokens))
        return Draft.chain([(seq.tokens[-1] + 1) % VOCAB] * budget.nodes)

    engine, executor, controller = outrunning(ScriptedDrafter(wrong))
    for i in range(3):
        add(engine, str(i), PROMPTS[i], max_tokens=200, ignore_eos=True)
        run(engine)
    assert executor.sent > 0.7 * engine.stats.forwards
    late = [n for n in tried if n > 60]
    assert late, "also when steps begin early"
    assert any("trial" in reason for _, _, reason in controller.decision_counts)
