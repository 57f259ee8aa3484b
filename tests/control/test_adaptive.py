"""The controller in a real engine: it decides how far to guess, never what is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, pairwise

import pytest

from foretell.control.adaptive import AdaptiveController
from foretell.control.controller import Controller, FreeDrafts
from foretell.control.latency_model import StepCosts
from foretell.control.settings import ControllerSettings, DrafterTraits
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
    """A clock on which every look takes a tenth of a millisecond, so that nothing hangs on this machine's pace."""
    return partial(next, count(0.0, 1e-4))


def adapted(drafter: Drafter, settings: ControllerSettings = ControllerSettings(), world: World = World()) -> Engine:
    engine = world.engine(drafter)
    traits = {name: DrafterTraits(arm.free, arm.reads, arm.cost_share) for name, arm in drafter.drafters.items()}
    engine.controller = AdaptiveController(traits, settings, clock=ticking())
    return engine


def write(engine: Engine, **params: object) -> list[list[int]]:
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt, **params)]  # type: ignore[arg-type]
    run(engine)
    assert engine.runner.pool.num_held == 0
    return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings", [ControllerSettings(), ControllerSettings(throughput=True), ControllerSettings(fixed=lambda batch: 3)]
)
@pytest.mark.parametrize("world", [World(), World(pages=24, max_num_seqs=3)], ids=["roomy", "cramped"])
def test_the_text_is_the_same_whatever_it_decides(
    temperature: float, settings: ControllerSettings, world: World
) -> None:
    truth = generate(world=world, temperature=temperature)
    drafter = MixDrafter([NGramDrafter(1, 3), SuffixDrafter(offset=2), model_drafter(seed=5)])
    assert write(adapted(drafter, settings, world), temperature=temperature) == truth


def test_nothing_is_kept_of_who_has_left() -> None:
    engine = adapted(MixDrafter([NGramDrafter(1, 3), model_drafter(seed=5)]))
    write(engine)
    controller = engine.controller
    assert isinstance(controller, AdaptiveController)
    assert not len(controller.patience)
    assert not len(controller.drafting)
    assert not controller.lessons._expected
    assert not len(controller.hurry)
    assert not controller.acceptance._ledgers
    assert not len(controller.foresight)


@pytest.mark.parametrize("adapts", [False, True])
def test_no_draft_delays_a_first_token(adapts: bool) -> None:
    """Not even where the last piece of a prompt is a single token."""
    world, asked = World(max_step_tokens=16), list[int]()

    def script(seq: Sequence, budget: Budget) -> Draft:
        asked.append(seq.num_output_tokens)
        return Draft((1,), (-1,))

    engine = world.engine(ScriptedDrafter(script))
    if adapts:
        engine.controller = AdaptiveController({"scripted": DrafterTraits()}, ControllerSettings(fixed=lambda batch: 2))
    add(engine, "0", [3] * 17, max_tokens=6)
    add(engine, "1", [5], max_tokens=6)
    run(engine)
    assert asked and min(asked) == 1


class Clock:
    """Steps of set prices, to see what is decided at them."""

    def __init__(
        self,
        arms: dict[str, DrafterTraits],
        settings: ControllerSettings = ControllerSettings(),
        costs: StepCosts | None = None,
    ) -> None:
        self.controller = AdaptiveController(arms, settings, costs, clock=ticking())
        self.ids = 0

    def sequence(self, room: int = 100, **choice: object) -> Sequence:
        self.ids += 1
        request = Request(
            str(self.ids),
            (1,),
            SamplingParams(),
            0,
            room + 1,
            drafters=tuple(self.controller.arms),
            speculation=SpeculationChoice(**choice),  # type: ignore[arg-type]
        )
        return Sequence(self.ids, request, [1, 2], cached=1)

    def step(self, seqs: list[Sequence], offers: dict[str, Draft], row: float, stands: int) -> list[Budget]:
        asked, _ = self.controller.wants_free_drafts(seqs)
        budgets = self.controller.choose_draft_lengths(seqs, {seq.id: offers for seq in asked})
        outcomes = [self._outcome(seq, budget, offers, stands) for seq, budget in zip(seqs, budgets, strict=True)]
        rows = sum(1 + len(outcome.draft) for outcome in outcomes)
        self.controller.observe(outcomes, StepTimes(1e-5, 0.03 + row * rows))
        return budgets

    def _outcome(self, seq: Sequence, budget: Budget, offers: dict[str, Draft], stands: int) -> StepResult:
        draft = offers[budget.drafter].truncate(budget.nodes) if budget.nodes else Draft()
        share = ScheduledSequence.of(seq, 1, budget)
        path = tuple(range(min(stands, len(draft))))
        kept = (*draft.tokens[: len(path)], 7)
        kept = kept if path or not stands else next(iter(offers.values())).tokens[:1]
        seq.tokens += kept
        seq.cached = len(seq.tokens) - 1
        return StepResult(share, draft, VerifyResult(path, kept[-1]), new_tokens=kept)


