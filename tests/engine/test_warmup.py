"""The warm-up covers the first request and leaves no trace in engine or drafters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from random import Random

import pytest
import torch

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.warmup import warmup_chains, warmup_model_chains
from foretell.draft.mix import MixDrafter
from foretell.draft.model_graph import GraphModelDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.engine.warmup import MAX_FAILURES, Warmup, warmup_tasks
from foretell.models.draft_heads import HeadConfig
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.cuda.graph_shapes import ChainShape, chain_shape, step_shape
from foretell.runner.cuda.warmup import dummy_chain, dummy_long_tree, dummy_tree
from foretell.runner.executor import Executor, PendingChains, StepOutput
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.cuda_sampler import SamplingBatch
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, Sequence
from tests.fake_graphs import PaddedExecutor, RandomExecutor, use_fake_graphs, use_random_drafts
from tests.tiny import CONFIG, PROMPTS, VOCAB, WITH_CACHE, OwnHead, World, add, generate, run, tiny_decoder

CONTEXT, NODES = 2048, 16


def tasks(warmup: Warmup, names: tuple[str, ...] = ()) -> Iterable[Callable[[], None]]:
    return warmup_tasks(warmup, names, NODES, 64)


def long_engine(drafter: Drafter, device: str = "cpu") -> Engine:
    """Return an engine whose context is long enough for all warm-up tasks."""
    model = tiny_decoder(config=replace(CONFIG, context=CONTEXT)).to(device)
    runner = ModelRunner(model, 2 * CONTEXT // 16, 16, CONTEXT)
    return Engine(runner, drafter, FixedController(NODES), Scheduler(runner, None, 4, CONTEXT))


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_the_warmup_changes_no_output(config: HeadConfig) -> None:
    world = World(pages=128)
    truth = generate(OwnHead(config, single_graph=True), world)
    engine = world.engine(drafter := OwnHead(config, single_graph=True))
    drafter.traits = replace(drafter.traits, makes_trees=True)
    some = partial(tasks, names=(drafter.name,))
    warmup = Warmup(engine, lambda warmup: islice(some(warmup), 0, None, 9))  # one of each kind
    while warmup.run_one():
        pass
    head = drafter.inner
    assert warmup.num_done and engine.runner.pool.num_held == engine.stats.forwards == 0
    assert isinstance(head, HeadDrafter) and head._graph_prefill is not None and not head._pending
    states = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    run(engine)
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_drafts_of_all_depths_and_prefills_of_a_head_are_captured(config: HeadConfig) -> None:
    engine = World(pages=128).engine(drafter := OwnHead(config, single_graph=True))
    head = drafter.inner
    assert isinstance(head, HeadDrafter) and head._graph_prefill is not None
    drafter.traits = replace(drafter.traits, makes_trees=True)
    engine.runner.executor = RandomExecutor(VOCAB, CONFIG.width, Random(0))
    use_fake_graphs(engine, head)
    drafts, prefills = (recorder.graphs for recorder in use_random_drafts(head, VOCAB))
    Warmup(engine, partial(tasks, names=(drafter.name,))).run(60)
    assert None not in [*drafts.values(), *prefills.values()]
    depths = {min(each.budget.depth, head.max_depth) for each in warmup_chains(NODES)}
    for sampled in (False, True):
        assert {each.depth for each in drafts if each.sampled == sampled and not each.width} >= depths
        assert any(each.width for each in drafts if each.sampled == sampled)
    assert {each.rows for each in prefills} >= {1, 2, 4, 8, 16, 128}


class ChainExecutor(Executor):
    """An executor that records the sizes of draft chains and returns dummy ones."""

    supports_draft_chain = True

    def __init__(self, inner: Executor, share: int) -> None:
        self.inner, self.share, self.asked = inner, share, Counter[ChainShape]()

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        return self.inner.forward(packed, taps)

    def draft_chain(self, packed: BatchLayout, steps: int, vocab: int, draws: SamplingBatch | None) -> PendingChains:
        first, _ = step_shape(packed, self.share)
        self.asked[chain_shape(packed, first, self.share, steps, vocab, draws is not None)] += 1
        batch_size = len(packed.spans)
        return PendingChains(torch.zeros(2, steps, batch_size), steps, batch_size, lambda: None)


def test_a_draft_model_has_chains_of_all_depths_greedy_and_sampled() -> None:
    draft_runner = ModelRunner(tiny_decoder(config=replace(CONFIG, context=CONTEXT)), 2 * CONTEXT // 16, 16, CONTEXT)
    dummy_steps = RandomExecutor(VOCAB, CONFIG.width, Random(0))
    draft_runner.executor = executor = ChainExecutor(dummy_steps, draft_runner.layout.queries_per_kv_head)
    engine = long_engine(GraphModelDrafter(draft_runner, VOCAB, "model"))
    engine.runner.executor = dummy_steps
    Warmup(engine, partial(tasks, names=("model",))).run(60)
    greedy, sampled = (
        {replace(each, sampled=False) for each in executor.asked if each.sampled is mode} for mode in (False, True)
    )
    assert {each.steps for each in greedy} == {
        each.budget.depth for each in warmup_model_chains(NODES)
    } and sampled == greedy
    assert draft_runner.pool.num_held == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_used_irregularly_waits_for_no_capture(temperature: float) -> None:
    """Other drafters draft in between, so that it has to prefill any number of tokens before it drafts again."""
    draft_runner = ModelRunner(tiny_decoder(config=replace(CONFIG, context=CONTEXT)), 2 * CONTEXT // 16, 16, CONTEXT)
    dummy_steps = RandomExecutor(VOCAB, CONFIG.width, Random(0))
    draft_runner.executor = executor = ChainExecutor(dummy_steps, draft_runner.layout.queries_per_kv_head)
    engine = long_engine(drafter := GraphModelDrafter(draft_runner, VOCAB, "model"))
    engine.runner.executor = dummy_steps
    Warmup(engine, partial(tasks, names=("model",))).run(60)
    captured = set(executor.asked)
    executor.asked.clear()
    request = Request(
        "0", (1,) * 40, SamplingParams(temperature=temperature), 0, 400, rule="match", drafters=("model",)
    )
    seq = Sequence(0, request, [1] * 40)
    for lag in range(1, 24):
        for depth in range(1, NODES + 1):
            seq.tokens += [1 + (lag + depth) % 30] * lag
            if len(seq.tokens) > 400:
                drafter.forget(seq)
                del seq.tokens[40:]
            drafter.propose([seq], [Budget(depth, "model")])
    assert len(executor.asked) > 3
    for sizes in executor.asked:
        served = [each.steps for each in captured if each.covers(sizes)]
        assert served and min(served) <= max(8, 1.34 * sizes.steps), sizes


def of_all_sizes(seq: Sequence, budget: Budget) -> Draft:
    nodes = 1 + seq.num_output_tokens % NODES
    make = (dummy_chain, dummy_tree, dummy_long_tree)[seq.num_output_tokens // NODES % 3] if nodes > 1 else dummy_chain
    return replace(make(nodes), tokens=tuple(range(nodes)))  # equal siblings would be merged


def generate_after(engine: Engine, prompt_length: int) -> None:
    """Generate 64 tokens for a prompt of this length."""
    maker = RequestBuilder(RequestLimits(CONTEXT, frozenset(), VOCAB), None, engine.drafter)
    params = SamplingParams(max_tokens=64, temperature=0.0, seed=0)
    (request,) = maker.make("0", [1 + i % 30 for i in range(prompt_length)], params)
    engine.add(request)
    run(engine)


@pytest.mark.parametrize("prompt_length", [256, 200, 40, 20])
def test_the_first_request_captures_nothing(prompt_length: int) -> None:
    engine = long_engine(ScriptedDrafter(of_all_sizes))
    tape = use_fake_graphs(engine)
    Warmup(engine, tasks).run(60)
    executor, captured = engine.runner.executor, tape.count
    assert isinstance(executor, PaddedExecutor) and captured
    executor.asked.clear()
    generate_after(engine, prompt_length)
    assert len(executor.asked) > 8 and tape.count == captured


def test_learning_drafters_see_nothing_and_unnamed_drafters_are_not_called() -> None:
    def refuse(seq: Sequence, budget: Budget) -> Draft:
        raise AssertionError("it was not named")

    recycle = TokenRecyclingDrafter()
    engine = long_engine(MixDrafter([recycle, ScriptedDrafter(refuse)]))
    warmup = Warmup(engine, partial(tasks, names=("recycle",)))
    while warmup.run_one():
        pass
    assert warmup.num_done > 60 and recycle.memory == engine.stats.forwards == engine.runner.pool.num_held == 0


def test_it_stops_at_its_time_limit_and_continues_while_idle() -> None:
    done: list[int] = []
    warmup = Warmup(long_engine(TokenRecyclingDrafter()), lambda _: (partial(done.append, i) for i in range(3)))
    warmup.run(0)
    assert not done
    assert warmup.run_one() and done == [0]
    warmup.run(60)
    assert done == [0, 1, 2] and warmup.num_done == 3 and not warmup.run_one()


def test_what_fails_is_left_to_the_requests(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("planted")

    done: list[int] = []
    some_tasks = [fails, partial(done.append, 1), *[fails] * (MAX_FAILURES - 1), partial(done.append, 2)]
    warmup = Warmup(long_engine(TokenRecyclingDrafter()), lambda _: some_tasks)
    with caplog.at_level(logging.ERROR):
        warmup.run(60)
    assert done == [1] and warmup.num_done == 1 and not warmup.run_one()
    assert caplog.text.count("the first requests wait") == MAX_FAILURES


def test_a_failed_step_frees_its_pages() -> None:
    engine = long_engine(TokenRecyclingDrafter())

    tried: list[BatchLayout] = []

    def fails(packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        tried.append(packed)
        raise RuntimeError("planted")

    engine.runner.executor.forward = fails  # type: ignore[method-assign]
    Warmup(engine, tasks).run(60)
    assert tried and engine.runner.pool.num_held == 0
