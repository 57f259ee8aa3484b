"""Is it ever slower? An adaptive arm against plain decoding and against the best fixed length."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Literal

from .intervals import DRAWS, half_width, interval

PLAIN_SHARE, BEST_SHARE = 0.97, 0.93  # of plain decoding's speed, and of the best fixed length's
NOISE = 0.03  # half an interval's width, as a share; with more it is measured again

Verdict = Literal["held", "slower", "inconclusive"]
Times = Sequence[Sequence[float]]  # seconds a token: for each batch its rounds


@dataclass(frozen=True)
class Contest:
    """Times of one cell. Arms of a round were timed next to each other, so whatever is compared is compared there."""

    plain: Times
    adaptive: Times
    fixed: Mapping[int, Times]  # by the number of tokens guessed
    seed: str = ""

    @property
    def rounds(self) -> int:
        return min(map(len, self.plain))

    @cached_property
    def speedup(self) -> float:
        return math.exp(self._log_ratio(self.adaptive, self._all_rounds))

    @cached_property
    def fixed_speedups(self) -> dict[int, float]:
        """How many times faster than plain decoding each fixed length is; to guess nothing is plain decoding."""
        return {0: 1.0} | {
            length: math.exp(self._log_ratio(times, self._all_rounds)) for length, times in self.fixed.items()
        }

    @property
    def best_fixed(self) -> int:
        return max(self.fixed_speedups, key=self.fixed_speedups.__getitem__)

    @property
    def bar(self) -> float:
        """The least speedup that will do."""
        return _bar(self.fixed_speedups.values())

    @cached_property
    def _drawn(self) -> tuple[list[float], list[float]]:
        """Logarithms of the speedup, and of it over its bar, had other rounds come out: the same ones for all arms."""
        rng = random.Random(self.seed)
        speedups, margins = [], []
        for _ in range(DRAWS):
            chosen = [rng.choices(rounds, k=len(rounds)) for rounds in self._all_rounds]
            speedup = self._log_ratio(self.adaptive, chosen)
            fixed = [1.0, *(math.exp(self._log_ratio(times, chosen)) for times in self.fixed.values())]
            speedups.append(speedup)
            margins.append(speedup - math.log(_bar(fixed)))
        return speedups, margins

    @property
    def draws(self) -> list[float] | None:
        """Of the speedup's logarithm; one round tells nothing of others."""
        return self._drawn[0] if self.rounds > 1 else None

    @property
    def noise(self) -> float | None:
        """Half the width that rounds make in the speedup over its bar, as a share."""
        return half_width(self._drawn[1]) if self.rounds > 1 else None

    @property
    def settled(self) -> bool:
        return self.noise is not None and self.noise <= NOISE

    @property
    def verdict(self) -> Verdict:
        """With much noise, a verdict only where all of the interval lies on one side of the bar."""
        if self.rounds < 2:
            return "inconclusive"
        if not self.settled:
            low, high = interval(self._drawn[1])
            if low < 1 <= high:
                return "inconclusive"
        return "held" if self.speedup >= self.bar else "slower"

    @property
    def _all_rounds(self) -> list[range]:
        return [range(len(rounds)) for rounds in self.plain]

    def _log_ratio(self, times: Times, chosen: Sequence[Sequence[int]]) -> float:
        """Over rounds the median of pairs, which one bad moment does not move; over batches the geometric mean."""
        return fmean(
            math.log(median(plain[i] / other[i] for i in rounds))
            for plain, other, rounds in zip(self.plain, times, chosen, strict=True)
        )


def _bar(fixed: Collection[float]) -> float:
    return max(PLAIN_SHARE, BEST_SHARE * max(fixed))


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """What many verdicts come to."""
    found = set(verdicts)
    return "slower" if "slower" in found else "inconclusive" if "inconclusive" in found else "held"
