"""Kernels compiled while weights are read: steps of nothing through a model of the same shapes that has few layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import Event, Thread

import torch

from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.params import SamplingParams
from foretell.types import Draft, Request, Sequence, Share

from .runner import ModelRunner

LOG = logging.getLogger("foretell")


@dataclass(frozen=True)
class Nothing:
    """A step of texts that nobody wrote: tokens cached and tokens to run of each, and a draft behind them."""

    texts: int = 1
    cached: int = 20
    take: int = 1
    draft: Draft = Draft()

    @property
    def length(self) -> int:
        """Of each text with its draft."""
        return self.cached + self.take + len(self.draft)


# One for each choice of kernels that soon comes: they differ by rows, by how many keys there are, and by trees.
PLAIN = (
    Nothing(),
    Nothing(cached=0, take=40),
    Nothing(cached=0, take=600),
    Nothing(texts=2),
    Nothing(texts=16),
    Nothing(cached=2000),
    Nothing(cached=3000),
)
GUESSED = (
    *(Nothing(draft=Draft.chain([0] * nodes)) for nodes in (3, 7, 15, 16)),
    *(Nothing(draft=Draft((0,) * nodes, (-1, -1, *range(nodes - 2)))) for nodes in (3, 9)),
    Nothing(cached=2000, draft=Draft.chain([0] * 3)),
    Nothing(draft=Draft.chain([0] * 63)),
)


def few_layers(config: ModelConfig) -> ModelConfig:
    """One layer of each kind there is: kernels hang on shapes and windows, not on how many layers there are."""
    kinds = dict.fromkeys(zip(config.ropes, config.windows, strict=True))
    ropes, windows = tuple(rope for rope, _ in kinds), tuple(window for _, window in kinds)
    return replace(config, layers=len(kinds), ropes=ropes, windows=windows)


@torch.inference_mode()
def rehearse(runner: ModelRunner, steps: Iterable[Nothing], stopped: Callable[[], bool] = lambda: False) -> int:
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


def _share(number: int, step: Nothing, page_size: int) -> Share:
    tokens = [0] * (step.cached + step.take)
    seq = Sequence(number, Request(str(number), (), SamplingParams(), 0, 0), tokens, step.cached)
    seq.pages = [0] * -(-step.length // page_size)
    return Share.of(seq, step.take)


class Warming:
    """A thread that gets kernels ready; what it cannot do the first requests will."""

    def __init__(self, make: Callable[[], Decoder], context: int, page_size: int, guesses: bool, taps: bool) -> None:
        """`make` gives a model of few layers; `taps`: whether states are asked for beside logits."""
        self.steps = 0  # rehearsed
        self._make, self._context, self._page_size, self._taps = make, context, page_size, taps
        self._wanted = PLAIN + (GUESSED if guesses else ())
        self._stop = Event()
        self._thread = Thread(target=self._work, name="foretell-kernels", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            model = self._make()
            with (
                torch.cuda.device(model.embed.device) if model.embed.is_cuda else nullcontext()
            ):  # a thread has its own
                self._run(model)
        except Exception:
            LOG.exception("kernels could not be made ready ahead; the first requests wait for them")

    def _run(self, model: Decoder) -> None:
        taps = (0, model.config.layers) if self._taps else ()
        pages = -(-self._context // self._page_size)  # as many as the tables of the real one are wide
        runner = ModelRunner(model, pages, self._page_size, self._context, taps)
        self.steps = rehearse(runner, self._wanted, self._stop.is_set)

    def __enter__(self) -> Warming:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Wait until all are ready, or, where what it runs beside has failed, for the step it is at."""
        if failed is not None:
            self._stop.set()
        self._thread.join()
        if torch.cuda.is_available():  # where they were rehearsed
            torch.cuda.empty_cache()
