"""The adaptive controller in a real engine: it decides draft lengths and never changes the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from foretell.control.acceptance_model import FIRST_TOKEN
from foretell.control.adaptive import AdaptiveController
from foretell.control.controller import Controller, FreeDrafts
from foretell.control.latency_model import INITIAL_STEPS, StepCosts
from foretell.control.settings import ControllerSettings
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import OracleDrafter, ScriptedDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.engine.engine import Engine
from foretell.sampling_params import SamplingParams
from foretell.types import (
    Budget,
    Draft,
    DrafterTraits,
    Request,
    ScheduledSequence,
    Sequence,
    SpeculationChoice,
    StepResult,
    StepTimes,
    VerifyResult,
)
from tests.tiny import PROMPTS, VOCAB, World, add, generate, model_drafter, run


def ticking() -> Callable[[], float]:
    """Return a clock on which every poll takes 0.1 ms, so that no result depends on this machine."""
    return partial(next, count(0.0, 1e-4))


def basic_traits(drafter: Drafter) -> DrafterTraits:
    """Return the traits of a drafter without its acceptance prior, its trees and its single graph."""
    own = drafter.traits
    return DrafterTraits(is_free=own.is_free, needs_prefill=own.needs_prefill, relative_cost=own.relative_cost)


def adaptive_engine(
    drafter: Drafter, settings: ControllerSettings = ControllerSettings(), world: World = World()
) -> Engine:
    engine = world.engine(drafter)
    traits = {name: basic_traits(each) for name, each in engine.drafter.drafters.items()}
    engine.controller = AdaptiveController(traits, settings, clock=ticking())
    return engine


def generate_all(engine: Engine, **params: object) -> list[list[int]]:
    states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt, **params)]  # type: ignore[arg-type]
    run(engine)
    assert engine.runner.pool.num_held == 0
    return [state.seq.tokens[len(state.seq.request.prompt) :] for state in states]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings",
    [ControllerSettings(), ControllerSettings(throughput=True), ControllerSettings(fixed_length=lambda batch: 3)],
)
@pytest.mark.parametrize("world", [World(), World(pages=24, max_num_seqs=3)], ids=["many pages", "few pages"])
def test_the_output_does_not_depend_on_its_decisions(
    temperature: float, settings: ControllerSettings, world: World
) -> None:
    expected = generate(world=world, temperature=temperature)
    drafter = MixDrafter([NGramDrafter(1, 3), SuffixDrafter(offset=2), model_drafter(seed=5)])
    assert generate_all(adaptive_engine(drafter, settings, world), temperature=temperature) == expected


def test_finished_requests_leave_no_state() -> None:
    engine = adaptive_engine(MixDrafter([NGramDrafter(1, 3), model_drafter(seed=5)]))
    generate_all(engine)
    controller = engine.controller
    assert isinstance(controller, AdaptiveController)
    assert not controller.states


@pytest.mark.parametrize("adapts", [False, True])
def test_no_draft_delays_a_first_token(adapts: bool) -> None:
    """Not even if the last chunk of a prompt is a single token."""
    world, num_output = World(max_step_tokens=16), list[int]()

    def script(seq: Sequence, budget: Budget) -> Draft:
        num_output.append(seq.num_output_tokens)
        return Draft((1,), (-1,))

    engine = world.engine(ScriptedDrafter(script))
    if adapts:
        engine.controller = AdaptiveController(
            {"scripted": DrafterTraits()}, ControllerSettings(fixed_length=lambda batch: 2)
        )
    add(engine, "0", [3] * 17, max_tokens=6)
    add(engine, "1", [5], max_tokens=6)
    run(engine)
    assert num_output and min(num_output) == 1


class Clock:
    """Runs a controller through steps of given cost and acceptance."""

    def __init__(
        self,
        traits: dict[str, DrafterTraits],
        settings: ControllerSettings = ControllerSettings(),
        costs: StepCosts | None = None,
    ) -> None:
        self.controller = AdaptiveController(traits, settings, costs, clock=ticking())
        self.ids = 0

    def sequence(self, remaining: int = 100, **choice: object) -> Sequence:
        self.ids += 1
        request = Request(
            str(self.ids),
            (1,),
            SamplingParams(),
            0,
            remaining + 1,
            drafters=tuple(self.controller.traits),
            speculation=SpeculationChoice(**choice),  # type: ignore[arg-type]
        )
        return Sequence(self.ids, request, [1, 2], num_computed_tokens=1)

    def step(self, seqs: list[Sequence], free_drafts: dict[str, Draft], row: float, accepted: int) -> list[Budget]:
        polled, _ = self.controller.wants_free_drafts(seqs)
        budgets = self.controller.choose_draft_lengths(seqs, {seq.id: free_drafts for seq in polled})
        results = [self._result(seq, budget, free_drafts, accepted) for seq, budget in zip(seqs, budgets, strict=True)]
        rows = sum(1 + len(result.draft) for result in results)
        self.controller.observe(results, StepTimes(1e-5, 0.03 + row * rows))
        return budgets

    def _result(self, seq: Sequence, budget: Budget, free_drafts: dict[str, Draft], accepted: int) -> StepResult:
        made = free_drafts.get(budget.drafter) or Draft.chain([5] * 8, budget.drafter)
        draft = made.truncate(budget.nodes) if budget.nodes else Draft()
        scheduled = ScheduledSequence.of(seq, 1, budget)
        path = tuple(range(min(accepted, len(draft))))
        new_tokens = (*draft.tokens[: len(path)], 7)
        if accepted and not path and free_drafts:
            new_tokens = next(iter(free_drafts.values())).tokens[:1]
        seq.tokens += new_tokens
        seq.num_computed_tokens = len(seq.tokens) - 1
        return StepResult(scheduled, draft, VerifyResult(path, new_tokens[-1]), new_tokens=new_tokens)


FREE = {"free": DrafterTraits(is_free=True)}
HEAD = {"head": DrafterTraits(relative_cost=0.05)}
DRAFTS = {"free": Draft.chain([5, 5, 5, 5], "free")}


def test_accepted_drafts_are_used_and_rejected_ones_dropped() -> None:
    good, bad = Clock(FREE), Clock(FREE)
    seqs = [good.sequence(10_000)], [bad.sequence(10_000)]
    for _ in range(200):
        used = good.step(seqs[0], DRAFTS, 0.004, accepted=4)
        dropped = bad.step(seqs[1], DRAFTS, 0.004, accepted=0)
    assert used[0].nodes == 4
    assert dropped[0].nodes == 0
    assert not bad.controller.decisions.on
    assert "acceptance" in bad.controller.decisions.reason
    assert "break-even" in bad.controller.decisions.reason


def test_the_first_steps_are_plain_because_their_cost_is_unknown() -> None:
    clock = Clock(FREE)
    seq = clock.sequence()
    nodes = [clock.step([seq], DRAFTS, 0.0, accepted=4)[0].nodes for _ in range(INITIAL_STEPS + 1)]
    assert not any(nodes[:-1]) and nodes[-1]


@pytest.mark.parametrize(("known", "is_tried"), [((), True), ((0.3, 0.3), False), ((0.9, 0.9), True)])
def test_a_timed_drafter_that_was_never_measured_is_tried(known: tuple[float, ...], is_tried: bool) -> None:
    """It drafts for a third of a step a token, for which an acceptance rate of 0.3 is too low."""
    rate = known[0] if known else 0.3
    clock = Clock({"head": DrafterTraits(relative_cost=0.3, prior_acceptance=rate, acceptance_by_depth=known)})
    seq = clock.sequence(10_000)
    nodes = [clock.step([seq], {}, 0.001, accepted=0)[0].nodes for _ in range(INITIAL_STEPS + 1)]
    assert bool(nodes[-1]) == is_tried


@pytest.mark.parametrize(
    ("remaining", "max_draft", "most"), [(3, None, 2), (1, None, 0), (50, 1, 1), (50, 0, 0), (50, None, 4)]
)
def test_drafts_respect_remaining_tokens_and_max_draft(remaining: int, max_draft: int | None, most: int) -> None:
    clock = Clock(FREE)
    for _ in range(30):
        clock.step([clock.sequence(10_000)], DRAFTS, 0.001, accepted=4)
    seqs = [clock.sequence(remaining, max_draft=max_draft) for _ in range(2)]
    assert max(clock.step([seq], DRAFTS, 0.001, accepted=4)[0].nodes for seq in seqs) == most


def test_a_large_batch_drafts_less_than_a_single_sequence() -> None:
    clock = Clock(FREE)
    one = [clock.sequence(10_000)]
    many = [clock.sequence(10_000) for _ in range(24)]
    alone = [clock.step(one, DRAFTS, 0.01, accepted=i % 2)[0].nodes for i in range(60)]
    large = [budget.nodes for i in range(30) for budget in clock.step(many, DRAFTS, 0.01, accepted=i % 2)]
    assert sum(alone) / len(alone) > 0.5
    assert sum(large) / len(large) < 0.1


def test_a_request_with_speculation_disabled_gets_no_drafts() -> None:
    outputs = generate()
    drafter = OracleDrafter({tuple(p): t for p, t in zip(PROMPTS, outputs, strict=True)}, VOCAB, 0.0)
    engine = adaptive_engine(drafter, ControllerSettings(fixed_length=lambda batch: 4))
    for i, prompt in enumerate(PROMPTS):
        add(engine, str(i), prompt, SpeculationChoice(enabled=False))
    run(engine)
    assert engine.stats.speculation.drafted == 0


def test_drafts_shorter_than_the_minimum_are_dropped() -> None:
    controller = AdaptiveController(FREE, ControllerSettings(min_draft_tokens=3))
    seq = Clock(FREE).sequence()
    scheduled = ScheduledSequence.of(seq, 1, Budget(4, "free"))
    long, short = Draft.chain([1, 2, 3], "free"), Draft.chain([1, 2], "free")
    assert controller.trim([scheduled, scheduled], [long, short]) == [long, Draft()]


def test_the_minimum_probability_reaches_the_drafter() -> None:
    """The scheduler changes nothing of a budget but its nodes."""
    thresholds: list[float] = []

    class RecordingDrafter(OracleDrafter):
        def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
            thresholds.extend(budget.min_probability for budget in budgets if budget.nodes)
            return super().propose(seqs, budgets)

    engine = World().engine(RecordingDrafter({}, VOCAB, 0.0))
    engine.controller = ThresholdController()
    add(engine, "0", PROMPTS[0])
    run(engine)
    assert thresholds
    assert set(thresholds) == {0.25}


class ThresholdController(Controller):
    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        return [Budget(2 if seq.pending == 1 and seq.remaining_tokens > 2 else 0, "oracle", 0.25) for seq in seqs]


def test_a_timed_drafter_without_drafts_is_given_up() -> None:
    clock = Clock({"timed": DrafterTraits()})
    seq = clock.sequence(10_000)
    lengths = [clock.step([seq], {"timed": Draft()}, 0.001, accepted=0)[0].nodes for _ in range(300)]
    assert sum(map(bool, lengths[:50])) > 0
    assert sum(map(bool, lengths[150:])) < 10


def test_drafts_without_a_source_are_counted() -> None:
    class Nameless(ScriptedDrafter):
        name = "nameless"

    def wrong(seq: Sequence, budget: Budget) -> Draft:
        return Draft.chain([31] * budget.nodes)

    engine = adaptive_engine(Nameless(wrong))
    states = add(engine, "0", PROMPTS[0], max_tokens=200, ignore_eos=True)
    run(engine)
    assert states[0].speculation.by_drafter["nameless"].drafted > 0
    assert isinstance(engine.controller, AdaptiveController)
    assert engine.controller.acceptance.rates("nameless", 0.0).rate(FIRST_TOKEN) < 0.45, "its failures were counted"


def test_step_costs_are_learned_from_a_large_batch() -> None:
    clock = Clock(FREE)
    many = [clock.sequence(10_000) for _ in range(100)]
    for _ in range(3):
        clock.step(many, DRAFTS, 1e-5, accepted=4)
    assert clock.controller.costs.is_known


def test_an_outlier_step_does_not_update_the_costs() -> None:
    controller = AdaptiveController({"timed": DrafterTraits(needs_prefill=True)}, clock=ticking())
    seq = Clock({"timed": DrafterTraits()}).sequence()
    controller.wants_free_drafts([seq])

    def observe(times: StepTimes, nodes: int = 0) -> None:
        budget = Budget(nodes, "timed") if nodes else Budget()
        controller.observe([StepResult(ScheduledSequence.of(seq, 1, budget), Draft.chain([5] * nodes, "timed"))], times)

    observe(StepTimes(0.0, 9.0, 0.0, is_outlier=True))
    assert not controller.costs.is_known
    for _ in range(4):
        observe(StepTimes(0.0, 0.01, 0.0))
    before = (controller.costs.dump(), controller.costs.steps, controller.draft_costs["timed"].dump())
    observe(StepTimes(9.0, 9.0, 9.0, is_outlier=True), nodes=3)
    assert (controller.costs.dump(), controller.costs.steps, controller.draft_costs["timed"].dump()) == before
    assert controller.options.prefill_tokens(controller.states[seq.id], "timed") == 0, "it has prefilled the sequence"
    observe(StepTimes(0.002, 0.01, 0.002), nodes=3)
    assert controller.draft_costs["timed"].dump() and controller.costs.steps == before[1] + 1


def test_a_long_prompt_is_not_prefilled_for_a_new_drafter() -> None:
    clock = Clock({"timed": DrafterTraits(needs_prefill=True)})
    short, long = clock.sequence(500), clock.sequence(500)
    for _ in range(INITIAL_STEPS):
        clock.step([short], {}, 0.001, accepted=0)
    long.tokens, long.num_computed_tokens = [1] * 20_000, 19_999
    long.request = replace(long.request, prompt=(1,) * 19_000, max_tokens=1500)
    lengths = [
        clock.controller.wants_free_drafts([seq]) and clock.controller.choose_draft_lengths([seq], {})[0].nodes
        for seq in (long, short)
    ]
    assert lengths[0] == 0
    assert 0 < lengths[1] <= clock.controller.tuning.new_drafter_tokens


def test_few_polls_while_speculation_is_off() -> None:
    """The untimed counterpart of the bound on the cost of polling."""
    clock = Clock(FREE)
    seq = clock.sequence(100_000)
    for _ in range(600):
        clock.step([seq], DRAFTS, 0.02, accepted=0)
    polls = 0
    for _ in range(160):
        polls += bool(clock.controller.wants_free_drafts([seq])[0])
        clock.controller.choose_draft_lengths([seq], {})
    assert polls <= 20


def test_fixed_lengths_are_used_in_every_step() -> None:
    clock = Clock(FREE, ControllerSettings(fixed_length=lambda batch: 2))
    seq = clock.sequence(100_000)
    lengths = [clock.step([seq], DRAFTS, 0.02, accepted=0)[0].nodes for _ in range(100)]
    assert set(lengths) == {2}


def test_decisions_are_counted_by_drafter_and_reason() -> None:
    clock = Clock({"free": DrafterTraits(is_free=True), "silent": DrafterTraits(is_free=True)})
    seq = clock.sequence(10_000)
    for _ in range(400):
        clock.step([seq], DRAFTS, 0.02, accepted=0)
    found = clock.controller.decisions.counts
    assert {key for key in found if key[0] == "silent"} == {
        ("silent", "skipped", "no_costs"),
        ("silent", "skipped", "no_guess"),
        ("silent", "skipped", "not_asked"),
    }
    assert found["free", "skipped", "low_accept"] > 0
    assert sum(count for key, count in found.items() if key[0] == "free") == 400, "once per step"
    good = Clock(FREE)
    other = good.sequence(10_000)
    for _ in range(20):
        good.step([other], DRAFTS, 0.001, accepted=4)
    assert good.controller.decisions.counts["free", "drafted", "pays"] > 10
    fixed = Clock(FREE, ControllerSettings(fixed_length=lambda batch: 2))
    fixed.step([fixed.sequence()], DRAFTS, 0.001, accepted=4)
    assert fixed.controller.decisions.counts == {("free", "drafted", "fixed"): 1}
