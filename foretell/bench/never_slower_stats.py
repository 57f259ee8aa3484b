"""Statistics of `bench never-slower`: the adaptive variant against plain decoding and the best fixed draft length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Literal

from .intervals import Estimate, estimate_of, half_width, interval, mean_ratio, over_rounds

MIN_OF_PLAIN = 0.97  # required fraction of the speed of plain decoding
MIN_OF_BEST_FIXED = 0.93  # required fraction of the speed of the best fixed draft length
ERROR_RATE = 0.05  # largest probability that a cell at its bar is called held, and the same for slower
NO_DRAFT = 0  # draft length of plain decoding

NeverSlowerVerdict = Literal["held", "slower", "inconclusive"]
Times = Sequence[Sequence[float]]  # seconds per token by batch and round


@dataclass(frozen=True)
class CellTimes:
    """Times of one cell, compared within rounds, because the variants of a round were timed next to each other.

    Batches are fixed; rounds are repeated measurements, one observation each. `looks` is the number of interim looks
    at the verdict. The error rate is split between them (Bonferroni), so that stopping as soon as a cell is decided
    does not raise it.
    """

    plain: Times
    adaptive: Times
    fixed: Mapping[int, Times]  # by the number of draft tokens
    looks: int = 1

    @property
    def rounds(self) -> int:
        return min(map(len, self.plain))

    @cached_property
    def speedup(self) -> float:
        return self._speedup(self.adaptive)

    @cached_property
    def fixed_speedups(self) -> dict[int, float]:
        """Return the speedup of each fixed draft length; length 0 is plain decoding."""
        return {NO_DRAFT: 1.0} | {length: self._speedup(times) for length, times in self.fixed.items()}

    @property
    def best_fixed(self) -> int:
        return max(self.fixed_speedups, key=self.fixed_speedups.__getitem__)

    @property
    def bar(self) -> float:
        """Return the speedup that the adaptive variant must reach."""
        return max(MIN_OF_PLAIN, MIN_OF_BEST_FIXED * max(self.fixed_speedups.values()))

    @cached_property
    def estimate(self) -> Estimate | None:
        """Estimate the log of the speedup over rounds; None with fewer than two."""
        return estimate_of(self._log_ratios(self.plain))

    @property
    def speedup_interval(self) -> tuple[float, float] | None:
        """Return the interval of the speedup with at least 95% coverage whichever look the cell stopped at."""
        return interval(self.estimate, 1 - ERROR_RATE / self.looks)

    @cached_property
    def margins(self) -> dict[int, Estimate]:
        """Estimate by fixed length the log of the adaptive speed over the speed it must reach."""
        found = {NO_DRAFT: _margin(self._log_ratios(self.plain), MIN_OF_PLAIN)}
        found |= {length: _margin(self._log_ratios(times), MIN_OF_BEST_FIXED) for length, times in self.fixed.items()}
        return {length: estimate for length, estimate in found.items() if estimate is not None}

    @property
    def noise(self) -> float | None:
        """Return half the relative width of the 95% interval over rounds of the smallest margin."""
        least = min(self.margins.values(), key=lambda margin: margin.mean, default=None)
        return half_width(least)

    @cached_property
    def verdict(self) -> NeverSlowerVerdict:
        """Return held if every lower bound is above 0, slower if an upper bound is below, else inconclusive.

        Bounds are one-sided. `held` requires all margins, which needs no correction (an intersection-union test);
        `slower` requires one of several, so the error rate is split between them.
        """
        if not self.margins:
            return "inconclusive"
        error = ERROR_RATE / self.looks
        if all(margin.bounds(error)[0] > 0 for margin in self.margins.values()):
            return "held"
        if any(margin.bounds(error / len(self.margins))[1] < 0 for margin in self.margins.values()):
            return "slower"
        return "inconclusive"

    def _speedup(self, times: Times) -> float:
        pairs = [_ratios(plain, other) for plain, other in zip(self.plain, times, strict=True)]
        return mean_ratio(over_rounds(pairs), pairs)

    def _log_ratios(self, times: Times) -> list[float]:
        """Return for each round the log of other times over the adaptive ones, averaged over batches."""
        batches = [_ratios(theirs, ours) for theirs, ours in zip(times, self.adaptive, strict=True)]
        return [fmean(map(math.log, ratios)) for ratios in zip(*batches, strict=False)]


def _ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(over, under, strict=True)]


def _margin(logs: Sequence[float], required: float) -> Estimate | None:
    return estimate_of([log - math.log(required) for log in logs])


def worst_verdict(verdicts: Sequence[NeverSlowerVerdict]) -> NeverSlowerVerdict:
    """Return the worst of several verdicts."""
    found = set(verdicts)
    if "slower" in found:
        return "slower"
    return "inconclusive" if "inconclusive" in found else "held"
