"""Chart data with scales and ticks, rendered by templates/charts.html.

Positions are in percent of the width, so that a chart fits every screen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..intervals import bounds_label, is_wide
from ..metrics import Latency

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
MOST_TICKS = 7


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value in percent, clipped to the axis."""
        low, high, value = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        fraction = (value - low) / (high - low) if high > low else 0.5
        return round(100 * min(1.0, max(0.0, fraction)), 2)


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis."""

    at: float
    label: str


def ratio_scale(values: Iterable[float]) -> tuple[Scale, list[Tick]]:
    """Return a logarithmic axis for ratios that includes 1."""
    found = [min(RATIOS[-1], max(RATIOS[0], value)) for value in values]
    low, high = min([0.9, *found]), max([1.2, *found])
    marks = [mark for mark in RATIOS if low <= mark <= high]
    scale = Scale(low / 1.04, high * 1.04, logarithmic=True)
    return scale, [Tick(scale.at(mark), f"{mark:g}×") for mark in _thinned(marks, keep=1.0)]


def value_scale(values: Iterable[float], low: float = 0.0, unit: str = "") -> tuple[Scale, list[Tick]]:
    """Return a linear axis from `low` to a round figure."""
    high = max([low, *values])
    step = round_step((high - low) or 1.0)
    count = max(1, math.ceil((high - low) / step - 1e-9))
    scale = Scale(low, low + count * step)
    marks = [low + i * step for i in range(count + 1)]
    return scale, [Tick(scale.at(mark), f"{mark:g}{unit}") for mark in marks]


def time_scale(seconds: Iterable[float]) -> tuple[Scale, list[Tick]]:
    """Return a logarithmic axis for times with ticks at 1, 2 and 5 times powers of ten."""
    found = [value for value in seconds if value > 0] or [0.001, 0.01]
    low, high = min(found), max(found)
    scale = Scale(low / 1.1, high * 1.1, logarithmic=True)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    marks = [digit * 10.0**power for power in decades for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]
    return scale, [Tick(scale.at(mark), duration(mark)) for mark in _thinned(marks)]


def round_step(span: float) -> float:
    """Return the smallest round step that needs at most `MOST_TICKS` ticks."""
    power = 10.0 ** math.floor(math.log10(span / (MOST_TICKS - 1)))
    return next(step * power for step in STEPS if span / (step * power) <= MOST_TICKS - 1)


def duration(seconds: float) -> str:
    """Format a time in s, ms or µs."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms" if seconds >= 0.001 else f"{1e6 * seconds:.3g} µs"


def _thinned(marks: Sequence[float], keep: float | None = None) -> list[float]:
    """Return at most `MOST_TICKS` of the marks, `keep` among them."""
    every = math.ceil(len(marks) / MOST_TICKS) or 1
    start = marks.index(keep) % every if keep in marks else 0
    return list(marks[start::every])


LONG_NAME = 18  # characters from which a name needs a wider column
NUM_COLOURS = 8  # of series on the page, used in turn


@dataclass(frozen=True)
class Mark:
    """A mark of a row from `start` to `end` in percent."""

    kind: Literal["line", "box", "dot", "tick"]
    start: float
    end: float
    colour: str

    @property
    def width(self) -> float:
        return round(self.end - self.start, 2)


@dataclass(frozen=True)
class ChartRow:
    """One row of a chart; a heading has no marks."""

    name: str
    marks: Sequence[Mark] = ()
    value: str = ""
    more: str = ""  # small text after the value
    note: str = ""  # tooltip
    heading: bool = False


@dataclass(frozen=True)
class LegendEntry:
    """A colour and its meaning."""

    name: str
    colour: str


@dataclass(frozen=True)
class RowChart:
    """Rows over one scale; `guide` is a labelled reference line, `folded` rows are shown on a click."""

    title: str
    about: str
    rows: Sequence[ChartRow]
    ticks: Sequence[Tick] = ()
    legend: Sequence[LegendEntry] = ()
    guide: Tick | None = None
    folded: Sequence[ChartRow] = ()

    @property
    def long_names(self) -> bool:
        """Return whether a name needs a wider column."""
        return any(len(row.name) > LONG_NAME for row in (*self.rows, *self.folded) if not row.heading)


@dataclass(frozen=True)
class Column:
    """A vertical bar, `height` in percent."""

    height: float
    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Panel:
    """The columns of one series."""

    name: str
    colour: str
    columns: Sequence[Column]


@dataclass(frozen=True)
class ColumnChart:
    """Column charts of several series next to each other."""

    title: str
    about: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Tile:
    """A figure at the top of a page, with its name and a remark."""

    figure: str
    name: str
    more: str = ""
    tone: Literal["", "good", "bad"] = ""


def colour(index: int) -> str:
    """Return the colour of a series by its index."""
    return f"c{index % NUM_COLOURS}"


def interval_marks(at: Sequence[float], colour: str) -> list[Mark]:
    """Return a dot with whiskers, from low, middle and high."""
    low, middle, high = at
    return [Mark("line", low, high, colour), Mark("dot", middle, middle, colour)]


def ratio_values(ratio: float | None, between: tuple[float, float] | None) -> list[float]:
    """Return the values that the axis of a ratio has to include; a wide interval would only stretch it."""
    bounds = () if between is None or is_wide(between) else between
    return [*bounds, ratio or 1.0]


def ratio_row(
    name: str, ratio: float, between: tuple[float, float] | None, scale: Scale, colour: str, note: str = ""
) -> ChartRow:
    """Return the row of a ratio with its interval."""
    low, high = between or (ratio, ratio)
    marks = interval_marks([scale.at(value) for value in (low, ratio, high)], colour)
    return ChartRow(name, marks, f"{ratio:.2f}×", bounds_label(between), note)


BOX_PLOT = "The bar is the 25th to 75th percentile, the line the 5th to 95th, the mark the median."


def latency_chart(title: str, about: str, latencies: Sequence[tuple[str, str, Latency]]) -> RowChart:
    """Return box plots of latencies, given as (name, colour, latency)."""
    scale, ticks = time_scale([value for _, _, latency in latencies for value in _percentiles(latency)])
    rows = [
        ChartRow(
            name,
            _box_plot(latency, scale, css),
            duration(latency.p50),
            f"p99 {duration(latency.p99)}",
            f"{latency.count} values",
        )
        for name, css, latency in latencies
    ]
    return RowChart(title, f"{about} {BOX_PLOT}", rows, ticks)


def _percentiles(latency: Latency) -> list[float]:
    """Return the 5th, 25th, 50th, 75th and 95th percentiles."""
    last = len(latency.curve) - 1
    return [latency.curve[round(level * last)] for level in (0.05, 0.25, 0.5, 0.75, 0.95)]


def _box_plot(latency: Latency, scale: Scale, css: str) -> list[Mark]:
    low, lower, middle, upper, high = (scale.at(value) for value in _percentiles(latency))
    box = Mark("box", lower, max(upper, lower + 0.4), css)
    return [Mark("line", low, high, css), box, Mark("tick", middle, middle, css)]
