"""Markdown report of `bench offline` and `bench drafters`, and the short JSON of every benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .intervals import shown
from .results import ALL, BenchResult, TaskCell


def markdown(result: BenchResult) -> str:
    """Format a table with a row for each task, batch size and variant, and columns for each temperature."""
    cells = [*result.cells, *result.overall]
    temperatures = list(dict.fromkeys(cell.temperature for cell in cells))
    batches = len({cell.batch for cell in cells}) > 1
    rows: dict[tuple[str, int, str], dict[float | None, TaskCell]] = {}
    for task in (*dict.fromkeys(cell.task for cell in result.cells), ALL):
        for cell in cells:
            if cell.task == task:
                rows.setdefault((task, cell.batch, cell.variant), {})[cell.temperature] = cell
    named = ["task", *(["batch"] if batches else []), "drafter"]
    head = list(named)
    for temperature in temperatures:
        at = "" if len(temperatures) == 1 else f", {temperature_label(temperature)}"
        head += [f"accepted per step{at}", f"time drafting{at}", f"speedup{at}"]
    lines = [_line([*head, "same text"]), _line(["---"] * len(named) + ["---:"] * (len(head) - len(named)) + ["---"])]
    for (_, batch, variant), found in rows.items():
        columns = [part for temperature in temperatures for part in _columns(found.get(temperature))]
        row = [_task(list(found.values())), *([str(batch)] if batches else []), variant]
        lines.append(_line([*row, *columns, _same(list(found.values()))]))
    return "\n".join(lines)


def remarks(result: BenchResult) -> list[str]:
    """Return the notes below the table."""
    lines = [
        "Speedup: time per token of plain decoding over that of the drafter, with a 95% t interval over prompts and "
        "rounds. Accepted per step counts the target's own token."
    ]
    noise = [cell.noise for cell in result.overall if cell.noise is not None]
    if noise:
        lines.append(f"Noise of the machine: means vary by at most {max(noise):.1%} either way.")
    if result.left_out:
        lines.append(f"Left out, too long for the model's context: {', '.join(result.left_out)}.")
    for cell in result.cells:
        if cell.same_text is False:
            where = f"{cell.variant}, {cell.task}, {temperature_label(cell.temperature)}"
            lines.append(f"NOT THE SAME TEXT: {where}: {'; '.join(cell.differing)}.")
    for cell in result.overall:
        if cell.drafter_failures:
            failed = f"{cell.variant} FAILED in {cell.drafter_failures} steps"
            lines.append(f"{failed}, {temperature_label(cell.temperature)}; see the log.")
    if not result.complete:
        lines.append("Stopped early: the table has the finished part.")
    return lines


def _line(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _task(cells: Sequence[TaskCell]) -> str:
    """Return the task; a variant that does not apply to every task has a mean over fewer."""
    return f"mean of {cells[0].tasks}" if cells[0].task == ALL else cells[0].task


def _columns(cell: TaskCell | None) -> list[str]:
    if cell is None:
        return ["", "", ""]
    ratio = shown(cell.speedup, cell.speedup_interval, "too short")
    return [f"{cell.accepted_per_step:.2f}", f"{cell.time['drafting']:.1%}", ratio]


def _same(cells: Sequence[TaskCell]) -> str:
    found = [cell.same_text for cell in cells]
    return "NO" if False in found else "yes" if True in found else "not promised"


def temperature_label(temperature: float | None) -> str:
    """Return a short label of a temperature; None is that of each request."""
    return "T as requested" if temperature is None else f"T={temperature:g}"


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
    """Return the main figures by task and over all; at the top level too if there is one variant."""
    found = {name: _short(result[name]) for name in (*TOP, *FIGURES) if name in result}
    rows = {name: [_row(row) for row in result[name]] for name in ("overall", "cells") if name in result}
    if len(rows.get("overall", ())) == 1:
        found |= {name: rows["overall"][0].get(name) for name in FIGURES}
    return found | rows


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _short(row[name]) for name in ROW if name in row}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return [_short(each) for each in value] if isinstance(value, list | tuple) else value
