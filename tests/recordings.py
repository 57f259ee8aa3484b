"""A device that records, played on a CPU: what is recorded is counted, and run again where it would be replayed."""

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
from foretell.kernels.triton.row_tables import Sizes
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.cuda.graph_shapes import CAPTURE_ROWS, split_step, step_shape
from foretell.runner.cuda.graphs import GraphCache
from foretell.runner.cuda.tables import TOKENS, write_tables
from foretell.runner.executor import Executor, StepOutput
from foretell.runner.heads.prefill import PrefillShape
from foretell.runner.heads.sampler import DraftOutput
from foretell.runner.heads.tables import DraftShape

CPU = torch.device("cpu")
RIGHT = 0.7  # how often a guess stands where nothing is run


class Again:
    """Stands for a graph: it leaves its results where they were when it was recorded."""

    def __init__(self, run: Callable[[], Any], found: Any) -> None:
        self.run, self.found = run, found

    def replay(self) -> None:
        new = self.run()
        if isinstance(self.found, DraftOutput):
            self.found.readback.copy_(new.readback)
        elif isinstance(self.found, torch.Tensor):
            self.found.copy_(new)


class Tape:
    """Makes such graphs."""

    def __init__(self) -> None:
        self.count = 0

    def capture(self, run: Callable[[], Any]) -> Any:
        self.count += 1
        found = run()
        return Again(run, found), found

    def recorder(self) -> GraphCache[Any, Any]:
        return GraphCache(CPU, self)  # type: ignore[arg-type]


class Filled(Executor):
    """An executor whose steps are laid out in the sizes of a CUDA device, and run by another."""

    def __init__(self, inner: Executor, share: int, tape: Tape) -> None:
        self.inner, self.share, self.recorder = inner, share, tape.recorder()
        self.asked = Counter[Sizes]()

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        for some in split_step(packed, CAPTURE_ROWS[-1]):
            wanted, tiles = step_shape(some, self.share)
            if wanted.rows <= CAPTURE_ROWS[-1]:
                self.asked[wanted] += 1
                sizes = self.recorder.select(wanted)
                write_tables(np.zeros(sizes.numbers, np.int32), some, tiles, sizes)
                self.recorder(sizes, lambda: None)
        return self.inner.forward(packed, taps)


def play(engine: Engine, *heads: HeadDrafter) -> Tape:
    """Let an engine and its heads record from now on."""
    tape = Tape()
    engine.runner.executor = Filled(engine.runner.executor, engine.runner.layout.queries_per_kv_head, tape)
    for head in heads:
        assert head._graph_prefill is not None, "it guesses in one piece"
        head._graph.graphs = tape.recorder()  # type: ignore[attr-defined]
        head._graph_prefill.graphs = tape.recorder()
    return tape


@dataclass
class MadeUpSteps(Executor):
    """An executor without a model: mostly the next row's token is the likeliest, so that guesses stand."""

    vocab: int
    width: int
    rng: random.Random

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        tokens = [*packed.table[TOKENS].tolist(), 0]
        chosen = [
            tokens[row + 1] if self.rng.random() < RIGHT else self.rng.randrange(self.vocab)
            for row in packed.logits_indices
        ]
        logits = torch.zeros(len(chosen), self.vocab).scatter_(1, torch.tensor(chosen)[:, None], 50.0)
        return StepOutput(logits, torch.zeros(packed.rows, len(taps) * self.width) if taps else None)


class MadeUpDrafts:
    """What a head recorded without a head: its guesses are made up, in the shapes that its own would have."""

    def __init__(self, recorder: GraphCache[Any, Any], vocab: int) -> None:
        self.recorder, self.vocab, self.select = recorder, vocab, recorder.select

    def __call__(self, sizes: DraftShape | PrefillShape, run: Callable[[], Any], keep: bool = True) -> Any:
        self.recorder(sizes, lambda: None, keep)
        if isinstance(sizes, PrefillShape):
            return None
        if not sizes.width:
            told = torch.randint(self.vocab, (2, sizes.depth, sizes.sequences)).float()
            told[1] = 0.8
            return DraftOutput(told)
        told = torch.zeros(sizes.depth, 3, sizes.sequences, sizes.width, min(10, self.vocab))
        told[:, 0] = torch.arange(told.shape[-1])
        told[:, 1] = 0.6 ** (1 + torch.arange(told.shape[-1]))
        told[:, 2, :, :, 0] = torch.arange(sizes.width)
        return DraftOutput(told)


def make_up(head: HeadDrafter, vocab: int) -> tuple[GraphCache[Any, Any], GraphCache[Any, Any]]:
    """Let a head that records run nothing; what it has recorded of drafts, and of readings."""
    whole: Any = head._graph  # type: ignore[attr-defined]
    reader: Any = head._graph_prefill
    found = whole.graphs, reader.graphs
    whole.graphs, reader.graphs = (MadeUpDrafts(each, vocab) for each in found)
    return found
