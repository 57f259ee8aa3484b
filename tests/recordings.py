"""A device that records, played on a CPU: what was recorded is run again when it is replayed, and both are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from foretell.draft.heads import HeadDrafter
from foretell.engine.engine import Engine
from foretell.kernels.triton.tables import Sizes
from foretell.runner.cuda_passes import passes
from foretell.runner.cuda_sizes import ROWS, fit
from foretell.runner.cuda_tables import fill
from foretell.runner.executor import Executor, StepOutput
from foretell.runner.head_choice import Found
from foretell.runner.pack import Packed
from foretell.runner.recording import Recorder

CPU = torch.device("cpu")


class Again:
    """Stands for a graph: it leaves its results where they were when it was recorded."""

    def __init__(self, run: Callable[[], Any], found: Any) -> None:
        self.run, self.found = run, found

    def replay(self) -> None:
        new = self.run()
        if isinstance(self.found, Found):
            self.found.told.copy_(new.told)


class Tape:
    """Makes such graphs."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run: Callable[[], Any]) -> Any:
        self.count += 1
        found = run()
        return Again(run, found), found

    def recorder(self) -> Recorder[Any, Any]:
        return Recorder(CPU, self)  # type: ignore[arg-type]


class Filled:
    """An executor whose steps are laid out in the sizes of a CUDA device, and run by another."""

    def __init__(self, inner: Executor, share: int, tape: Tape) -> None:
        self.inner, self.share, self.recorder = inner, share, tape.recorder()
        self.asked = Counter[Sizes]()

    def __call__(self, packed: Packed, taps: tuple[int, ...]) -> StepOutput:
        for some in passes(packed, ROWS[-1]):
            wanted, tiles = fit(some, self.share)
            if wanted.rows <= ROWS[-1]:
                self.asked[wanted] += 1
                sizes = self.recorder.serving(wanted)
                fill(np.zeros(sizes.numbers, np.int32), some, tiles, sizes)
                self.recorder(sizes, lambda: None)
        return self.inner(packed, taps)


def play(engine: Engine, *heads: HeadDrafter) -> Tape:
    """Let an engine and its heads record from now on."""
    tape = Tape()
    engine.runner.executor = Filled(engine.runner.executor, engine.runner.layout.share, tape)
    for head in heads:
        assert head._whole_reader is not None, "it guesses in one piece"
        head._whole.recorder = tape.recorder()  # type: ignore[attr-defined]
        head._whole_reader.recorder = tape.recorder()
    return tape
