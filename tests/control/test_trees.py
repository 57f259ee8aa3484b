"""Trees in a world of numbers: they win where rows are cheap, and hurt nowhere."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from foretell.control.acceptance_model import RESCUES, WIDTHS, AcceptanceRates, cell, rescue
from foretell.control.acceptance_tracker import Acceptance, OpenDraft
from foretell.control.controller import Controller, FreeDrafts
from foretell.control.latency_model import StepCosts
from foretell.control.length_optimizer import DrafterOption, DraftPlan, StepCostView, TreeOptions, best_plan, share_out
from foretell.control.settings import TREE_ROWS, ControllerSettings, DrafterTraits
from foretell.control.simulation import Always, Machine, Scenario, World, best_fixed, best_tree
from foretell.runner.cuda.graph_shapes import CAPTURE_ROWS
from foretell.types import Budget, Draft, ScheduledSequence, Sequence, StepResult, StepTimes, VerifyResult
from tests.control.scenarios import CHAINS, CPU, GPU, TREES, adapted, adaptive, head, steady
from tests.control.test_adaptive import Clock

WITH_TREES = ControllerSettings(tree=64)
QUICK = ("gpu 0.6", "gpu, dear levels", "cpu 0.6", "cpu 0.05", "gpu, no others")


class Watched(Controller):
    """Does as another and notes, by texts at once, whether a step had trees."""

    def __init__(self, inner: Controller) -> None:
        self.inner, self.grew = inner, defaultdict[int, list[bool]](list)

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        return self.inner.wants_free_drafts(seqs)

    def choose_draft_lengths(self, seqs: list[Sequence], offers: FreeDrafts) -> list[Budget]:
        found = self.inner.choose_draft_lengths(seqs, offers)
        self.grew[len(seqs)].append(any(budget.is_tree for budget in found))
        return found

    def observe(self, outcomes: list[StepResult], times: StepTimes) -> None:
        self.inner.observe(outcomes, times)

    def forget(self, seq: Sequence) -> None:
        self.inner.forget(seq)


def brief(name: str) -> Scenario:
    return replace({**TREES, **CHAINS}[name], requests=24)


@pytest.mark.parametrize("name", QUICK)
def test_trees_win_where_rows_are_cheap_and_hurt_nowhere(name: str) -> None:
    scenario = brief(name)
    chain, plain = best_fixed(scenario, (0, 1, 2, 4, 8))
    taken = adapted(scenario, WITH_TREES).seconds
    assert chain / taken >= (1.05 if name in TREES else 0.95)
    assert plain / taken >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*TREES, *CHAINS])
def test_that_is_no_matter_of_luck(name: str, seed: int) -> None:
    scenario = replace({**TREES, **CHAINS}[name], seed=seed)
    chain, plain = best_fixed(scenario)
    taken = adapted(scenario, WITH_TREES).seconds
    assert chain / taken >= (1.05 if name in TREES else 0.95)
    assert min(chain, best_tree(scenario, (1, 2, 4, 6, 8))) / taken >= 0.93
    assert plain / taken >= 0.97


def test_without_trees_it_decides_as_it_did() -> None:
    scenario = brief("gpu 0.6")
    assert adapted(scenario, ControllerSettings(tree=0)).seconds > 1.1 * adapted(scenario, WITH_TREES).seconds


def test_alone_it_makes_trees_and_in_a_crowd_chains() -> None:
    scenario = replace(CHAINS["gpu, load of 1 and 64"], tokens=40)
    world = World(scenario, Watched(adaptive(scenario, WITH_TREES)))
    assert isinstance(world.controller, Watched)
    for _ in world.steps():
        pass
    alone, crowd = world.controller.grew[1], world.controller.grew[64]
    late, later = alone[len(alone) // 2 :], crowd[len(crowd) // 2 :]
    assert sum(late) > 0.75 * len(late) > 100, "the rest are single tries, and steps to compare with"
    assert len(later) >= 20 and sum(later) < 0.05 * len(later)


def test_the_world_grows_trees_fairly() -> None:
    """A fixed tree of one level stands as often as its choices are right."""
    scenario = replace(head(steady(0.5), 0.0, GPU, tokens=400), requests=50)
    found = World(scenario, Always("head", 4, 1)).run()
    rescued = sum(scenario.arms[0].others[:3])
    assert found.tokens / found.steps == pytest.approx(1 + 0.5 + 0.5 * rescued, rel=0.02)


def market(writers: int = 1, row: float = 0.001) -> StepCostView:
    return StepCostView(writers, writers, [1 + row * (rows - writers) for rows in range(600)])


@pytest.mark.parametrize("writers", [1, 3, 16])
def test_a_gain_is_what_it_is_whatever_was_asked_before(writers: int) -> None:
    rng = random.Random(writers)
    asked = StepCostView(writers, writers + 2, sorted(rng.random() for _ in range(80)), held=0.1, further=1e-3)
    share = asked.plain / writers
    for _ in range(200):
        expected, nodes, drafting = rng.uniform(1, 8), rng.randrange(1, 40), rng.choice([0.0, rng.random()])
        last = asked.curve[min(asked.rows + nodes * writers, len(asked.curve) - 1)]
        extra = (last - asked.curve[asked.rows]) / writers + nodes * asked.further
        assert asked.gain(expected, nodes, drafting) == expected * share / (share + extra + drafting)


def by_depth(nodes: int, depth: int) -> float:
    return 0.1 * depth


def test_a_plan_weighs_levels_against_nodes() -> None:
    """Levels take time, rows cost little: the tree is wide and not deep. Where rows cost, it is a chain."""
    levels = {2.0: [0.8, 0.6, 0.5], 8.0: [0.95, 0.9, 0.85]}
    head = DrafterOption("head", [0.6, 0.36, 0.2], by_depth, TreeOptions((2, 8), 24, levels.__getitem__, by_depth))
    plan = best_plan(market(), [head], 0.01)
    assert (plan.nodes, plan.depth) == (24, 3) and plan.gain == pytest.approx(3.7 / 1.324)
    assert sum(plan.survival) == pytest.approx(2.7) and len(plan.survival) == 24
    assert plan.survival[:3] == (0.6, 0.36, 0.2)
    dear = best_plan(market(row=0.25), [head], 0.01)
    assert dear.depth == dear.nodes == 1 and not dear.levels
    assert best_plan(market(row=2.0), [head], 0.01).nodes == 0


def test_where_a_narrow_tree_is_hopeless_no_wider_one_is_looked_at() -> None:
    asked: list[float] = []

    def levels(wide: float) -> list[float]:
        asked.append(wide)
        return [0.9, 0.8]

    head = DrafterOption("head", [0.6, 0.36], by_depth, TreeOptions((2, 4, 8), 16, levels, by_depth))
    assert not best_plan(market(row=0.5), [head], 0.01).levels and asked == [2]
    assert best_plan(market(), [head], 0.01).levels and asked == [2, 2, 4, 8]


@pytest.mark.parametrize("rate", [0.4, 0.6, 0.75])
def test_where_steps_are_filled_up_trees_fill_them(rate: float) -> None:
    """As on a GPU, which runs 16 rows where 13 are wanted: three more nodes cost nothing."""
    filled = Machine(base=0.0039, row=0.00002, token=1e-8, sizes=CAPTURE_ROWS)
    scenario = replace(head(steady(rate), 0.0003, filled), requests=24)
    found = adapted(scenario, WITH_TREES)
    late = [nodes for nodes in found.lengths[len(found.lengths) // 2 :] if nodes > 8]
    assert late and sum(nodes + 1 in CAPTURE_ROWS for nodes in late) >= 0.95 * len(late)
    assert found.seconds < 0.99 * adapted(scenario, WITH_TREES, knowing=False).seconds
    chain, _ = best_fixed(scenario, (0, 1, 2, 4, 8))
    assert chain / found.seconds >= 1.05


def test_what_fills_a_step_up_is_counted_on() -> None:
    """A tree of ten nodes would be run with fifteen, and is weighed as what it will be."""
    asked: list[float] = []

    def levels(wide: float) -> list[float]:
        asked.append(wide)
        return [0.9, 0.8, 0.7, 0.6, 0.5]

    head = DrafterOption("head", [0.6, 0.4, 0.2], by_depth, TreeOptions((2,), 31, levels, by_depth))
    alone = StepCostView(1, 1, [1.0] * 600, sizes=CAPTURE_ROWS)
    plan = best_plan(alone, [head], 0.01)
    assert (plan.nodes, plan.depth) == (15, 5) and asked[:4] == [3, 3.5, 7 / 3, 3.75]
    assert best_plan(replace(alone, sizes=()), [head], 0.01).nodes == 10


def test_requests_limit_what_fills_a_step_up() -> None:
    clock = Clock({"head": DrafterTraits(grows=True)}, ControllerSettings(tree=64), StepCosts(sizes=CAPTURE_ROWS))
    controller, plan = clock.controller, DraftPlan("head", 20, 2.0, (0.5,) * 20, 5)
    alone, seq = replace(market(), sizes=CAPTURE_ROWS), clock.sequence(max_draft=24)
    head = DrafterOption(
        "head", [0.5] * 5, by_depth, TreeOptions((4,), 24, lambda wide: [0.9, 0.8, 0.8, 0.8, 0.8], by_depth)
    )
    assert best_plan(alone, [head], 0.01).nodes == 24
    found = [controller._budget(each, seq, plan, 20, 1) for each in (alone, market())]
    assert [(each.nodes, each.max_depth) for each in found] == [(20, 6), (21, 6)]
    long = replace(alone, further=0.002)
    assert (
        controller._budget(long, seq, plan, 20, 0).min_probability
        > controller._budget(alone, seq, plan, 20, 0).min_probability
    )


def test_a_prompt_or_others_want_the_rows_that_would_fill_a_step_up() -> None:
    clock = Clock({"head": DrafterTraits(grows=True)}, ControllerSettings(tree=64), StepCosts(sizes=CAPTURE_ROWS))
    clock.controller.costs.observe(1, 10, 0.01, 0)
    alone, prompt = clock.sequence(), clock.sequence()
    prompt.tokens += [1] * 30
    assert clock.controller._market([alone]).sizes == CAPTURE_ROWS
    for crowd in ([alone, prompt], [alone, clock.sequence()], [prompt]):
        assert clock.controller._market(crowd).sizes == ()


@pytest.mark.parametrize("shape", [(2, 1), (4, 2), (8, 2), (16, 4)])
@pytest.mark.parametrize("most", [1, 64])
@pytest.mark.parametrize("sizes", [(), CAPTURE_ROWS])
def test_a_tree_that_is_tried_deeper_stays_a_tree(shape: tuple[int, int], most: int, sizes: tuple[int, ...]) -> None:
    clock = Clock({"head": DrafterTraits(grows=True)}, ControllerSettings(tree=max(most, shape[0])))
    plan, world = DraftPlan("head", shape[0], 2.0, (0.5,) * shape[0], shape[1]), replace(market(), sizes=sizes)
    found = clock.controller._budget(world, clock.sequence(), plan, shape[0], 1)
    assert found.is_tree and shape[0] <= found.nodes <= max(most, shape[0])
    assert found.max_depth == shape[1] + (found.nodes > shape[1] + 1)


def test_a_level_is_never_less_than_impossible() -> None:
    """Others that were held to be worse than none, where first choices were good, and now those are bad, too."""
    rates = AcceptanceRates(None, (0.999, 12.0))
    for _ in range(300):
        rates.count(cell(None, 1), True)
        rates.count(cell(None, 3), True)
        rates.count_level(3, 2, False)
    assert all(rates.level(first / 20, 3, 2) >= 0 for first in range(21))


@pytest.mark.parametrize("first", [0.2, 0.5, 0.9])
def test_of_trees_that_were_tried_for_long_nothing_more_is_hoped(first: float) -> None:
    rates, rng = AcceptanceRates(None, (1.0, 12.0)), random.Random(3)
    for _ in range(400):
        rates.count(cell(None, 1), rng.random() < first)
        rates.count_level(1, 4, rng.random() < first)
    known = rates.rate(cell(None, 1))
    assert rates.level(known, 1, 4) == pytest.approx(first, abs=0.08)


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_wider_trees_are_believed_to_bring_more(depth: int) -> None:
    found = [rescue(wide / 4, depth) for wide in range(4, 100)]
    assert found[0] == 0 and found[-1] == RESCUES[min(depth, 3) - 1][-1]
    assert all(later >= earlier for earlier, later in zip(found[4:], found[5:], strict=False))
    assert [rescue(wide, depth) for wide in WIDTHS] == list(RESCUES[min(depth, 3) - 1])


@pytest.mark.parametrize("first", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("rescued", [0.0, 0.4, 0.8])
def test_what_one_width_teaches_holds_for_all(first: float, rescued: float) -> None:
    """A first choice that stands so often, and where it falls another of a tree four wide: what a wider one brings is
    foretold, as much beyond that as is believed of trees."""
    rates, rng = AcceptanceRates(None, (0.999, 12.0)), random.Random(7)
    for _ in range(1500):
        stood = rng.random() < first
        rates.count(cell(None, 1), stood)
        rates.count_level(1, 4, stood or rng.random() < rescued)
    mine, wider = (rates.level(first, 1, wide) for wide in (4, 16))
    assert mine == pytest.approx(first + (1 - first) * rescued, abs=0.06)
    more = (1 - first) * (rescue(16, 1) - rescue(4, 1))
    assert wider == pytest.approx(mine + more, abs=1e-9)


def test_of_trees_for_several_the_best_nodes_are_bought() -> None:
    levels = {8.0: [0.95, 0.9, 0.85]}
    head = DrafterOption("head", [0.6, 0.36, 0.2], by_depth, TreeOptions((8,), 24, levels.__getitem__, by_depth))
    cheap, dear = market(4), market(4, row=0.04)
    plans = [best_plan(cheap, [head], 0.01)] * 4
    assert share_out(cheap, plans, 0.3, False, 0.01) == [24] * 4
    given = share_out(dear, plans, 0.3, False, 0.01)
    assert max(given) <= 3, "what is left of a tree under load is its chain"


def test_what_a_tree_yields_is_learnt_level_by_level() -> None:
    acceptance = Acceptance()
    ledger = acceptance.ledger(0, "greedy")
    budget = Budget(8, "head", max_depth=2)
    draft = Draft((5, 6, 7), (-1, -1, 1), "head")  # a second choice that goes on, a first that does not
    for _ in range(60):
        acceptance.note(ledger, OpenDraft("head", draft, 1, budget=budget))
        acceptance.learn(ledger, [1, 6, 9])
    rates, found = acceptance.rates(ledger, "head"), acceptance.bushy(ledger, "head", 2, 4)
    assert rates.rate(cell(None, 1)) < 0.2, "the chain would have fallen"
    assert found[0] > 0.8 and found[1] < 0.3 * found[0]
    assert rates.tried[cell(None, 2)] == 0, "what hangs on a second choice says nothing of chains"


def test_a_branch_that_ends_before_its_time_has_fallen() -> None:
    acceptance = Acceptance()
    ledger, budget = acceptance.ledger(0, "greedy"), Budget(8, "head", max_depth=4)
    for _ in range(80):
        acceptance.note(ledger, OpenDraft("head", Draft((5,), (-1,), "head"), 1, budget=budget))
        acceptance.learn(ledger, [1, 5, 9, 9])
    rates = acceptance.rates(ledger, "head")
    assert rates.level(0.5, 1, 2) > 0.5 > 0.3 > rates.level(0.5, 2, 2)
    assert rates.tried[cell(None, 2)] == 0


def test_requests_and_crowds_limit_trees() -> None:
    clock = Clock({"head": DrafterTraits(grows=True)}, ControllerSettings(tree=64))
    settings = clock.controller.settings
    assert settings.tree_cap(clock.sequence(), 1) == 64
    assert settings.tree_cap(clock.sequence(), 64) == TREE_ROWS // 64
    assert settings.tree_cap(clock.sequence(max_draft=3), 1) == 3


def test_a_fixed_length_may_be_that_of_a_tree() -> None:
    arms = {"head": DrafterTraits(grows=True), "model": DrafterTraits()}
    clock = Clock(arms, ControllerSettings(fixed=lambda batch: 4, tree=20))
    seq = clock.sequence(drafter="head")
    object.__setattr__(seq.request, "drafters", ("head",))
    clock.controller.wants_free_drafts([seq])
    assert clock.controller.choose_draft_lengths([seq], {}) == [Budget(20, "head", max_depth=4)]
    object.__setattr__(seq.request, "drafters", ("model",))
    clock.controller.wants_free_drafts([seq])
    assert clock.controller.choose_draft_lengths([seq], {}) == [Budget(4, "model")], (
        "who makes no trees is not asked for one"
    )


def test_levels_and_nodes_have_prices_of_their_own() -> None:
    clock = Clock({"head": DrafterTraits(grows=True)}, ControllerSettings(tree=64))
    drafting = clock.controller.drafting
    seq: Sequence = clock.sequence(10_000)

    def seen(draft: Draft, budget: Budget, seconds: float) -> None:
        outcome = StepResult(ScheduledSequence.of(seq, 1, budget), draft, VerifyResult((), 1), new_tokens=(1,))
        drafting.observe([outcome], seconds, 0.01)

    bush, flat = Draft(tuple(range(12)), (-1,) * 4 + (0,) * 8, "head"), Draft(tuple(range(12)), (-1,) * 12, "head")
    for _ in range(60):
        seen(Draft.chain([1, 2, 3, 4], "head"), Budget(4, "head"), 1e-3)
        seen(Draft.chain([1], "head"), Budget(1, "head"), 0.25e-3)
        seen(bush, Budget(12, "head", max_depth=2), 4e-3)
        seen(flat, Budget(12, "head", max_depth=1), 2e-3)
    chain, tree = (drafting.of("head", grown).prices(0.01) for grown in (False, True))
    assert chain.level + chain.node == pytest.approx(0.25e-3, rel=0.15), "trees are made otherwise, and cost otherwise"
    assert tree.level == pytest.approx(2e-3, rel=0.2) and tree.node < 1e-4
    clock.controller.observe([], StepTimes(0.0, 0.0))


def test_cpu_prices_keep_to_chains() -> None:
    result = adapted(replace(head(steady(0.6), 0.0006, CPU), requests=24), WITH_TREES)
    late = result.lengths[len(result.lengths) // 2 :]
    assert sum(late) / len(late) < 4


@pytest.mark.parametrize("whole", [True, False])
def test_a_draft_that_is_made_whole_costs_what_was_asked_for(whole: bool) -> None:
    """Seven levels of which the tree came to two take seven levels' time, where none is looked at before all are made;
    elsewhere two."""
    clock = Clock({"head": DrafterTraits(grows=True, whole=whole)}, ControllerSettings(tree=64))
    drafting, seq = clock.controller.drafting, clock.sequence(10_000)
    shallow = Draft(tuple(range(12)), (-1,) * 4 + (0,) * 8, "head")
    for asked in (7, 3, 5, 2) * 20:
        levels = asked if whole else 2
        outcome = StepResult(
            ScheduledSequence.of(seq, 1, Budget(12, "head", max_depth=asked)),
            shallow,
            VerifyResult((), 1),
            new_tokens=(1,),
        )
        drafting.observe([outcome], 1e-3 + levels * 0.5e-3, 0.01)
    costs = drafting.of("head", True)
    for levels in (2, 7) if whole else (2,):
        assert costs.seconds(levels, 12, 0, 0.01) == pytest.approx(1e-3 + levels * 0.5e-3, rel=0.05)
