"""From figures to places on a line, in percent of its width, so that a chart fits a phone as it fits a desk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
MOST_TICKS = 7


@dataclass(frozen=True)
class Scale:
    """A line from the least to the most; `logarithmic` gives equal ratios equal lengths."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Where a figure lies, in percent, held to the line's ends."""
        low, high, value = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(100 * min(1.0, max(0.0, share)), 2)


@dataclass(frozen=True)
class Tick:
    """A mark on the line with its label."""

    at: float
    label: str


def ratio_scale(values: Iterable[float]) -> tuple[Scale, list[Tick]]:
    """For ratios: 1 is always on it."""
    found = [min(RATIOS[-1], max(RATIOS[0], value)) for value in values]  # the interval of two prompts has no end
    low, high = min([0.9, *found]), max([1.2, *found])
    marks = [mark for mark in RATIOS if low <= mark <= high]
    scale = Scale(low / 1.04, high * 1.04, logarithmic=True)
    return scale, [Tick(scale.at(mark), f"{mark:g}×") for mark in _thinned(marks, keep=1.0)]


def value_scale(values: Iterable[float], low: float = 0.0, unit: str = "") -> tuple[Scale, list[Tick]]:
    """For amounts, from `low` up to a round figure."""
    high = max([low, *values])
    step = round_step((high - low) or 1.0)
    count = max(1, math.ceil((high - low) / step - 1e-9))
    scale = Scale(low, low + count * step)
    marks = [low + i * step for i in range(count + 1)]
    return scale, [Tick(scale.at(mark), f"{mark:g}{unit}") for mark in marks]


def time_scale(seconds: Iterable[float]) -> tuple[Scale, list[Tick]]:
    """For waits, which differ by orders: powers of ten and what lies between."""
    found = [value for value in seconds if value > 0] or [0.001, 0.01]
    low, high = min(found), max(found)
    scale = Scale(low / 1.1, high * 1.1, logarithmic=True)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    marks = [digit * 10.0**power for power in decades for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]
    return scale, [Tick(scale.at(mark), duration(mark)) for mark in _thinned(marks)]


def round_step(span: float) -> float:
    """The smallest round step that needs few ticks for a span."""
    power = 10.0 ** math.floor(math.log10(span / (MOST_TICKS - 1)))
    return next(step * power for step in STEPS if span / (step * power) <= MOST_TICKS - 1)


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms" if seconds >= 0.001 else f"{1e6 * seconds:.3g} µs"


def _thinned(marks: Sequence[float], keep: float | None = None) -> list[float]:
    """Few enough to be read; `keep` stays."""
    every = math.ceil(len(marks) / MOST_TICKS) or 1
    start = marks.index(keep) % every if keep in marks else 0
    return list(marks[start::every])
