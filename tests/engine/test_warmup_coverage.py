"""After the warm-up no request waits for a CUDA graph capture, whatever the controller drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from foretell.control.acceptance_model import WIDTHS
from foretell.control.adaptive import AdaptiveController
from foretell.control.controller import Controller, FreeDrafts
from foretell.control.latency_model import CostPrior, StepCosts
from foretell.control.settings import MAX_TREE_ROWS, ControllerSettings
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.engine.warmup import Warmup, warmup_tasks
from foretell.models.draft_heads import TargetWeights
from foretell.runner.cuda.graph_shapes import CAPTURE_ROWS
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, DrafterTraits, Sequence, StepResult, StepTimes
from tests.fake_graphs import FakeCapture, RandomExecutor, use_fake_graphs, use_random_drafts
from tests.tiny import CONFIG, HEADS, VOCAB, OwnHead, run, tiny_decoder

CONTEXT, LONGEST, NODES = 2048, 16, 64


class RandomBudgets(Controller):
    """Chooses all budgets that an adaptive controller may choose, in random order."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.asked: set[tuple[int, int]] = set()

    def choose_draft_lengths(self, seqs: list[Sequence], offers: FreeDrafts) -> list[Budget]:
        return [self._budget(seq, min(NODES, MAX_TREE_ROWS // len(seqs))) for seq in seqs]

    def _budget(self, seq: Sequence, most: int) -> Budget:
        longest = min(LONGEST, seq.remaining_tokens - 1)
        if not seq.is_decoding or longest < 1:
            return Budget()
        wide, farther = self.rng.choice((1, *WIDTHS)), self.rng.randrange(2)
        depth = self.rng.randint(1, max(1, min(longest - farther, most // wide)))
        levels = min(longest, depth + farther)
        budget = Budget(
            wide * depth + farther, "eagle", self.rng.choice((0.0, 0.01, 0.1)), max_depth=levels if wide > 1 else 0
        )
        budget = budget if wide > 1 else replace(budget, nodes=levels)
        if budget.is_tree and most == NODES and self.rng.random() < 0.5:  # a step of one sequence is padded
            padded = next(size for size in CAPTURE_ROWS if size > budget.nodes) - 1
            budget = replace(budget, nodes=min(NODES, padded))
        self.asked.add((budget.nodes, budget.max_depth))
        return budget


class Priced(AdaptiveController):
    """An adaptive controller that observes the step and draft times of a large model on a GPU."""

    asked: set[tuple[int, int]]

    def observe(self, results: list[StepResult], times: StepTimes) -> None:
        assert not times.is_outlier
        rows = sum(result.scheduled.num_new_tokens + len(result.draft) for result in results)
        budgets = [result.scheduled.budget for result in results]
        self.asked |= {(budget.nodes, budget.max_depth) for budget in budgets}
        proposing = 4e-4 + 2e-4 * max(budget.depth for budget in budgets)
        super().observe(results, StepTimes(proposing, 3.5e-3 * (1 + 0.004 * rows), proposing))


def adaptive() -> Priced:
    drafters = {"eagle": DrafterTraits(relative_cost=0.1, prior_acceptance=0.9, makes_trees=True)}
    found = Priced(
        drafters,
        ControllerSettings(max_draft_tokens=LONGEST, max_tree_nodes=NODES),
        StepCosts(CostPrior(row=0.002), CAPTURE_ROWS),
        clock=lambda: 0.0,  # real host times have nothing to do with those step times
    )
    found.asked = set()
    return found


@pytest.fixture(scope="module")
def warmed_up() -> tuple[Engine, FakeCapture]:
    model = tiny_decoder(config=replace(CONFIG, context=CONTEXT))
    drafter, lender = OwnHead(HEADS["eagle"], single_graph=True), TargetWeights.of(model)
    runner = ModelRunner(model, 8 * CONTEXT // 16, 16, CONTEXT, drafter.traits.hidden_layers, drafter.head_layer_shapes)
    drafter.bind(runner, lender, CONFIG.layers)
    head: Any = drafter.inner
    head.head.prepare(CONTEXT)
    engine = Engine(runner, head, RandomBudgets(), Scheduler(runner, None, 8, 512))
    runner.executor = RandomExecutor(VOCAB, CONFIG.width, random.Random(0))
    tape = use_fake_graphs(engine, head)
    use_random_drafts(head, VOCAB)
    warmup = Warmup(engine, partial(warmup_tasks, names=("eagle",), max_draft=LONGEST, max_tree=NODES))
    while warmup.run_one():
        pass
    assert warmup.num_done and engine.runner.pool.num_held == 0
    return engine, tape


def generate(engine: Engine, prompt_lengths: list[int], temperature: float, tokens: int = 40) -> None:
    """Generate for prompts of these lengths in one batch."""
    maker = RequestBuilder(RequestLimits(CONTEXT, frozenset(), VOCAB), None, engine.drafter)
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=0, ignore_eos=True)
    for number, length in enumerate(prompt_lengths):
        (request,) = maker.make(str(number), [1 + (i * i + number) % 30 for i in range(length)], params)
        engine.add(request)
    run(engine)


BATCHES = {
    "one sequence": [[256], [30], [490], [1000], [1900]],
    "several": [[100, 300], [20, 100, 700, 90, 600], [64] * 8],
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_random_budgets_capture_nothing(
    batches: list[list[int]], temperature: float, warmed_up: tuple[Engine, FakeCapture]
) -> None:
    engine, tape = warmed_up
    engine.controller, before = (controller := RandomBudgets()), tape.count
    for prompts in batches:
        generate(engine, prompts, temperature)
    assert tape.count == before and len(controller.asked) > 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_adaptive_controller_captures_nothing(temperature: float, warmed_up: tuple[Engine, FakeCapture]) -> None:
    engine, tape = warmed_up
    engine.controller, before = (controller := adaptive()), tape.count
    for prompt in (256, 40, 700):
        generate(engine, [prompt], temperature)
    assert tape.count == before and any(levels for _, levels in controller.asked), "it chose trees"


def test_a_step_that_captures_a_graph_is_an_outlier(warmed_up: tuple[Engine, FakeCapture]) -> None:
    class Recording(RandomBudgets):
        outliers: list[bool]

        def observe(self, results: list[StepResult], times: StepTimes) -> None:
            self.outliers.append(times.is_outlier)

    engine, tape = warmed_up
    executor: Any = engine.runner.executor
    engine.controller, before = (controller := Recording()), executor.recorder
    controller.outliers, executor.recorder = [], tape.recorder()
    try:
        generate(engine, [200], 0.0)
    finally:
        executor.recorder = before
    assert controller.outliers[:2] == [True, True] and not controller.outliers[-1]
