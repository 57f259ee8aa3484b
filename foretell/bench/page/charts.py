"""What charts are made of; templates/charts.html draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from foretell.bench.latency import Latency

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


LONG = 18  # characters of a name
COLOURS = 8  # that the page has for series; then they come again


@dataclass(frozen=True)
class Shape:
    """A mark on a row's line, from and to in percent."""

    kind: Literal["line", "box", "dot", "tick"]
    start: float
    end: float
    colour: str

    @property
    def width(self) -> float:
        return round(self.end - self.start, 2)


@dataclass(frozen=True)
class Row:
    """One line of a chart; a heading has no marks."""

    name: str
    shapes: Sequence[Shape] = ()
    value: str = ""
    more: str = ""  # beside the value, in small
    note: str = ""  # shown to whoever points at it
    heading: bool = False


@dataclass(frozen=True)
class Key:
    """What a colour means."""

    name: str
    colour: str


@dataclass(frozen=True)
class RowChart:
    """Rows over one scale; `guide` is a place on it that matters, with its word; `folded` are behind a click."""

    title: str
    about: str
    rows: Sequence[Row]
    ticks: Sequence[Tick] = ()
    legend: Sequence[Key] = ()
    guide: Tick | None = None
    folded: Sequence[Row] = ()

    @property
    def long_names(self) -> bool:
        """Whether names need more room than a word."""
        return any(len(row.name) > LONG for row in (*self.rows, *self.folded) if not row.heading)


@dataclass(frozen=True)
class Column:
    """A bar that stands, in percent of the height."""

    height: float
    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Panel:
    """Columns of one series."""

    name: str
    colour: str
    columns: Sequence[Column]


@dataclass(frozen=True)
class ColumnChart:
    """Panels side by side."""

    title: str
    about: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Tile:
    """A figure that is seen first."""

    figure: str
    name: str
    more: str = ""
    tone: Literal["", "good", "bad"] = ""


@dataclass(frozen=True)
class Table:
    """Figures in full, for whoever wants them; the first columns are words."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


def colour(place: int) -> str:
    """Of a series by its place."""
    return f"c{place % COLOURS}"


def interval_shapes(at: Sequence[float], colour: str) -> list[Shape]:
    """A dot with its whiskers, from low, middle and high."""
    low, middle, high = at
    return [Shape("line", low, high, colour), Shape("dot", middle, middle, colour)]


STRIP = "The bar holds the middle half, the line nine tenths, the mark is the median."


def waits_chart(title: str, about: str, waits: Sequence[tuple[str, str, Latency]]) -> RowChart:
    """Distributions over one scale: names, colours and times."""
    scale, ticks = time_scale([value for _, _, wait in waits for value in _five(wait)])
    rows = [
        Row(name, _strip(wait, scale, css), duration(wait.p50), f"p99 {duration(wait.p99)}", f"{wait.count} in all")
        for name, css, wait in waits
    ]
    return RowChart(title, f"{about} {STRIP}", rows, ticks)


def _five(wait: Latency) -> list[float]:
    """The 5th, 25th, 50th, 75th and 95th of a hundred."""
    last = len(wait.curve) - 1
    return [wait.curve[round(share * last)] for share in (0.05, 0.25, 0.5, 0.75, 0.95)]


def _strip(wait: Latency, scale: Scale, css: str) -> list[Shape]:
    low, lower, middle, upper, high = (scale.at(value) for value in _five(wait))
    box = Shape("box", lower, max(upper, lower + 0.4), css)
    return [Shape("line", low, high, css), box, Shape("tick", middle, middle, css)]


def table_of(markdown: str) -> Table:
    """Rows of a Markdown table; columns that are not aligned to the right are words."""
    head, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines())
    words = next((place for place, mark in enumerate(rule) if mark.endswith(":")), len(rule))
    return Table(head, rows, words)
