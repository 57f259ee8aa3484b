"""Warm-up of a CUDA device: capture the CUDA graphs and compile the kernels that the first requests need.

Capturing a graph, or creating a library's handles, takes longer than a step; a request should not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from foretell.draft.heads.warmup import (
    CONTEXT,
    SERVING_DEPTHS,
    WarmupDraft,
    warm_up_draft,
    warmup_chains,
    warmup_model_chains,
    warmup_trees,
)
from foretell.runner.cuda.graphs import capture_now
from foretell.runner.cuda.warmup import DummySequences, DummyStep, dummy_chain, dummy_tree
from foretell.runner.executor import StepOutput
from foretell.sampling.sampling import topk
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, ScheduledSequence, Sequence

from .engine import Engine
from .rule_verifier import VerifyCase

LOG = logging.getLogger("foretell")

STARTUP_SECONDS = 2.5  # warm-up before the first request; start-up takes ten, a size 30 ms for a model of 32 layers
REPEATS = 2  # capture, then replay: a graph is uploaded to the device at its first replay
LONG_CONTEXT = 1500  # cached tokens; graphs captured for it serve shorter sequences too
OTHER_CONTEXTS = (700, 3000)  # cached tokens with graphs of their own
PROMPT = 256  # tokens of a prompt that runs in one step; its graphs serve shorter ones too
SHORTER_PROMPTS = (128, 64, 32)  # tokens; captured late, because they only save time
CHAIN_LENGTHS = (1, 3, 4, 7, 9, 15, 16)  # draft tokens; other chains are padded to these
TREE_SIZES = (3, 7, 10, 15, 16, 30, 32, 63)  # nodes; other trees are padded to these
FULL_BATCH = 8  # sequences; graphs captured for it serve smaller batches too
SMALL_BATCHES = (2, 4, FULL_BATCH)
LARGE_BATCHES = (16, 32, 64)  # decoding sequences
PREFILL_LENGTHS = (24, 48, 96, 180, 250)  # tokens a draft model prefills before its first draft; one tiling each
MAX_FAILURES = 3  # failed tasks after which the warm-up ends


class Warmup:
    """Runs warm-up tasks one by one, the most likely needed first: some at start-up, the rest while idle.

    Dummy sequences have pages of their own. They reach no drafter that learns and no cost model. What fails is left to
    the requests themselves.
    """

    def __init__(self, engine: Engine, tasks: Callable[[Warmup], Iterable[Callable[[], None]]]) -> None:
        """`tasks` returns what is to be run, such as `warmup_tasks`."""
        self.engine = engine
        self.dummies = DummySequences(engine.runner)
        self.num_done = 0  # tasks
        self.failures = 0
        self._tasks: Iterator[Callable[[], None]] = iter(tasks(self))

    def run(self, seconds: float = STARTUP_SECONDS) -> None:
        """Run tasks until the time is over."""
        until = perf_counter() + seconds
        while perf_counter() < until and self.run_one():
            pass

    def run_one(self) -> bool:
        """Run one task, in the time of a few steps; return False when none is left."""
        try:
            task = next(self._tasks, None)
            if task is None:
                return False
            with capture_now():
                task()
        except Exception:  # optional work must not stop the engine
            return self._failed()
        self.num_done += 1
        return True

    def _failed(self) -> bool:
        """Return whether to continue: one size may fail where others do not, but not several."""
        self.failures += 1
        if self.failures < MAX_FAILURES:
            LOG.exception("the warm-up of one size failed; the first requests wait for it")
            return True
        LOG.exception("the warm-up failed repeatedly and ends; the first requests wait for the rest")
        self._tasks = iter(())
        return False

    def step(self, step: DummyStep) -> None:
        """Run a step of the target and what follows from its logits."""
        cached = max(0, min(step.cached, self.engine.runner.context - step.num_new_tokens - len(step.draft)))
        with self.dummies.allocate(step.sequences, cached, step.num_new_tokens, len(step.draft)) as seqs:
            scheduled = [ScheduledSequence.of(seq, step.num_new_tokens) for seq in seqs]
            for _ in range(REPEATS if scheduled else 0):
                output = self.engine.runner.forward(scheduled, [step.draft] * len(scheduled))
                self._verify(scheduled, step.draft, output)
            if len(step.draft) > 1 and not step.draft.is_chain:
                for each in scheduled:
                    self.engine.runner.compact_kv(each.seq, each.length - 1, (1, 2)[: len(step.draft) - 1])

    def _verify(self, scheduled: list[ScheduledSequence], draft: Draft, output: StepOutput) -> None:
        """Verify a step greedily and with sampling, and compute the top-k that drafters learn from."""
        for sampled in (False, True):
            rows = [_sampled(each) if sampled else each for each in scheduled]
            cases = [VerifyCase(each, draft, output.logits, i * (1 + len(draft))) for i, each in enumerate(rows)]
            self.engine.verifier.rule_verifier.verify_cases(cases, output.logits, output.argmax)
        if self.engine.safe_drafter.top_k:
            topk(output.logits, self.engine.safe_drafter.top_k)

    def draft(self, name: str, draft: WarmupDraft) -> None:
        """Let the drafter of this name draft, if the engine has one that is loaded."""
        mix = self.engine.drafter
        if mix.is_loaded(name):
            warm_up_draft(mix.drafters[name], self.dummies, draft, REPEATS, mix.kv_update(name))


def _sampled(scheduled: ScheduledSequence) -> ScheduledSequence:
    """Return a copy whose request samples at temperature 1."""
    seq = scheduled.seq
    request = replace(seq.request, params=SamplingParams(temperature=1.0))
    return replace(scheduled, seq=Sequence(seq.id, request, seq.tokens, seq.num_computed_tokens, seq.pages))


def warmup_tasks(warmup: Warmup, names: Container[str], max_draft: int, max_tree: int) -> Iterator[Callable[[], None]]:
    """Yield warm-up tasks for the drafters `names`, with chains of up to `max_draft` and trees of up to `max_tree`.

    The most likely needed come first: a prompt, one sequence, the drafts of slow drafters for it (greedy, then sampled)
    and steps with drafts of all sizes; then graphs that serve longer sequences and batches; last, graphs of exact sizes
    that only save time.
    """
    mix = warmup.engine.drafter
    traits = {name: drafter.traits for name, drafter in mix.drafters.items()}
    # Free drafters run on the host, and the parts of a merged drafter are warmed up under their own names.
    slow = [name for name, own in traits.items() if name in names and not own.is_free and name not in mix.merged]
    growing = [name for name in slow if traits[name].makes_trees]
    readers = [name for name in slow if traits[name].needs_prefill]
    others = [name for name in slow if name not in readers]
    shapes = (
        (warmup_chains(max_draft), others),
        (warmup_model_chains(max_draft), readers),
        (warmup_trees(max_tree, max_draft), growing),
    )
    serving = {*SERVING_DEPTHS, max_draft}
    max_nodes = max(max_draft, max_tree if growing else 0)
    max_num_seqs = warmup.engine.scheduler.max_num_seqs

    def drafts(depths: Container[int] | None = None, **changes: Any) -> Iterator[Callable[[], None]]:
        for several, drafter_names in shapes:
            some = (replace(each, **changes) for each in several if depths is None or each.budget.depth in depths)
            yield from (partial(warmup.draft, name, each) for each in some for name in drafter_names)

    def steps(several: Iterable[DummyStep]) -> Iterator[Callable[[], None]]:
        return (partial(warmup.step, each) for each in several)

    yield from steps((DummyStep(cached=0, num_new_tokens=PROMPT), DummyStep(cached=CONTEXT)))
    yield from drafts()
    prefills = [WarmupDraft(Budget(min(2, max_draft)), cached=cached) for cached in PREFILL_LENGTHS]
    yield from (partial(warmup.draft, name, each) for each in prefills for name in readers if max_draft)
    yield from steps(_steps_with_drafts(max_draft, max_nodes, CONTEXT))
    yield from drafts(temperature=1.0)
    few_sizes = _steps_with_drafts(max_draft, max_nodes, LONG_CONTEXT, (7,), (15, 30))
    yield from steps((DummyStep(cached=LONG_CONTEXT), *few_sizes))
    for temperature in (0.0, 1.0):
        yield from drafts(serving, cached=LONG_CONTEXT, temperature=temperature)
    if (batch := min(FULL_BATCH, max_num_seqs)) > 1:
        yield from steps(DummyStep(size, CONTEXT) for size in SMALL_BATCHES if size <= batch)
        shared = (
            (dummy_chain(3), dummy_tree(7), dummy_tree(11), dummy_tree(31)) if max_draft else ()
        )  # 32, 64, 96 and 256 rows in a batch of 8
        yield from steps(DummyStep(batch, LONG_CONTEXT, draft=each) for each in (dummy_chain(0), *shared))
        yield from steps((DummyStep(batch, cached=0, num_new_tokens=PROMPT // batch),))
        for temperature in (0.0, 1.0):
            yield from drafts(serving, cached=LONG_CONTEXT, num_seqs=batch, temperature=temperature)
    yield from steps(DummyStep(cached=0, num_new_tokens=take) for take in SHORTER_PROMPTS)
    large = [size for size in LARGE_BATCHES if size <= max_num_seqs]
    contexts = (CONTEXT, *OTHER_CONTEXTS[:1], LONG_CONTEXT)
    yield from steps(DummyStep(size, cached) for size in large for cached in contexts)
    for cached in (*OTHER_CONTEXTS, LONG_CONTEXT):
        yield from steps((DummyStep(cached=cached), *_steps_with_drafts(max_draft, max_nodes, cached)))
        yield from drafts(cached=cached)
        yield from drafts(cached=cached, temperature=1.0)


def _steps_with_drafts(
    max_draft: int,
    max_nodes: int,
    cached: int,
    chain_lengths: tuple[int, ...] = CHAIN_LENGTHS,
    tree_sizes: tuple[int, ...] = TREE_SIZES,
) -> Iterator[DummyStep]:
    """Yield steps of one sequence with chains and trees, smaller ones first.

    The last two serve all other sizes: the largest tree, and one that exceeds it by a node, as exploration does.
    """
    yield from (DummyStep(cached=cached, draft=dummy_chain(count)) for count in chain_lengths if count <= max_draft)
    yield from (DummyStep(cached=cached, draft=dummy_tree(count)) for count in tree_sizes if count < max_nodes)
    if max_draft:
        yield from (DummyStep(cached=cached, draft=dummy_tree(count)) for count in (max_nodes, max_nodes + 1))
