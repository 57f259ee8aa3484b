"""What is done before the first request: it covers that request, and nobody can tell that it was."""

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
from foretell.draft.heads.warmup import chains, model_chains
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
from tests.recordings import Filled, MadeUpSteps, make_up, play
from tests.tiny import CONFIG, HEADS, PROMPTS, VOCAB, OwnHead, World, add, generate, run, tiny_decoder

CONTEXT, NODES = 2048, 16


def pieces(rehearsal: Warmup, names: tuple[str, ...] = ()) -> Iterable[Callable[[], None]]:
    return warmup_tasks(rehearsal, names, NODES, 64)


def long_engine(drafter: Drafter, device: str = "cpu") -> Engine:
    """One whose texts are long enough for all that is rehearsed."""
    model = tiny_decoder(config=replace(CONFIG, context=CONTEXT)).to(device)
    runner = ModelRunner(model, 2 * CONTEXT // 16, 16, CONTEXT)
    return Engine(runner, drafter, FixedController(NODES), Scheduler(runner, None, 4, CONTEXT))


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_no_text_can_tell_that_it_was(config: HeadConfig) -> None:
    world = World(pages=128)
    truth = generate(OwnHead(config, whole=True), world)
    engine = world.engine(drafter := OwnHead(config, whole=True))
    drafter.grows = True
    some = partial(pieces, names=(drafter.name,))
    rehearsal = Warmup(engine, lambda rehearsal: islice(some(rehearsal), 0, None, 9))  # of each kind one
    while rehearsal.run_one():
        pass
    head = drafter.inner
    assert rehearsal.num_done and engine.runner.pool.num_held == engine.stats.forwards == 0
    assert isinstance(head, HeadDrafter) and head._whole_reader is not None and not head._trails
    tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    run(engine)
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_head_has_recorded_drafts_of_all_depths_and_all_readings(config: HeadConfig) -> None:
    engine = World(pages=128).engine(drafter := OwnHead(config, whole=True))
    head = drafter.inner
    assert isinstance(head, HeadDrafter) and head._whole_reader is not None
    drafter.grows = True
    engine.runner.executor = MadeUpSteps(VOCAB, CONFIG.width, Random(0))
    play(engine, head)
    drafts, readings = (recorder.graphs for recorder in make_up(head, VOCAB))
    Warmup(engine, partial(pieces, names=(drafter.name,))).run(60)
    assert None not in [*drafts.values(), *readings.values()]
    depths = {min(each.budget.depth, head.deepest) for each in chains(NODES)}
    for drawn in (False, True):
        assert {each.depth for each in drafts if each.sampled == drawn and not each.width} >= depths
        assert any(each.width for each in drafts if each.sampled == drawn)
    assert {each.rows for each in readings} >= {1, 2, 4, 8, 16, 128}


class Chaining(Executor):
    """An executor that notes which chains it was asked for, and makes them up."""

    supports_draft_chain = True

    def __init__(self, inner: Executor, share: int) -> None:
        self.inner, self.share, self.asked = inner, share, Counter[ChainShape]()

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        return self.inner.forward(packed, taps)

    def chain(self, packed: BatchLayout, steps: int, vocab: int, draws: SamplingBatch | None) -> PendingChains:
        first, _ = step_shape(packed, self.share)
        self.asked[chain_shape(packed, first, self.share, steps, vocab, draws is not None)] += 1
        texts = len(packed.spans)
        return PendingChains(torch.zeros(2, steps, texts), steps, texts, lambda: None)


def test_a_draft_model_has_made_chains_of_all_depths_greedy_and_drawn() -> None:
    helper = ModelRunner(tiny_decoder(config=replace(CONFIG, context=CONTEXT)), 2 * CONTEXT // 16, 16, CONTEXT)
    made_up = MadeUpSteps(VOCAB, CONFIG.width, Random(0))
    helper.executor = executor = Chaining(made_up, helper.layout.queries_per_kv_head)
    engine = long_engine(GraphModelDrafter(helper, VOCAB, "model"))
    engine.runner.executor = made_up
    Warmup(engine, partial(pieces, names=("model",))).run(60)
    greedy, drawn = (
        {replace(each, sampled=False) for each in executor.asked if each.sampled is way} for way in (False, True)
    )
    assert {each.steps for each in greedy} == {each.budget.depth for each in model_chains(NODES)} and drawn == greedy
    assert helper.pool.num_held == 0


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_draft_model_that_is_asked_now_and_then_waits_for_no_recording(heat: float) -> None:
    """Others guess meanwhile, and the text goes on by any number of tokens before it is asked again."""
    helper = ModelRunner(tiny_decoder(config=replace(CONFIG, context=CONTEXT)), 2 * CONTEXT // 16, 16, CONTEXT)
    made_up = MadeUpSteps(VOCAB, CONFIG.width, Random(0))
    helper.executor = executor = Chaining(made_up, helper.layout.queries_per_kv_head)
    engine = long_engine(drafter := GraphModelDrafter(helper, VOCAB, "model"))
    engine.runner.executor = made_up
    Warmup(engine, partial(pieces, names=("model",))).run(60)
    recorded = set(executor.asked)
    executor.asked.clear()
    request = Request("0", (1,) * 40, SamplingParams(temperature=heat), 0, 400, rule="match", drafters=("model",))
    seq = Sequence(0, request, [1] * 40)
    for behind in range(1, 24):
        for depth in range(1, NODES + 1):
            seq.tokens += [1 + (behind + depth) % 30] * behind
            if len(seq.tokens) > 400:
                drafter.forget(seq)
                del seq.tokens[40:]
            drafter.propose([seq], [Budget(depth, "model")])
    assert len(executor.asked) > 3
    for sizes in executor.asked:
        served = [each.steps for each in recorded if each.covers(sizes)]
        assert served and min(served) <= max(8, 1.34 * sizes.steps), sizes


def of_all_sizes(seq: Sequence, budget: Budget) -> Draft:
    nodes = 1 + seq.num_output_tokens % NODES
    make = (dummy_chain, dummy_tree, dummy_long_tree)[seq.num_output_tokens // NODES % 3] if nodes > 1 else dummy_chain
    return replace(make(nodes), tokens=tuple(range(nodes)))  # siblings of one token would not be run


def write(engine: Engine, prompt: int) -> None:
    """A text of 64 tokens behind a prompt of so many."""
    maker = RequestBuilder(RequestLimits(CONTEXT, frozenset(), VOCAB), None, engine.drafter)
    params = SamplingParams(max_tokens=64, temperature=0.0, seed=0)
    (request,) = maker.make("0", [1 + i % 30 for i in range(prompt)], params)
    engine.add(request)
    run(engine)


@pytest.mark.parametrize("prompt", [256, 200, 40, 20])
def test_a_first_request_records_nothing(prompt: int) -> None:
    engine = long_engine(ScriptedDrafter(of_all_sizes))
    tape = play(engine)
    Warmup(engine, pieces).run(60)
    executor, recorded = engine.runner.executor, tape.count
    assert isinstance(executor, Filled) and recorded
    executor.asked.clear()
    write(engine, prompt)
    assert len(executor.asked) > 8 and tape.count == recorded


def test_who_learns_hears_nothing_of_it_and_a_stranger_is_not_asked() -> None:
    def refuse(seq: Sequence, budget: Budget) -> Draft:
        raise AssertionError("nobody named it")

    recycle = TokenRecyclingDrafter()
    engine = long_engine(MixDrafter([recycle, ScriptedDrafter(refuse)]))
    rehearsal = Warmup(engine, partial(pieces, names=("recycle",)))
    while rehearsal.run_one():
        pass
    assert rehearsal.num_done > 60 and recycle.memory == engine.stats.forwards == engine.runner.pool.num_held == 0


def test_it_ends_with_its_time_and_goes_on_when_nobody_waits() -> None:
    done: list[int] = []
    rehearsal = Warmup(long_engine(TokenRecyclingDrafter()), lambda _: (partial(done.append, i) for i in range(3)))
    rehearsal.run(0)
    assert not done
    assert rehearsal.run_one() and done == [0]
    rehearsal.run(60)
    assert done == [0, 1, 2] and rehearsal.num_done == 3 and not rehearsal.run_one()


def test_what_fails_is_left_to_the_requests(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("planted")

    done: list[int] = []
    pieces = [fails, partial(done.append, 1), *[fails] * (MAX_FAILURES - 1), partial(done.append, 2)]
    rehearsal = Warmup(long_engine(TokenRecyclingDrafter()), lambda _: pieces)
    with caplog.at_level(logging.ERROR):
        rehearsal.run(60)
    assert done == [1] and rehearsal.num_done == 1 and not rehearsal.run_one()
    assert caplog.text.count("the first requests wait") == MAX_FAILURES


def test_pages_come_back_from_a_step_that_fails() -> None:
    engine = long_engine(TokenRecyclingDrafter())

    tried: list[BatchLayout] = []

    def fails(packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        tried.append(packed)
        raise RuntimeError("planted")

    engine.runner.executor.forward = fails  # type: ignore[method-assign]
    Warmup(engine, pieces).run(60)
    assert tried and engine.runner.pool.num_held == 0
