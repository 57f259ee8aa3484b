"""Texts that are written at once, and where that is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .measure import MeasureJob, Variant
from .prompt import BenchPrompt

Batch = tuple[MeasureJob, ...]


@dataclass(frozen=True)
class BatchResult:
    """What became of a batch."""

    texts: tuple[tuple[int, ...], ...]
    steps: int  # forwards that gave a text a token, summed over texts
    timed: int  # tokens written while the clock ran
    seconds: float  # from when the last of them had its first token to the end of all
    failures: int = 0  # steps whose guesses were lost because the drafter failed

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def a_token(self) -> float:
        """Seconds of decoding for one token of any of the texts."""
        return self.seconds / self.timed


class BatchBackend(Protocol):
    """Where arms write batches."""

    def prepare(self, items: Sequence[BenchPrompt], temperature: float, batch: int, batches: int) -> list[Batch]:
        """What is to be written, with all that should not be measured done."""

    def refresh(self, arms: Sequence[Variant]) -> None:
        """Make every arm ready for a round; what its controller has learnt stays."""

    def write(self, arm: Variant, batch: Batch) -> BatchResult:
        """Write a batch and take the time."""
