"""Chains of drafters that take time: how long they are planned, and where they may be cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest

from foretell.control.length_optimizer import DrafterOption, StepCostView, best_plan
from foretell.draft.base import Drafter
from foretell.draft.idle_unload import Background, UnloadableDrafter
from foretell.draft.mix import MergedDrafter
from foretell.draft.model import ModelDrafter
from foretell.draft.model_graph import GraphModelDrafter
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, DrafterTraits, Request, ScheduledSequence, Sequence, StepResult, VerifyResult
from tests.control.test_adaptive import Clock

STEPWISE, WHOLE = (
    DrafterTraits(needs_prefill=True),
    DrafterTraits(needs_prefill=True, single_graph=True, samples_single_graph=False),
)


def market(writers: int = 1, row: float = 0.001) -> StepCostView:
    return StepCostView(writers, writers, [1 + row * (rows - writers) for rows in range(64)])


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.75, 0.9, 0.97])
@pytest.mark.parametrize("row", [0.001, 0.03])
@pytest.mark.parametrize("level", [0.02, 0.2, 0.4])
@pytest.mark.parametrize("start", [0.0, 0.2, 0.5, 1.0, 2.0])
def test_the_best_length_is_found_whatever_it_costs_to_begin(
    rate: float, row: float, level: float, start: float
) -> None:
    """To begin may cost so much that a chain of one node is hopeless, and a long one is not."""
    survival = [rate**depth for depth in range(1, 17)]
    lengths = enumerate(accumulate(survival, initial=1.0))
    gains = [tokens / (1 + row * nodes + start + level * nodes) for nodes, tokens in lengths][1:]
    model = DrafterOption("model", survival, lambda nodes, depth: start + level * depth)
    plan = best_plan(market(row=row), [model], 0.01)
    if max(gains) <= 1.01:
        assert not plan.nodes
    else:
        assert plan.gain == pytest.approx(max(gains)) and plan.nodes == gains.index(max(gains)) + 1


def text(temperature: float, rule: str = "rejection") -> Sequence:
    params = SamplingParams(temperature=temperature)
    return Sequence(0, Request("0", (1,), params, 0, 100, rule=rule, drafters=("model",)), [1, 2], cached=1)


@pytest.mark.parametrize("row", [0.0, 0.001, 0.03])
def test_what_is_made_whole_is_cut_for_its_rows_alone(row: float) -> None:
    """Its levels are paid for by then, and a guess that is left out tells nothing of how often such guesses stand."""
    floors = {
        (traits, heat): Clock({"model": traits}).controller.drafting.floor(market(row=row), text(heat), "model")
        for traits in (STEPWISE, WHOLE)
        for heat in (0.0, 1.0)
    }
    assert floors[WHOLE, 0.0] == pytest.approx(0.7 * row)
    assert floors[WHOLE, 1.0] == floors[STEPWISE, 1.0] == floors[STEPWISE, 0.0] > 0.1
    drafting = Clock({"model": WHOLE}).controller.drafting
    assert drafting.floor(market(row=row), text(1.0, "match"), "model") == floors[WHOLE, 0.0], "drawn in one go, too"


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_chain_that_is_made_whole_unless_it_is_drawn_costs_what_was_made(heat: float) -> None:
    drafting = Clock({"model": WHOLE}).controller.drafting
    for asked, kept in ((7, 1), (4, 4), (5, 2), (2, 2), (7, 5)) * 20:
        share = ScheduledSequence.of(text(heat), 1, Budget(asked, "model"))
        outcome = StepResult(share, Draft.chain([1] * kept, "model"), VerifyResult((), 1), new_tokens=(1,))
        drafting.observe([outcome], 1e-3 + (kept if heat else asked) * 0.5e-3, 0.01)
    for levels in (1, 4, 7):
        found = drafting.costs["model"].seconds(levels, levels, 0, 0.01)
        assert found == pytest.approx(1e-3 + levels * 0.5e-3, rel=0.1)


class Chained(Drafter):
    """Traits and nothing else."""

    name = "chained"
    traits = GraphModelDrafter.traits

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [Draft()] * len(seqs)


class Nobody(Background):
    """Does nothing of what it is given."""

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        pass


def test_whoever_stands_before_a_drafter_says_how_it_makes_its_drafts() -> None:
    graph = GraphModelDrafter.traits
    assert graph.single_graph and not graph.samples_single_graph and not ModelDrafter.traits.single_graph
    chained = Chained()
    assert UnloadableDrafter(chained, Chained, 60.0, Nobody()).traits == chained.traits
    merged = MergedDrafter("chained+chained", (chained, chained)).traits
    assert merged.single_graph and not merged.samples_single_graph