FREE = {"free": DrafterTraits(free=True)}
GUESS = {"free": Draft.chain([5, 5, 5, 5], "free")}


def test_guesses_that_stand_are_followed_and_guesses_that_fall_are_dropped() -> None:
    good, bad = Clock(FREE), Clock(FREE)
    seqs = [good.sequence(10_000)], [bad.sequence(10_000)]
    for _ in range(200):
        taken = good.step(seqs[0], GUESS, 0.004, stands=4)
        dropped = bad.step(seqs[1], GUESS, 0.004, stands=0)
    assert taken[0].nodes == 4
    assert dropped[0].nodes == 0
    assert not bad.controller.decisions.on
    assert "acceptance" in bad.controller.decisions.reason
    assert "break-even" in bad.controller.decisions.reason


def test_the_first_step_is_plain_because_its_price_is_not_known() -> None:
    clock = Clock(FREE)
    assert clock.step([clock.sequence()], GUESS, 0.0, stands=4)[0].nodes == 0


def test_a_plain_step_now_and_then_tells_what_guesses_are_weighed_against() -> None:
    clock = Clock(FREE)
    seq = clock.sequence(100_000)
    nodes = [clock.step([seq], GUESS, 0.001, stands=4)[0].nodes for _ in range(4000)]
    plain = [i for i, count in enumerate(nodes) if not count]
    assert plain[1] < 400
    assert len(plain) > 4, "and not never"
    assert all(b - a > 64 for a, b in pairwise(plain[3:])), "but seldom when much is known"
    assert (("free", "skipped", "compared") in clock.controller.decision_counts) and clock.controller.decisions.on


@pytest.mark.parametrize(
    ("room", "wanted", "most"), [(3, None, 2), (1, None, 0), (50, 1, 1), (50, 0, 0), (50, None, 4)]
)
def test_no_more_than_there_is_room_for_or_was_asked_for(room: int, wanted: int | None, most: int) -> None:
    clock = Clock(FREE)
    for _ in range(30):
        clock.step([clock.sequence(10_000)], GUESS, 0.001, stands=4)
    seqs = [clock.sequence(room, max_draft=wanted) for _ in range(2)]  # one step may be plain, to compare with
    assert max(clock.step([seq], GUESS, 0.001, stands=4)[0].nodes for seq in seqs) == most


def test_a_crowd_drafts_less_than_one_alone() -> None:
    clock = Clock(FREE)
    one = [clock.sequence(10_000)]
    many = [clock.sequence(10_000) for _ in range(24)]
    alone = [clock.step(one, GUESS, 0.01, stands=i % 2)[0].nodes for i in range(60)]
    crowd = [budget.nodes for i in range(30) for budget in clock.step(many, GUESS, 0.01, stands=i % 2)]
    assert sum(alone) / len(alone) > 0.5
    assert sum(crowd) / len(crowd) < 0.1


def test_a_request_that_wants_no_drafts_gets_none() -> None:
    truth = generate()
    drafter = OracleDrafter({tuple(p): t for p, t in zip(PROMPTS, truth, strict=True)}, VOCAB, 0.0)
    engine = adapted(drafter, ControllerSettings(fixed=lambda batch: 4))
    for i, prompt in enumerate(PROMPTS):
        add(engine, str(i), prompt, SpeculationChoice(enabled=False))
    run(engine)
    assert engine.stats.speculation.drafted == 0


def test_short_drafts_are_left_out_where_that_was_asked_for() -> None:
    controller = AdaptiveController(FREE, ControllerSettings(shortest=3))
    seq = Clock(FREE).sequence()
    share = ScheduledSequence.of(seq, 1, Budget(4, "free"))
    long, short = Draft.chain([1, 2, 3], "free"), Draft.chain([1, 2], "free")
    assert controller.trim([share, share], [long, short]) == [long, Draft()]


def test_how_likely_a_branch_must_be_reaches_the_drafter() -> None:
    """The scheduler passes budgets on as they are, but for their nodes."""
    floors: list[float] = []

    class Watching(OracleDrafter):
        def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
            floors.extend(budget.min_probability for budget in budgets if budget.nodes)
            return super().propose(seqs, budgets)

    engine = World().engine(Watching({}, VOCAB, 0.0))
    engine.controller = Floored()
    add(engine, "0", PROMPTS[0])
    run(engine)
    assert floors
    assert set(floors) == {0.25}


class Floored(Controller):
    def choose_draft_lengths(self, seqs: list[Sequence], offers: FreeDrafts) -> list[Budget]:
        return [Budget(2 if seq.pending == 1 and seq.remaining_tokens > 2 else 0, "oracle", 0.25) for seq in seqs]


def test_a_drafter_that_comes_up_with_nothing_is_not_paid_for_ever() -> None:
    clock = Clock({"paid": DrafterTraits()})
    seq = clock.sequence(10_000)
    asked = [clock.step([seq], {"paid": Draft()}, 0.001, stands=0)[0].nodes for _ in range(300)]
    assert sum(map(bool, asked[:50])) > 0
    assert sum(map(bool, asked[100:])) < 10


