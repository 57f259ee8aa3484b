"""Texts that nobody wrote, with pages of their own: to measure with, and to get ready by."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from foretell.sampling_params import SamplingParams
from foretell.types import Request, Sequence

from .model_runner import ModelRunner


class DummySequences:
    """Gives such texts out, and takes their pages back."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._ids = itertools.count(-1, -1)  # no text of an engine's own has such a number

    @contextmanager
    def texts(
        self, count: int, cached: int, take: int = 1, room: int = 0, temperature: float = 0.0
    ) -> Iterator[list[Sequence]]:
        """So many texts of `cached` tokens and `take` that are still to be run, with pages for `room` more; none where
        the pages or the model's context do not suffice."""
        seqs: list[Sequence] = []
        try:
            enough = cached + take + room <= self.runner.context
            for _ in range(count if enough else 0):
                request = Request("made up", (0,), SamplingParams(temperature=temperature), 0, cached)
                seqs.append(Sequence(next(self._ids), request, [0] * (cached + take), cached))
                enough = enough and self.runner.reserve(seqs[-1], cached + take + room)
            yield seqs if enough else []
        finally:
            for seq in seqs:
                self.runner.trim(seq, 0)
