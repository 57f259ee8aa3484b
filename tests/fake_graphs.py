"""CUDA graphs faked on a CPU: captures are counted, and a replay runs the work again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foretell.draft.heads.base import HeadDrafter
from foretell.engine.engine import Engine
from foretell.kernels.triton.row_tables import StepShape
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.cuda.graph_shapes import CAPTURE_ROWS, split_step, step_shape
from foretell.runner.cuda.graphs import GraphCache
from foretell.runner.cuda.tables import TOKENS, write_tables
from foretell.runner.executor import Executor, StepOutput
from foretell.runner.heads.prefill import PrefillShape
from foretell.runner.heads.sampler import DraftOutput
from foretell.runner.heads.tables import DraftShape

CPU = torch.device("cpu")
ACCEPTANCE_RATE = 0.7  # of draft tokens, where no model runs


class FakeGraph:
    """A fake CUDA graph: a replay leaves its results where the capture had them."""

    def __init__(self, run: Callable[[], Any], found: Any) -> None:
        self.run, self.found = run, found

    def replay(self) -> None:
        new = self.run()
        if isinstance(self.found, DraftOutput):
            self.found.readback.copy_(new.readback)
        elif isinstance(self.found, torch.Tensor):
            self.found.copy_(new)


class FakeCapture:
    """Captures fake graphs and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def capture(self, run: Callable[[], Any]) -> Any:
        self.count += 1
        found = run()
        return FakeGraph(run, found), found

    def recorder(self) -> GraphCache[Any, Any]:
        return GraphCache(CPU, self)  # type: ignore[arg-type]


class PaddedExecutor(Executor):
    """An executor that pads steps to the shapes of a CUDA device, and runs them on another executor."""

    def __init__(self, inner: Executor, share: int, tape: FakeCapture) -> None:
        self.inner, self.share, self.recorder = inner, share, tape.recorder()
        self.asked = Counter[StepShape]()

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        for some in split_step(packed, CAPTURE_ROWS[-1]):
            wanted, tiles = step_shape(some, self.share)
            if wanted.rows <= CAPTURE_ROWS[-1]:
                self.asked[wanted] += 1
                sizes = self.recorder.select(wanted)
                write_tables(np.zeros(sizes.table_size, np.int32), some, tiles, sizes)
                self.recorder(sizes, lambda: None)
        return self.inner.forward(packed, taps)


def use_fake_graphs(engine: Engine, *heads: HeadDrafter) -> FakeCapture:
    """Let an engine and its heads use fake graphs from now on."""
    tape = FakeCapture()
    engine.runner.executor = PaddedExecutor(engine.runner.executor, engine.runner.layout.queries_per_kv_head, tape)
    for head in heads:
        assert head._graph_prefill is not None, "it drafts in a single graph"
        head._graph.graphs = tape.recorder()  # type: ignore[attr-defined]
        head._graph_prefill.graphs = tape.recorder()
    return tape


@dataclass
class RandomExecutor(Executor):
    """An executor without a model: the argmax is mostly the next row's token, so that draft tokens are accepted."""

    vocab: int
    width: int
    rng: random.Random

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        tokens = [*packed.table[TOKENS].tolist(), 0]
        chosen = [
            tokens[row + 1] if self.rng.random() < ACCEPTANCE_RATE else self.rng.randrange(self.vocab)
            for row in packed.logits_indices
        ]
        logits = torch.zeros(len(chosen), self.vocab).scatter_(1, torch.tensor(chosen)[:, None], 50.0)
        return StepOutput(logits, torch.zeros(packed.rows, len(taps) * self.width) if taps else None)


class RandomDrafts:
    """Graphs of a head without the head: drafts are random, in the head's shapes."""

    def __init__(self, recorder: GraphCache[Any, Any], vocab: int) -> None:
        self.recorder, self.vocab, self.select = recorder, vocab, recorder.select

    def __call__(self, sizes: DraftShape | PrefillShape, run: Callable[[], Any], keep: bool = True) -> Any:
        self.recorder(sizes, lambda: None, keep)
        if isinstance(sizes, PrefillShape):
            return None
        if not sizes.width:
            readback = torch.randint(self.vocab, (2, sizes.depth, sizes.sequences)).float()
            readback[1] = 0.8
            return DraftOutput(readback)
        readback = torch.zeros(sizes.depth, 3, sizes.sequences, sizes.width, min(10, self.vocab))
        readback[:, 0] = torch.arange(readback.shape[-1])
        readback[:, 1] = 0.6 ** (1 + torch.arange(readback.shape[-1]))
        readback[:, 2, :, :, 0] = torch.arange(sizes.width)
        return DraftOutput(readback)


def use_random_drafts(head: HeadDrafter, vocab: int) -> tuple[GraphCache[Any, Any], GraphCache[Any, Any]]:
    """Let a head with graphs return random drafts, and return its draft and prefill graph caches."""
    draft: Any = head._graph  # type: ignore[attr-defined]
    prefill: Any = head._graph_prefill
    caches = draft.graphs, prefill.graphs
    draft.graphs, prefill.graphs = (RandomDrafts(cache, vocab) for cache in caches)
    return caches