def test_a_drafter_without_a_name_on_its_drafts_is_learnt_all_the_same() -> None:
    class Nameless(ScriptedDrafter):
        name = "nameless"

    def wrong(seq: Sequence, budget: Budget) -> Draft:
        return Draft.chain([31] * budget.nodes)

    engine = adapted(Nameless(wrong))
    tracks = add(engine, "0", PROMPTS[0], max_tokens=200, ignore_eos=True)
    run(engine)
    assert tracks[0].speculation.by_drafter["nameless"].drafted > 0
    assert isinstance(engine.controller, AdaptiveController)
    assert engine.controller.acceptance.first_rate("nameless", "greedy") < 0.45, "its failures were counted"


def test_many_texts_at_once_are_priced_without_a_single_one_before() -> None:
    clock = Clock(FREE)
    many = [clock.sequence(10_000) for _ in range(100)]
    for _ in range(3):
        clock.step(many, GUESS, 1e-5, stands=4)
    assert clock.controller.costs.known


def test_a_step_in_which_something_was_recorded_teaches_no_price() -> None:
    controller = AdaptiveController({"paid": DrafterTraits(reads=True)}, clock=ticking())
    seq = Clock({"paid": DrafterTraits()}).sequence()

    def ran(times: StepTimes, nodes: int = 0) -> None:
        budget = Budget(nodes, "paid") if nodes else Budget()
        controller.observe([StepResult(ScheduledSequence.of(seq, 1, budget), Draft.chain([5] * nodes, "paid"))], times)

    ran(StepTimes(0.0, 9.0, 0.0, is_outlier=True))
    assert not controller.costs.known
    for _ in range(4):
        ran(StepTimes(0.0, 0.01, 0.0))
    before = (controller.costs.dump(), controller.costs.steps, controller.draft_costs["paid"].dump())
    ran(StepTimes(9.0, 9.0, 9.0, is_outlier=True), nodes=3)
    assert (controller.costs.dump(), controller.costs.steps, controller.draft_costs["paid"].dump()) == before
    assert controller.drafting.behind(seq, "paid") == 0, "the drafter has read the text all the same"
    ran(StepTimes(0.002, 0.01, 0.002), nodes=3)
    assert controller.draft_costs["paid"].dump() and controller.costs.steps == before[1] + 1


def test_a_long_text_is_not_read_on_a_mere_hope() -> None:
    clock = Clock({"paid": DrafterTraits(reads=True)})
    short, long = clock.sequence(500), clock.sequence(500)
    clock.step([short], {"paid": Draft.chain([5] * 16, "paid")}, 0.001, stands=0)
    long.tokens, long.cached = [1] * 20_000, 19_999
    long.request = replace(long.request, prompt=(1,) * 19_000, max_tokens=1500)
    asked = [
        clock.controller.wants_free_drafts([seq]) and clock.controller.choose_draft_lengths([seq], {})[0].nodes
        for seq in (long, short)
    ]
    assert asked[0] == 0
    assert 0 < asked[1] <= 4


def test_being_off_costs_few_looks() -> None:
    """The untimed twin of the promise that being off costs nothing: how often a sequence is looked at at all."""
    clock = Clock(FREE)
    seq = clock.sequence(100_000)
    for _ in range(600):
        clock.step([seq], GUESS, 0.02, stands=0)
    looked = 0
    for _ in range(160):
        looked += bool(clock.controller.wants_free_drafts([seq])[0])
        clock.controller.choose_draft_lengths([seq], {})
    assert looked <= 20


def test_fixed_lengths_are_not_thinned_out() -> None:
    clock = Clock(FREE, ControllerSettings(fixed=lambda batch: 2))
    seq = clock.sequence(100_000)
    taken = [clock.step([seq], GUESS, 0.02, stands=0)[0].nodes for _ in range(100)]
    assert set(taken) == {2}


def test_what_is_decided_is_counted_for_each_drafter_with_its_reason() -> None:
    clock = Clock({"free": DrafterTraits(free=True), "mute": DrafterTraits(free=True)})
    seq = clock.sequence(10_000)
    for _ in range(400):
        clock.step([seq], GUESS, 0.02, stands=0)
    found = clock.controller.decision_counts
    assert {key for key in found if key[0] == "mute"} == {
        ("mute", "skipped", "no_costs"),
        ("mute", "skipped", "no_guess"),
        ("mute", "skipped", "not_asked"),
    }
    assert found["free", "skipped", "low_accept"] > 0
    assert sum(count for key, count in found.items() if key[0] == "free") == 400, "each step once"
    good = Clock(FREE)
    other = good.sequence(10_000)
    for _ in range(20):
        good.step([other], GUESS, 0.001, stands=4)
    assert good.controller.decision_counts["free", "drafted", "pays"] > 10
    fixed = Clock(FREE, ControllerSettings(fixed=lambda batch: 2))
    fixed.step([fixed.sequence()], GUESS, 0.001, stands=4)
    assert fixed.controller.decision_counts == {("free", "drafted", "fixed"): 1}
