"""Is it ever slower? An adaptive arm against plain decoding and against the best fixed length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Literal

from .intervals import Estimate, estimate_of, half_width, interval, mean_ratio, over_rounds

PLAIN_SHARE, BEST_SHARE = 0.97, 0.93  # of plain decoding's speed, and of the best fixed length's
ERROR = 0.05  # the most often that a cell at its bar is called held, and the same for slower
PLAIN = 0  # a fixed length of no draft tokens

Verdict = Literal["held", "slower", "inconclusive"]
Times = Sequence[Sequence[float]]  # seconds a token: for each batch its rounds


@dataclass(frozen=True)
class Contest:
    """Times of one cell. Arms of a round were timed next to each other, so whatever is compared is compared there.

    Batches are fixed; rounds are repeated measurements, one observation each. `looks` is how often the verdict is
    asked for until it stops the measurement: errors are split between them (Bonferroni), so that stopping as soon
    as a cell is decided does not raise them.
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
        """How many times faster than plain decoding each fixed length is; to guess nothing is plain decoding."""
        return {PLAIN: 1.0} | {length: self._speedup(times) for length, times in self.fixed.items()}

    @property
    def best_fixed(self) -> int:
        return max(self.fixed_speedups, key=self.fixed_speedups.__getitem__)

    @property
    def bar(self) -> float:
        """The least speedup that will do."""
        return max(PLAIN_SHARE, BEST_SHARE * max(self.fixed_speedups.values()))

    @cached_property
    def estimate(self) -> Estimate | None:
        """The log of the speedup over rounds; None with fewer than two."""
        return estimate_of(self._log_ratios(self.plain))

    @property
    def speedup_interval(self) -> tuple[float, float] | None:
        """The interval of the speedup that holds 95% whichever look the cell stopped at."""
        return interval(self.estimate, 1 - ERROR / self.looks)

    @cached_property
    def margins(self) -> dict[int, Estimate]:
        """By fixed length: the log of the adaptive arm's speed over the share of that length's it must reach."""
        found = {PLAIN: _margin(self._log_ratios(self.plain), PLAIN_SHARE)}
        found |= {length: _margin(self._log_ratios(times), BEST_SHARE) for length, times in self.fixed.items()}
        return {length: estimate for length, estimate in found.items() if estimate is not None}

    @property
    def noise(self) -> float | None:
        """Half the width of the 95% interval over rounds, as a share, of the margin that is hardest to keep."""
        least = min(self.margins.values(), key=lambda margin: margin.mean, default=None)
        return half_width(least)

    @cached_property
    def verdict(self) -> Verdict:
        """Held if every margin's lower bound is above 0, slower if one's upper bound is below, else inconclusive.

        Bounds are one-sided. All margins have to hold, which needs no correction (an intersection-union test); for
        one of several to fail, the error is split between them.
        """
        if not self.margins:
            return "inconclusive"
        error = ERROR / self.looks
        if all(margin.bounds(error)[0] > 0 for margin in self.margins.values()):
            return "held"
        if any(margin.bounds(error / len(self.margins))[1] < 0 for margin in self.margins.values()):
            return "slower"
        return "inconclusive"

    def _speedup(self, times: Times) -> float:
        pairs = [_ratios(plain, other) for plain, other in zip(self.plain, times, strict=True)]
        return mean_ratio(over_rounds(pairs), pairs)

    def _log_ratios(self, slower: Times) -> list[float]:
        """For each round the log of other times over the adaptive arm's, as the mean over batches."""
        batches = [_ratios(theirs, ours) for theirs, ours in zip(slower, self.adaptive, strict=True)]
        return [fmean(map(math.log, ratios)) for ratios in zip(*batches, strict=False)]


def _ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(over, under, strict=True)]


def _margin(logs: Sequence[float], share: float) -> Estimate | None:
    return estimate_of([log - math.log(share) for log in logs])


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """What many verdicts come to."""
    found = set(verdicts)
    return "slower" if "slower" in found else "inconclusive" if "inconclusive" in found else "held"
