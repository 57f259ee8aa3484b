"""Warm-up on a CUDA device: dummy steps that compile kernels while weights load, and dummy sequences with pages.

`engine/warmup.py` captures CUDA graphs with the latter before the first request.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Event, Thread
from time import perf_counter
from typing import Protocol

import torch

from foretell.kv.cache import LayerShape
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.runner.cuda.graphs import no_capture
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.cuda_sampler import SamplingBatch
from foretell.sampling.sampling import SamplingRow, sample
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence

LOG = logging.getLogger("foretell")
HEAD_GRACE = 1.0  # seconds that draft heads may warm up after the load: each depth and width compiles its own kernels
# Value of all dummy weights. Uninitialized memory might hold NaN, and the argmax of NaN is no token.
DUMMY_WEIGHT = 0.01


@dataclass(frozen=True)
class DummyStep:
    """A step of dummy sequences, which all have the same length and the same draft."""

    sequences: int = 1
    cached: int = 20  # tokens in the KV cache
    num_new_tokens: int = 1
    draft: Draft = Draft()

    @property
    def length(self) -> int:
        """Return the tokens of a sequence, its draft included."""
        return self.cached + self.num_new_tokens + len(self.draft)


def dummy_chain(nodes: int) -> Draft:
    """Return a chain of dummy draft tokens."""
    return Draft.chain([0] * nodes)


def dummy_tree(nodes: int) -> Draft:
    """Return a binary tree of dummy draft tokens with two roots, as shallow as the trees of draft heads."""
    return Draft((0,) * nodes, tuple(node // 2 - 1 for node in range(nodes)))


def dummy_long_tree(nodes: int) -> Draft:
    """Return a chain of dummy draft tokens with a second root."""
    return Draft((0,) * nodes, (*range(-1, nodes - 2), -1))


# One step for each choice of kernels that early requests need: they differ in rows, in context length and in trees.
PLAIN_STEPS = (
    DummyStep(),
    DummyStep(cached=0, num_new_tokens=256),
    DummyStep(cached=0, num_new_tokens=600),
    DummyStep(sequences=2),
    DummyStep(sequences=16),
    DummyStep(sequences=64),
    DummyStep(sequences=64, cached=700),
    DummyStep(cached=700),
    DummyStep(cached=2000),
    DummyStep(cached=3000),
)
DRAFT_STEPS = (
    *(DummyStep(draft=dummy_chain(nodes)) for nodes in (1, 3, 7, 15, 16)),
    *(DummyStep(draft=dummy_tree(nodes)) for nodes in (2, 3, 7, 9, 16)),
    DummyStep(draft=dummy_long_tree(16)),
    DummyStep(cached=2000, draft=dummy_chain(3)),
    DummyStep(draft=dummy_chain(63)),
    DummyStep(cached=700, draft=dummy_chain(63)),
    DummyStep(sequences=32, cached=700, draft=dummy_chain(7)),
)
TREE_STEPS = tuple(DummyStep(draft=dummy_tree(nodes)) for nodes in (32, 63, 64))  # draft heads grow such large trees


def one_layer_per_kind(config: ModelConfig) -> ModelConfig:
    """Return a config with one layer of each kind: kernels depend on shapes and windows, not on the layer count."""
    kinds = dict.fromkeys(zip(config.ropes, config.windows, strict=True))
    ropes, windows = tuple(rope for rope, _ in kinds), tuple(window for _, window in kinds)
    return replace(config, layers=len(kinds), ropes=ropes, windows=windows)


@torch.inference_mode()
def run_dummy_steps(
    runner: ModelRunner, steps: Iterable[DummyStep], stopped: Callable[[], bool] = lambda: False
) -> int:
    """Run steps whose sequences all use the first page, and return how many ran."""
    count = 0
    for step in steps:
        if stopped():
            break
        if step.length <= runner.context:
            scheduled = [_scheduled(number, step, runner.layout.page_size) for number in range(step.sequences)]
            runner.forward(scheduled, [step.draft] * step.sequences)
            count += 1
    return count


@torch.inference_mode()
def warm_up_sampling(runner: ModelRunner) -> None:
    """Run what follows a step: sampling, an async step, and KV compaction of one and of several tree nodes."""
    sample(
        torch.zeros(1, runner.model.num_logits, device=runner.device),
        [SamplingRow(SamplingParams(temperature=1.0), 0, 0)],
    )
    scheduled = _scheduled(0, DummyStep(), runner.layout.page_size)
    runner.forward([scheduled], [Draft()])
    if runner.supports_async:
        following = replace(scheduled, start=scheduled.length, length=scheduled.length + 1)
        runner.forward_async([following], [0], None, 0)
    for nodes in (1, 2):
        runner.cache.move(list(range(1, nodes + 1)), list(range(nodes)))


def warm_up_chain(runner: ModelRunner, sampled: bool) -> None:
    """Draft one token as a draft model does; most draft models have the target's architecture and vocabulary."""
    scheduled = _scheduled(0, DummyStep(), runner.layout.page_size)
    draws = SamplingBatch([SamplingParams(temperature=1.0)], [0], [scheduled.length]) if sampled else None
    runner.draft_chain([scheduled], 1, runner.model.num_logits, draws)


