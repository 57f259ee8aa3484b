"""Trees in the simulator: faster where rows are cheap, and nowhere slower."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest

from foretell.control.acceptance_model import RESCUE_RATES, WIDTHS, AcceptanceRates, cell, rescue_rate, tree_cell
from foretell.control.choice import Choice, DrafterOption, StepCostView, allocate, best_choice, min_probability
from foretell.control.controller import Controller, FreeDrafts
from foretell.control.latency_model import DraftPrices, StepCosts
from foretell.control.settings import MAX_TREE_ROWS, ControllerSettings, ControllerTuning
from foretell.runner.cuda.graph_shapes import CAPTURE_ROWS
from foretell.types import (
    Budget,
    Draft,
    DrafterTraits,
    ScheduledSequence,
    Sequence,
    StepResult,
    StepTimes,
    VerifyResult,
)
from tests.control.scenarios import CHAINS, CPU, GPU, TREES, adaptive, head, run_adaptive, steady
from tests.control.simulation import FixedDrafterController, Machine, Scenario, Simulator, best_fixed, best_tree
from tests.control.test_acceptance_model import follow
from tests.control.test_adaptive import Clock

WITH_TREES = ControllerSettings(max_tree_nodes=64)
QUICK = ("gpu 0.6", "gpu, expensive levels", "cpu 0.6", "cpu 0.05", "gpu, none rescued")


class TreeRecorder(Controller):
    """Delegates to another controller and records, by batch size, whether a step had trees."""

    def __init__(self, inner: Controller) -> None:
        self.inner, self.has_trees = inner, defaultdict[int, list[bool]](list)

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        return self.inner.wants_free_drafts(seqs)

    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        found = self.inner.choose_draft_lengths(seqs, free_drafts)
        self.has_trees[len(seqs)].append(any(budget.is_tree for budget in found))
        return found

    def observe(self, results: list[StepResult], times: StepTimes) -> None:
        self.inner.observe(results, times)

    def forget(self, seq: Sequence) -> None:
        self.inner.forget(seq)


def short(name: str) -> Scenario:
    return replace({**TREES, **CHAINS}[name], requests=24)


@pytest.mark.parametrize("name", QUICK)
def test_trees_are_faster_where_rows_are_cheap_and_nowhere_slower(name: str) -> None:
    scenario = short(name)
    chain, plain = best_fixed(scenario, (0, 1, 2, 4, 8))
    seconds = run_adaptive(scenario, WITH_TREES).seconds
    assert chain / seconds >= (1.05 if name in TREES else 0.95)
    assert plain / seconds >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*TREES, *CHAINS])
def test_the_bounds_hold_for_other_seeds(name: str, seed: int) -> None:
    scenario = replace({**TREES, **CHAINS}[name], seed=seed)
    chain, plain = best_fixed(scenario)
    seconds = run_adaptive(scenario, WITH_TREES).seconds
    assert chain / seconds >= (1.05 if name in TREES else 0.95)
    assert min(chain, best_tree(scenario, (1, 2, 4, 6, 8))) / seconds >= 0.93
    assert plain / seconds >= 0.97


def test_trees_can_be_disabled() -> None:
    scenario = short("gpu 0.6")
    assert (
        run_adaptive(scenario, ControllerSettings(max_tree_nodes=0)).seconds
        > 1.1 * run_adaptive(scenario, WITH_TREES).seconds
    )


def test_a_single_sequence_gets_trees_and_a_large_batch_chains() -> None:
    scenario = replace(CHAINS["gpu, load of 1 and 64"], tokens=40)
    simulator = Simulator(scenario, TreeRecorder(adaptive(scenario, WITH_TREES)))
    assert isinstance(simulator.controller, TreeRecorder)
    for _ in simulator.steps():
        pass
    single, large = simulator.controller.has_trees[1], simulator.controller.has_trees[64]
    single, large = single[len(single) // 2 :], large[len(large) // 2 :]
    assert sum(single) > 0.75 * len(single) > 100, "the others are probes and baseline steps"
    assert len(large) >= 20 and sum(large) < 0.05 * len(large)


def test_simulated_trees_have_the_given_acceptance() -> None:
    """A tree of one level is accepted as often as one of its choices is right."""
    scenario = replace(head(steady(0.5), 0.0, GPU, tokens=400), requests=50)
    found = Simulator(scenario, FixedDrafterController("head", 4, 1)).run()
    rescued = sum(scenario.drafters[0].others[:3])
    assert found.tokens / found.steps == pytest.approx(1 + 0.5 + 0.5 * rescued, rel=0.02)


def cost_view(num_decoding: int = 1, row: float = 0.001) -> StepCostView:
    return StepCostView(num_decoding, num_decoding, [1 + row * (rows - num_decoding) for rows in range(600)])


BY_DEPTH = DraftPrices(level=0.1)


def option(chain: list[float], levels: dict[float, list[float]] | list[float], nodes: int) -> DrafterOption:
    """Return a head whose trees have these probabilities, by width or for all of them."""

    def by_width(width: float) -> list[float]:
        if not isinstance(levels, dict):
            return levels
        return levels[max([known for known in levels if known <= width], default=min(levels))]

    return DrafterOption("head", chain, BY_DEPTH, 0.0, nodes, BY_DEPTH, by_width)


def test_a_choice_trades_levels_against_nodes() -> None:
    """If levels are expensive and rows cheap, the tree is wide. If rows are expensive, it is a chain."""
    head = option([0.6, 0.36, 0.2], {2.0: [0.8, 0.6, 0.5], 8.0: [0.95, 0.9, 0.85]}, 24)
    tree = best_choice(cost_view(), [head], 0.01)
    assert (tree.nodes, tree.depth) == (24, 3) and tree.speedup == pytest.approx(3.7 / 1.324)
    assert sum(tree.accept_probs) == pytest.approx(2.7) and len(tree.accept_probs) == 24
    assert tree.accept_probs[:3] == (0.6, 0.36, 0.2)
    chain = best_choice(cost_view(row=0.25), [head], 0.01)
    assert chain.depth == chain.nodes == 1 and not chain.levels
    assert best_choice(cost_view(row=2.0), [head], 0.01).nodes == 0


@pytest.mark.parametrize("seed", range(200))
def test_the_chosen_tree_is_the_best_of_all_widths_and_depths(seed: int) -> None:
    rng = random.Random(seed)
    rate, row, most = rng.uniform(0.2, 0.9), rng.choice([0.0, 0.002, 0.02]), rng.choice([8, 20, 64])
    chain = [rate**depth for depth in range(1, 9)]
    rescued = sorted(rng.random() for _ in WIDTHS)
    levels = {
        float(width): [(rate + (1 - rate) * share) ** depth for depth in range(1, 9)]
        for width, share in zip(WIDTHS, rescued, strict=True)
    }
    view, prices = cost_view(row=row), DraftPrices(0.05, rng.choice([0.01, 0.1]), 0.001)
    head = DrafterOption("head", chain, prices, 0.0, most, prices, levels.__getitem__)
    speeds = [1.01, *((1 + sum(chain[:n])) / view.sequence_seconds(n, prices, n) for n in range(1, 9))]
    for width in WIDTHS:
        for depth in range(1, min(8, most // width) + 1):
            tokens = 1 + sum(levels[float(width)][:depth])
            speeds.append(tokens / view.sequence_seconds(width * depth, prices, depth))
    assert best_choice(view, [head], 0.01).speedup >= 0.97 * max(speeds), "wider trees are not tried if hopeless"


def test_trees_fill_padded_steps() -> None:
    """A GPU pads 13 rows to 16, so three more nodes cost nothing."""
    padded = Machine(base=0.0039, row=0.00002, token=1e-8, sizes=CAPTURE_ROWS, prior_row=0.002)  # as on CUDA
    seconds, unpadded, chains, late = 0.0, 0.0, 0.0, list[float]()
    for rate, seed in product((0.4, 0.6, 0.75), range(3)):
        scenario = replace(head(steady(rate), 0.0003, padded), requests=24, seed=seed)
        found = run_adaptive(scenario, WITH_TREES)
        late += [nodes for nodes in found.lengths[len(found.lengths) // 2 :] if nodes > 8]
        seconds += found.seconds
        unpadded += run_adaptive(scenario, WITH_TREES, knows_sizes=False).seconds
        chains += best_fixed(scenario, (0, 1, 2, 4, 8))[0]
    assert late and sum(nodes + 1 in CAPTURE_ROWS for nodes in late) >= 0.95 * len(late)
    assert seconds < 0.985 * unpadded
    assert chains / seconds >= 1.05


def test_nodes_that_fill_a_padded_step_are_planned() -> None:
    """A tree of ten nodes runs as one of fifteen, and is planned as such."""
    head = option([0.6, 0.4, 0.2], [0.9, 0.8, 0.7, 0.6, 0.5], 31)
    alone = StepCostView(1, 1, [1.0] * 600, padded_sizes=CAPTURE_ROWS)
    tree = best_choice(alone, [head], 0.01)
    assert (tree.nodes, tree.depth) == (15, 5)
    assert best_choice(replace(alone, padded_sizes=()), [head], 0.01).nodes == 10


def test_a_node_that_fills_a_padded_step_pays_for_its_context_alone() -> None:
    alone, tree = replace(cost_view(), padded_sizes=CAPTURE_ROWS), Choice("head", 20, 2.0, (0.5,) * 20, 5, BY_DEPTH)
    long = replace(alone, row_context_seconds=0.002)
    assert min_probability(long, tree, False) > min_probability(alone, tree, False)
    assert min_probability(cost_view(), tree, False) > min_probability(alone, tree, False)


def test_only_the_step_of_a_single_sequence_counts_on_padding() -> None:
    clock = Clock(
        {"head": DrafterTraits(makes_trees=True)}, ControllerSettings(max_tree_nodes=64), StepCosts(sizes=CAPTURE_ROWS)
    )
    clock.controller.costs.observe(1, 10, 0.01, 0)
    alone, prompt = clock.sequence(), clock.sequence()
    prompt.tokens += [1] * 30
    assert clock.controller.options.view([alone]).padded_sizes == CAPTURE_ROWS
    for batch in ([alone, prompt], [alone, clock.sequence()], [prompt]):
        assert clock.controller.options.view(batch).padded_sizes == ()


def test_the_rate_of_a_level_is_never_negative() -> None:
    """Not even if the rescue rate is negative and the first choice is bad."""
    rates = AcceptanceRates(DrafterTraits(prior_acceptance=0.01, acceptance_by_depth=(0.01, 0.01, 0.01)))
    assert rescue_rate(2, 3) < 0 == rates.level_rate(3, 2)


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_the_prior_rescue_rate_grows_with_width(depth: int) -> None:
    found = [rescue_rate(width / 4, depth) for width in range(4, 100)]
    assert found[0] == 0 and found[-1] == RESCUE_RATES[min(depth, 3) - 1][-1]
    assert all(later >= earlier for earlier, later in zip(found[4:], found[5:], strict=False))
    assert [rescue_rate(width, depth) for width in WIDTHS] == list(RESCUE_RATES[min(depth, 3) - 1])


@pytest.mark.parametrize("first", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("rescued", [0.0, 0.4, 0.8])
def test_observations_of_one_width_apply_to_all(first: float, rescued: float) -> None:
    """The rescue rate of a width without trials differs from that of a measured one as their priors do."""
    rates, rng = AcceptanceRates(DrafterTraits(), tuning=ControllerTuning(memory=1e6)), random.Random(7)
    for _ in range(1500):
        accepted = rng.random() < first
        rates.count(cell(None, 1), accepted)
        rates.count_level(1, 4, accepted or rng.random() < rescued)
    chain, measured = rates.rate(cell(None, 1)), rates.level_rate(1, 4)
    assert measured == pytest.approx(first + (1 - first) * rescued, abs=0.06)
    more = (1 - chain) * (rescue_rate(16, 1) - rescue_rate(4, 1))
    assert rates.level_rate(1, 16) == pytest.approx(min(1.0, measured + more), abs=1e-6)


def test_a_batch_of_trees_gets_the_best_nodes() -> None:
    head = option([0.6, 0.36, 0.2], {2.0: [0.7, 0.5, 0.3], 8.0: [0.95, 0.9, 0.85]}, 24)
    cheap, expensive = cost_view(4), cost_view(4, row=0.04)
    trees = [best_choice(cheap, [head], 0.01)] * 4
    assert allocate(cheap, trees, False, 0.01)[0] == [24] * 4
    lengths, _ = allocate(expensive, trees, False, 0.01)
    assert max(lengths) <= 3, "a tree is cut to its chain under load"


def test_trees_are_counted_level_by_level() -> None:
    rates, budget = AcceptanceRates(DrafterTraits()), Budget(8, "head", max_depth=2)
    draft = Draft((5, 6, 7), (-1, -1, 1), "head")  # only the second choice has a child
    for _ in range(60):
        follow(rates, draft, [1], [1, 6, 9], budget=budget)
    found = rates.level_probs(2, 4)
    assert rates.rate(cell(None, 1)) < 0.3, "a chain would have been rejected"
    assert found[0] > 0.8 and found[1] < 0.3 * found[0]
    assert rates.trials[cell(None, 2)] == 0, "children of a second choice say nothing about chains"


def test_a_branch_that_ends_before_its_depth_counts_as_a_miss() -> None:
    rates, budget = AcceptanceRates(DrafterTraits()), Budget(8, "head", max_depth=4)
    for _ in range(80):
        follow(rates, Draft((8, 5), (-1, -1), "head"), [1], [1, 5, 9, 9], budget=budget)
    assert rates.level_rate(1, 2) > 0.8 > 0.2 > rates.level_rate(2, 2)
    assert rates.trials[cell(None, 2)] == 0


def test_a_tree_that_is_accepted_to_its_depth_says_nothing_about_the_next_level() -> None:
    rates, budget = AcceptanceRates(DrafterTraits()), Budget(4, "head", max_depth=2)
    for _ in range(20):
        follow(rates, Draft((5, 6, 7, 8), (-1, -1, 0, 0), "head"), [1], [1, 5, 7, 9, 9], budget=budget)
    assert rates.trials[tree_cell(2, 2)] > 0 == rates.trials[tree_cell(2, 3)]


def test_max_draft_and_batch_size_limit_trees() -> None:
    clock = Clock({"head": DrafterTraits(makes_trees=True)}, ControllerSettings(max_tree_nodes=64))
    settings = clock.controller.settings
    assert settings.max_nodes(clock.sequence(), 1) == 64
    assert settings.max_nodes(clock.sequence(), 64) == MAX_TREE_ROWS // 64
    assert settings.max_nodes(clock.sequence(max_draft=3), 1) == 3


def test_each_sequence_of_a_batch_has_its_own_limit_of_trees() -> None:
    clock = Clock({"head": DrafterTraits(makes_trees=True)}, ControllerSettings(max_tree_nodes=64))
    controller, seqs = clock.controller, [clock.sequence(), clock.sequence(max_draft=20), clock.sequence()]
    controller.costs.observe(1, 0, 0.01)
    for _ in range(20):
        controller.acceptance.rates("head", seqs[0].request.params.temperature).count(cell(None, 1), True)
    controller.wants_free_drafts(seqs)
    view, nodes = controller.options.view(seqs), list[int]()
    for seq in seqs:
        state = controller.states[seq.id]
        state.limit = controller.settings.max_length(seq)
        nodes += [option.max_nodes for option in controller.options.of(view, state, {})]
    assert nodes == [64, 20, 64]


def test_a_fixed_length_can_be_the_depth_of_a_tree() -> None:
    traits = {"head": DrafterTraits(makes_trees=True), "model": DrafterTraits()}
    clock = Clock(traits, ControllerSettings(fixed_length=lambda batch: 4, max_tree_nodes=20))
    seq = clock.sequence(drafter="head")
    object.__setattr__(seq.request, "drafters", ("head",))
    clock.controller.wants_free_drafts([seq])
    assert clock.controller.choose_draft_lengths([seq], {}) == [Budget(20, "head", max_depth=4)]
    object.__setattr__(seq.request, "drafters", ("model",))
    clock.controller.forget(seq)
    clock.controller.wants_free_drafts([seq])
    assert clock.controller.choose_draft_lengths([seq], {}) == [Budget(4, "model")], "it makes chains only"


def test_trees_and_chains_have_separate_prices() -> None:
    clock = Clock({"head": DrafterTraits(makes_trees=True)}, ControllerSettings(max_tree_nodes=64))
    latency = clock.controller.draft_latency
    seq: Sequence = clock.sequence(10_000)

    def observe(draft: Draft, budget: Budget, seconds: float) -> None:
        result = StepResult(ScheduledSequence.of(seq, 1, budget), draft, VerifyResult((), 1), new_tokens=(1,))
        latency.observe([result], 0, seconds, 0.01)

    deep, flat = Draft(tuple(range(12)), (-1,) * 4 + (0,) * 8, "head"), Draft(tuple(range(12)), (-1,) * 12, "head")
    for _ in range(60):
        observe(Draft.chain([1, 2, 3, 4], "head"), Budget(4, "head"), 1e-3)
        observe(Draft.chain([1], "head"), Budget(1, "head"), 0.25e-3)
        observe(deep, Budget(12, "head", max_depth=2), 4e-3)
        observe(flat, Budget(12, "head", max_depth=1), 2e-3)
    chain, tree = (latency.costs_of("head", is_tree).prices(0.01) for is_tree in (False, True))
    assert chain.level + chain.node == pytest.approx(0.25e-3, rel=0.15), "trees are drafted differently"
    assert tree.level == pytest.approx(2e-3, rel=0.2) and tree.node < 1e-4
    clock.controller.observe([], StepTimes(0.0, 0.0))


def test_cpu_costs_lead_to_chains() -> None:
    result = run_adaptive(replace(head(steady(0.6), 0.0006, CPU), requests=24), WITH_TREES)
    late = result.lengths[len(result.lengths) // 2 :]
    assert sum(late) / len(late) < 4


@pytest.mark.parametrize("single_graph", [True, False])
def test_a_single_graph_draft_costs_all_budgeted_levels(single_graph: bool) -> None:
    """Seven budgeted levels of which two are kept cost seven in a single graph, and two otherwise."""
    clock = Clock(
        {"head": DrafterTraits(makes_trees=True, single_graph=single_graph)}, ControllerSettings(max_tree_nodes=64)
    )
    latency, seq = clock.controller.draft_latency, clock.sequence(10_000)
    shallow = Draft(tuple(range(12)), (-1,) * 4 + (0,) * 8, "head")
    for budgeted in (7, 3, 5, 2) * 20:
        levels = budgeted if single_graph else 2
        result = StepResult(
            ScheduledSequence.of(seq, 1, Budget(12, "head", max_depth=budgeted)),
            shallow,
            VerifyResult((), 1),
            new_tokens=(1,),
        )
        latency.observe([result], 0, 1e-3 + levels * 0.5e-3, 0.01)
    costs = latency.costs_of("head", True)
    for levels in (2, 7) if single_graph else (2,):
        assert costs.prices(0.01).seconds(levels, 12) == pytest.approx(1e-3 + levels * 0.5e-3, rel=0.05)
