"""Latency of timed drafters: the best chain length, and the probability at which a chain is cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest

from foretell.control.choice import Choice, DrafterOption, StepCostView, best_choice, min_probability
from foretell.control.latency_model import DraftPrices
from foretell.draft.base import Drafter
from foretell.draft.idle_unload import Background, UnloadableDrafter
from foretell.draft.mix import MergedDrafter
from foretell.draft.model import ModelDrafter
from foretell.draft.model_graph import GraphModelDrafter
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, DrafterTraits, Request, ScheduledSequence, Sequence, StepResult, VerifyResult
from tests.control.test_adaptive import Clock

STEPWISE, SINGLE_GRAPH = (
    DrafterTraits(needs_prefill=True),
    DrafterTraits(needs_prefill=True, single_graph=True, samples_single_graph=False),
)


def cost_view(num_decoding: int = 1, row: float = 0.001) -> StepCostView:
    return StepCostView(num_decoding, num_decoding, [1 + row * (rows - num_decoding) for rows in range(64)])


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.75, 0.9, 0.97])
@pytest.mark.parametrize("row", [0.001, 0.03])
@pytest.mark.parametrize("level", [0.02, 0.2, 0.4])
@pytest.mark.parametrize("start", [0.0, 0.2, 0.5, 1.0, 2.0])
def test_the_best_length_is_found_whatever_the_start_costs(rate: float, row: float, level: float, start: float) -> None:
    """The start may cost so much that one token does not pay and a long chain does."""
    accept_probs = [rate**depth for depth in range(1, 17)]
    lengths = enumerate(accumulate(accept_probs, initial=1.0))
    speedups = [tokens / (1 + row * nodes + start + level * nodes) for nodes, tokens in lengths][1:]
    model = DrafterOption("model", accept_probs, DraftPrices(start, level))
    plan = best_choice(cost_view(row=row), [model], 0.01)
    if max(speedups) <= 1.01:
        assert not plan.nodes
    else:
        assert plan.speedup == pytest.approx(max(speedups)) and plan.nodes == speedups.index(max(speedups)) + 1


def sequence(temperature: float, rule: str = "rejection") -> Sequence:
    params = SamplingParams(temperature=temperature)
    return Sequence(
        0, Request("0", (1,), params, 0, 100, rule=rule, drafters=("model",)), [1, 2], num_computed_tokens=1
    )


def threshold(traits: DrafterTraits, row: float, seq: Sequence) -> float:
    """Return the probability at which a chain of this drafter is cut."""
    latency, view = Clock({"model": traits}).controller.draft_latency, cost_view(row=row)
    choice = Choice("model", 2, 1.5, (0.8, 0.6), 0, latency.costs["model"].prices(view.plain_seconds))
    return min_probability(view, choice, latency.is_single_graph("model", seq))


@pytest.mark.parametrize("row", [0.0, 0.001, 0.03])
def test_a_single_graph_chain_is_cut_for_its_rows_alone(row: float) -> None:
    """Its levels are paid for by then."""
    thresholds = {
        (traits, temperature): threshold(traits, row, sequence(temperature))
        for traits in (STEPWISE, SINGLE_GRAPH)
        for temperature in (0.0, 1.0)
    }
    assert thresholds[SINGLE_GRAPH, 0.0] == pytest.approx(0.7 * row)
    assert thresholds[SINGLE_GRAPH, 1.0] == thresholds[STEPWISE, 1.0] == thresholds[STEPWISE, 0.0] > 0.1
    assert threshold(SINGLE_GRAPH, row, sequence(1.0, "match")) == thresholds[SINGLE_GRAPH, 0.0], (
        "the rule match samples in a single graph, too"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_single_graph_chain_costs_all_its_levels_unless_it_is_sampled(temperature: float) -> None:
    latency = Clock({"model": SINGLE_GRAPH}).controller.draft_latency
    for budgeted, drafted in ((7, 1), (4, 4), (5, 2), (2, 2), (7, 5)) * 20:
        scheduled = ScheduledSequence.of(sequence(temperature), 1, Budget(budgeted, "model"))
        result = StepResult(scheduled, Draft.chain([1] * drafted, "model"), VerifyResult((), 1), new_tokens=(1,))
        latency.observe([result], 0, 1e-3 + (drafted if temperature else budgeted) * 0.5e-3, 0.01)
    for levels in (1, 4, 7):
        found = latency.costs["model"].prices(0.01).seconds(levels, levels)
        assert found == pytest.approx(1e-3 + levels * 0.5e-3, rel=0.1)


class GraphDrafter(Drafter):
    """A drafter with the traits of a single-graph draft model."""

    name = "graph"
    traits = GraphModelDrafter.traits

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [Draft()] * len(seqs)


class NoBackground(Background):
    """Never runs what is scheduled."""

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        pass


def test_wrappers_of_a_drafter_keep_its_traits() -> None:
    graph = GraphModelDrafter.traits
    assert graph.single_graph and not graph.samples_single_graph and not ModelDrafter.traits.single_graph
    drafter = GraphDrafter()
    assert UnloadableDrafter(drafter, GraphDrafter, 60.0, NoBackground()).traits == drafter.traits
    merged = MergedDrafter("graph+graph", (drafter, drafter)).traits
    assert merged.single_graph and not merged.samples_single_graph