def _scheduled(number: int, step: DummyStep, page_size: int) -> ScheduledSequence:
    tokens = [0] * (step.cached + step.num_new_tokens)
    seq = Sequence(number, Request(str(number), (), SamplingParams(), 0, 0), tokens, step.cached)
    seq.pages = [0] * -(-step.length // page_size)
    return ScheduledSequence.of(seq, step.num_new_tokens)


class HeadWarmup(Protocol):
    """Dummy draft heads of the model that warms up."""

    @property
    def extra_layers(self) -> tuple[LayerShape, ...]:
        """Return the layers they need in the model's KV cache."""

    def share_weights(self, model: Decoder, context: int) -> None:
        """Take the weights they share with the model, before those are quantized."""

    def run(self, runner: ModelRunner, stopped: Callable[[], bool]) -> int:
        """Draft for dummy sequences, and return how often."""


class BackgroundWarmup:
    """A thread that compiles kernels while weights load. The first requests compile what it does not reach."""

    def __init__(
        self,
        make: Callable[[], ModelRunner],
        device: torch.device,
        drafts: bool,
        heads: HeadWarmup | None = None,
    ) -> None:
        """`make` returns a model with few layers on `device`; `heads` share its weights."""
        self.steps = self.drafts = 0  # run so far
        self._make, self._device, self._with_drafts, self._heads = make, device, drafts, heads
        self._planned = PLAIN_STEPS + (DRAFT_STEPS if drafts else ()) + (TREE_STEPS if heads is not None else ())
        self._stop = Event()
        self._load_done = math.inf  # clock time
        self._thread = Thread(target=self._work, name="foretell-kernels", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            # A thread starts on the first device and launches kernels on its current one, so select it here.
            with no_capture(), torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                self._run(self._make())
        except Exception:
            LOG.exception("kernel warm-up failed; the first requests compile the kernels they need")

    def _run(self, runner: ModelRunner) -> None:
        self.steps = run_dummy_steps(runner, self._planned, self._stop.is_set)
        warm_up_sampling(runner)
        if self._heads is not None:
            self.drafts = self._heads.run(runner, lambda: self._stop.is_set() or self._is_late)
        for sampled in (False, True):
            if self._with_drafts and self._load_done == math.inf:  # there may be no draft model: do not delay the start
                warm_up_chain(runner, sampled)

    @property
    def _is_late(self) -> bool:
        return perf_counter() > self._load_done + HEAD_GRACE

    def __enter__(self) -> BackgroundWarmup:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Wait for the thread: `HEAD_GRACE` seconds for the heads, or for its current step if the load has failed."""
        self._load_done = perf_counter()
        if failed is not None:
            self._stop.set()
        self._thread.join()
        if torch.cuda.is_available():  # free what the warm-up allocated
            torch.cuda.empty_cache()


class DummySequences:
    """Allocates dummy sequences with pages, to measure costs and to capture CUDA graphs."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._ids = itertools.count(-1, -1)  # sequences of an engine have ids from 0 on

    @contextmanager
    def allocate(
        self, count: int, cached: int, num_new_tokens: int = 1, extra_tokens: int = 0, temperature: float = 0.0
    ) -> Iterator[list[Sequence]]:
        """Yield `count` sequences with pages for `extra_tokens` more, and free the pages afterwards.

        Yields no sequence if there are too few pages or if the model's context is too short.
        """
        seqs: list[Sequence] = []
        length = cached + num_new_tokens
        try:
            fits = length + extra_tokens <= self.runner.context
            for _ in range(count if fits else 0):
                request = Request("dummy", (0,), SamplingParams(temperature=temperature), 0, cached)
                seqs.append(Sequence(next(self._ids), request, [0] * length, cached))
                fits = fits and self.runner.reserve(seqs[-1], length + extra_tokens)
            yield seqs if fits else []
        finally:
            for seq in seqs:
                self.runner.trim(seq, 0)
