"""The cells of a run as series: one for each arm, temperature and batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..report import degree
from ..results import Cell, Result
from .charts import Row, colour


@dataclass(frozen=True)
class Series:
    """A setting of the run; its name has what differs and no more."""

    name: str
    colour: str
    overall: Cell
    cells: Sequence[Cell]


MANY = 3  # series, above which tasks are behind a click

RowOf = Callable[[str, Cell, str], Row]  # of a name, a cell and a colour


def series_of(result: Result) -> list[Series]:
    """In the order they were measured."""
    settings = [_setting(cell) for cell in result.overall]
    _, temperatures, batches = (len({each[part] for each in settings}) > 1 for part in range(3))
    found: list[Series] = []
    for place, cell in enumerate(result.overall):
        words = [cell.arm, degree(cell.temperature) if temperatures else "", f"{cell.batch} at once" if batches else ""]
        mine = [each for each in result.cells if _setting(each) == _setting(cell)]
        found.append(Series(", ".join(filter(None, words)), colour(place), cell, mine))
    return found


def _setting(cell: Cell) -> tuple[str, float | None, int]:
    return cell.arm, cell.temperature, cell.batch


def by_task(series: Sequence[Series], row: RowOf) -> tuple[list[Row], list[Row]]:
    """Rows of a chart, and those behind a click.

    One series has a row for each task; several have a row each over all tasks, and then a heading for each task; where
    there are many, the tasks are behind a click.
    """
    if len(series) == 1:
        (only,) = series
        rows = [row(cell.task, cell, only.colour) for cell in only.cells]
        return [*rows, row("all tasks", only.overall, only.colour)], []
    found: list[Row] = []
    for task in dict.fromkeys(cell.task for each in series for cell in each.cells):
        mine = [row(each.name, cell, each.colour) for each in series for cell in each.cells if cell.task == task]
        found += [Row(task, heading=True), *mine]
    overall = [Row("all tasks", heading=True), *(row(each.name, each.overall, each.colour) for each in series)]
    return (overall, found) if len(series) > MANY else ([*overall, *found], [])
