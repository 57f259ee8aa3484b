"""A ratio and how sure it is: medians over rounds, the mean over texts, and what drawing anew would have given."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean, median

Pairs = Sequence[Sequence[float]]  # for each text its ratios, one a round

DRAWS = 1000
LEVEL = 0.95


def ratio_of(pairs: Pairs) -> float:
    """Over rounds the median, which one bad moment of the machine does not move; over texts the geometric mean."""
    return math.exp(fmean(math.log(median(rounds)) for rounds in pairs))


def redraw(pairs: Pairs, seed: str, *, texts: bool) -> list[float]:
    """Logarithms of the ratio, had other rounds come out; with `texts`, had other texts been written as well."""
    rng = random.Random(seed)
    logs: list[float] = []
    for _ in range(DRAWS):
        chosen = rng.choices(pairs, k=len(pairs)) if texts else pairs
        logs.append(fmean(math.log(median(rng.choices(rounds, k=len(rounds)))) for rounds in chosen))
    return logs


def mean_of(draws: Sequence[Sequence[float]]) -> list[float]:
    """The draws of the mean of several ratios, each drawn on its own."""
    return [fmean(logs) for logs in zip(*draws, strict=True)]


def interval(logs: Sequence[float]) -> tuple[float, float]:
    """Where the middle of the draws lies, as ratios."""
    ranked = sorted(logs)
    last = len(ranked) - 1
    tail = (1 - LEVEL) / 2
    return math.exp(ranked[round(tail * last)]), math.exp(ranked[round((1 - tail) * last)])


def half_width(logs: Sequence[float]) -> float:
    """Half of the interval as a share of its middle: 0.02 is two percent either way."""
    low, high = interval(logs)
    return (high - low) / (high + low)


def shown(ratio: float | None, bounds: tuple[float, float] | None, missing: str = "-") -> str:
    """A ratio with its interval, or `missing` where there is none."""
    if ratio is None:
        return missing
    return f"{ratio:.2f}" if bounds is None else f"{ratio:.2f} ({bounds[0]:.2f} to {bounds[1]:.2f})"
