"""Kernels compiled while weights are read: steps of nothing through a model of the same shapes that has few layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import Event, Thread
from time import perf_counter
from typing import Protocol

import torch

from foretell.kv.cache import LayerShape
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.runner.cuda.graphs import plainly
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.cuda_sampler import SamplingBatch
from foretell.sampling.sampling import SamplingRow, sample
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence

LOG = logging.getLogger("foretell")
BEYOND = 1.0  # seconds that heads go on when what they run beside is over: each depth and width has kernels of its own
EVEN = 0.01  # all weights of what stands for others: what lay in memory might be no numbers, and none of them largest


@dataclass(frozen=True)
class DummyStep:
    """A step of texts that nobody wrote: tokens cached and tokens to run of each, and a draft behind them."""

    texts: int = 1
    cached: int = 20
    take: int = 1
    draft: Draft = Draft()

    @property
    def length(self) -> int:
        """Of each text with its draft."""
        return self.cached + self.take + len(self.draft)


def chain(nodes: int) -> Draft:
    """One that is told by nobody."""
    return Draft.chain([0] * nodes)


def tree(nodes: int) -> Draft:
    """Two branches of each node, from two nodes on: as flat as those of heads."""
    return Draft((0,) * nodes, tuple(node // 2 - 1 for node in range(nodes)))


def long_tree(nodes: int) -> Draft:
    """A chain that has a second beginning."""
    return Draft((0,) * nodes, (*range(-1, nodes - 2), -1))


# One for each choice of kernels that soon comes: they differ by rows, by how many keys there are, and by trees.
PLAIN = (
    DummyStep(),
    DummyStep(cached=0, take=256),
    DummyStep(cached=0, take=600),
    DummyStep(texts=2),
    DummyStep(texts=16),
    DummyStep(texts=64),
    DummyStep(texts=64, cached=700),
    DummyStep(cached=700),
    DummyStep(cached=2000),
    DummyStep(cached=3000),
)
GUESSED = (
    *(DummyStep(draft=chain(nodes)) for nodes in (1, 3, 7, 15, 16)),
    *(DummyStep(draft=tree(nodes)) for nodes in (2, 3, 7, 9, 16)),
    DummyStep(draft=long_tree(16)),
    DummyStep(cached=2000, draft=chain(3)),
    DummyStep(draft=chain(63)),
    DummyStep(cached=700, draft=chain(63)),
    DummyStep(texts=32, cached=700, draft=chain(7)),
)
GROWN = tuple(DummyStep(draft=tree(nodes)) for nodes in (32, 63, 64))  # by heads, for which rows are cheap


def few_layers(config: ModelConfig) -> ModelConfig:
    """One layer of each kind there is: kernels hang on shapes and windows, not on how many layers there are."""
    kinds = dict.fromkeys(zip(config.ropes, config.windows, strict=True))
    ropes, windows = tuple(rope for rope, _ in kinds), tuple(window for _, window in kinds)
    return replace(config, layers=len(kinds), ropes=ropes, windows=windows)


@torch.inference_mode()
def rehearse(runner: ModelRunner, steps: Iterable[DummyStep], stopped: Callable[[], bool] = lambda: False) -> int:
    """Run steps whose texts all lie in the first page, whatever that holds; how many were run."""
    count = 0
    for step in steps:
        if stopped():
            break
        if step.length <= runner.context:
            shares = [_share(number, step, runner.layout.page_size) for number in range(step.texts)]
            runner.forward(shares, [step.draft] * step.texts)
            count += 1
    return count


@torch.inference_mode()
def choose_and_move(runner: ModelRunner) -> None:
    """What comes behind a step: a token is drawn, another step is sent, and what was accepted of a tree moves up, one
    node or several."""
    sample(
        torch.zeros(1, runner.model.num_logits, device=runner.device),
        [SamplingRow(SamplingParams(temperature=1.0), 0, 0)],
    )
    share = _share(0, DummyStep(), runner.layout.page_size)
    runner.forward([share], [Draft()])
    if runner.supports_async:
        runner.forward_async([replace(share, start=share.length, length=share.length + 1)], [0], None, 0)
    for nodes in (1, 2):
        runner.cache.move(list(range(1, nodes + 1)), list(range(nodes)))


def go_on(runner: ModelRunner, drawn: bool) -> None:
    """A chain of one token, as a draft model makes them: mostly it is of this one's kind, and has its vocabulary."""
    share = _share(0, DummyStep(), runner.layout.page_size)
    draws = SamplingBatch([SamplingParams(temperature=1.0)], [0], [share.length]) if drawn else None
    runner.draft_chain([share], 1, runner.model.num_logits, draws)


def _share(number: int, step: DummyStep, page_size: int) -> ScheduledSequence:
    tokens = [0] * (step.cached + step.take)
    seq = Sequence(number, Request(str(number), (), SamplingParams(), 0, 0), tokens, step.cached)
    seq.pages = [0] * -(-step.length // page_size)
    return ScheduledSequence.of(seq, step.take)


class DraftGraphs(Protocol):
    """What guesses from the states of the model that is rehearsed."""

    @property
    def beside(self) -> tuple[LayerShape, ...]:
        """Layers it has in the model's cache."""

    def borrow(self, model: Decoder, context: int) -> None:
        """What it needs of the model, before that one's weights are rounded."""

    def rehearse(self, runner: ModelRunner, stopped: Callable[[], bool]) -> int:
        """Guess for texts that nobody wrote; how often."""


class BackgroundWarmup:
    """A thread that gets kernels ready; what it cannot do the first requests will."""

    def __init__(
        self,
        make: Callable[[], ModelRunner],
        device: torch.device,
        guesses: bool,
        heads: DraftGraphs | None = None,
    ) -> None:
        """`make` gives a model of few layers on `device`, of which `heads` have borrowed."""
        self.steps = self.drafts = 0  # rehearsed
        self._make, self._device, self._guesses, self._heads = make, device, guesses, heads
        self._wanted = PLAIN + (GUESSED if guesses else ()) + (GROWN if heads is not None else ())
        self._stop = Event()
        self._over = math.inf  # when what it runs beside was
        self._thread = Thread(target=self._work, name="foretell-kernels", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            # A thread begins on the first device, and kernels run on the thread's: all of it has to happen in here.
            with plainly(), torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                self._run(self._make())
        except Exception:
            LOG.exception("kernels could not be made ready ahead; the first requests wait for them")

    def _run(self, runner: ModelRunner) -> None:
        self.steps = rehearse(runner, self._wanted, self._stop.is_set)
        choose_and_move(runner)
        if self._heads is not None:
            self.drafts = self._heads.rehearse(runner, lambda: self._stop.is_set() or self._is_late)
        for drawn in (False, True):
            if self._guesses and self._over == math.inf:  # there may be no draft model: nobody is to wait for this
                go_on(runner, drawn)

    @property
    def _is_late(self) -> bool:
        return perf_counter() > self._over + BEYOND

    def __enter__(self) -> BackgroundWarmup:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Wait until all are ready, for those of heads not too long, and where what it runs beside has failed, for the
        step it is at."""
        self._over = perf_counter()
        if failed is not None:
            self._stop.set()
        self._thread.join()
        if torch.cuda.is_available():  # where they were rehearsed
            torch.cuda.empty_cache()
