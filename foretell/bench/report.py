"""Results for people: Markdown that can go into a page as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretell.bench.intervals import shown
from foretell.bench.results import ALL, Cell, Result


def markdown(result: Result) -> str:
    """A row for each task, batch size and arm, and columns for each temperature."""
    cells = [*result.cells, *result.overall]
    temperatures = list(dict.fromkeys(cell.temperature for cell in cells))
    batches = len({cell.batch for cell in cells}) > 1
    rows: dict[tuple[str, int, str], dict[float | None, Cell]] = {}
    for task in (*dict.fromkeys(cell.task for cell in result.cells), ALL):
        for cell in cells:
            if cell.task == task:
                rows.setdefault((task, cell.batch, cell.arm), {})[cell.temperature] = cell
    named = ["task", *(["at once"] if batches else []), "drafter"]
    head = list(named)
    for temperature in temperatures:
        at = "" if len(temperatures) == 1 else f", {degree(temperature)}"
        head += [f"accepted per step{at}", f"time drafting{at}", f"ratio to plain{at}"]
    lines = [_line([*head, "same text"]), _line(["---"] * len(named) + ["---:"] * (len(head) - len(named)) + ["---"])]
    for (_, batch, arm), found in rows.items():
        columns = [part for temperature in temperatures for part in _columns(found.get(temperature))]
        row = [_task(list(found.values())), *([str(batch)] if batches else []), arm]
        lines.append(_line([*row, *columns, _same(list(found.values()))]))
    return "\n".join(lines)


def remarks(result: Result) -> list[str]:
    """What a reader of the table must know."""
    lines = [
        "Ratio: plain decoding's time a token over the drafter's, with a 95% t interval over prompts and rounds; "
        "accepted per step counts the target's own token."
    ]
    noise = [cell.noise for cell in result.overall if cell.noise is not None]
    if noise:
        lines.append(f"Noise of the machine on a mean: at most {max(noise):.1%} either way.")
    if result.left_out:
        lines.append(f"Left out, too long for the model: {', '.join(result.left_out)}.")
    for cell in result.cells:
        if cell.same_text is False:
            lines.append(
                f"NOT THE SAME TEXT: {cell.arm}, {cell.task}, {degree(cell.temperature)}: {'; '.join(cell.differing)}."
            )
    for cell in result.overall:
        if cell.drafter_failures:
            lines.append(
                f"{cell.arm} FAILED in {cell.drafter_failures} steps, {degree(cell.temperature)}; see the log."
            )
    if not result.complete:
        lines.append("Stopped before the end: the table has what was finished.")
    return lines


def _line(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _task(cells: Sequence[Cell]) -> str:
    """An arm that does not apply to every task has a mean of fewer."""
    return f"mean of {cells[0].tasks}" if cells[0].task == ALL else cells[0].task


def _columns(cell: Cell | None) -> list[str]:
    if cell is None:
        return ["", "", ""]
    ratio = shown(cell.speedup, cell.speedup_interval, "too short")
    return [f"{cell.accepted_per_step:.2f}", f"{cell.time['drafting']:.1%}", ratio]


def _same(cells: Sequence[Cell]) -> str:
    found = [cell.same_text for cell in cells]
    return "NO" if False in found else "yes" if True in found else "not promised"


def degree(temperature: float | None) -> str:
    """A temperature in a word."""
    return "T as asked" if temperature is None else f"T={temperature:g}"


TOP = ("bench", "version", "model", "complete", "same_text", "verdict", "cause", "errors", "requests_per_second")
ROW = (
    "task",
    "load",
    "temperature",
    "batch",
    "drafter",
    "arm",
    "rate",
    "length",
    "mode",
    "accepted_per_step",
    "expected_per_step",
    "speedup",
    "speedup_interval",
    "tokens_per_second",
    "same_text",
    "verdict",
)
FIGURES = ("speedup", "speedup_interval", "accepted_per_step")
DIGITS = 4


def brief(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of each task and over all; those of the whole run on top where there is one arm."""
    found = {name: _rounded(result[name]) for name in (*TOP, *FIGURES) if name in result}
    rows = {name: [_row(row) for row in result[name]] for name in ("overall", "cells") if name in result}
    if len(rows.get("overall", ())) == 1:
        found |= {name: rows["overall"][0].get(name) for name in FIGURES}
    return found | rows


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _rounded(row[name]) for name in ROW if name in row}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
