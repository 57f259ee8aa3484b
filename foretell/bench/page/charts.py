"""What charts are made of; templates/charts.html draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .scales import Tick

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
