"""Report of `bench offline` and `bench drafters`, and the short JSON of every benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.utils.report_table import ReportTable

from .intervals import INTERVAL, WIDE, WIDE_RATIO, compared
from .results import ALL, BenchResult

LONG_ENOUGH = 96  # output tokens; shorter outputs give a smaller speedup
SAME_TEXT = {True: "yes", False: "NO", None: "not promised"}


def report_table(result: BenchResult) -> ReportTable:
    """Return a table with a row for each task, batch size, temperature and variant; means over tasks come last."""
    cells = [*result.cells, *result.overall]
    batches = len({cell.batch for cell in cells}) > 1
    temperatures = len({cell.temperature for cell in cells}) > 1
    head = ["task", *(["batch"] if batches else []), *(["T"] if temperatures else []), "drafter"]
    rows = [
        [
            f"mean of {cell.tasks}" if cell.task == ALL else cell.task,
            *([str(cell.batch)] if batches else []),
            *([temperature_name(cell.temperature)] if temperatures else []),
            cell.variant,
            f"{cell.accepted_per_step:.2f}",
            f"{cell.time['drafting']:.1%}",
            *compared(cell.speedup, cell.speedup_interval, "too short"),
            SAME_TEXT[cell.same_text],
        ]
        for cell in cells
    ]
    return ReportTable(
        [*head, "accepted per step", "time drafting", "speedup", INTERVAL, "same text"], rows, words=len(head)
    )


def remarks(result: BenchResult) -> list[str]:
    """Return the notes below the table."""
    lines = [
        "Speedup: time per token of plain decoding over that of the drafter, with a 95% t interval over prompts and "
        "rounds. Accepted per step counts the target's own token."
    ]
    limit = result.conditions.get("max_tokens")
    if limit is not None and limit < LONG_ENOUGH:
        lines.append(
            f"Outputs of at most {limit} tokens understate the speedup of longer ones, because drafters learn from the "
            "output. At 24 tokens, smollm2-135m accepts 38% fewer tokens per step than in the full run."
        )
    cells = (*result.cells, *result.overall)
    if any(compared(cell.speedup, cell.speedup_interval)[1] == WIDE for cell in cells):
        lines.append(f"An interval is {WIDE} if it spans more than a factor of {WIDE_RATIO:g}: raise --per-task.")
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
        lines.append("Stopped early: the table has the finished part. Run the command again for all of it.")
    return lines


def temperature_label(temperature: float | None) -> str:
    """Return a short label of a temperature; None is that of each request."""
    name = temperature_name(temperature)
    return f"T {name}" if temperature is None else f"T={name}"


def temperature_name(temperature: float | None) -> str:
    """Return a temperature; None is that of each request."""
    return "as requested" if temperature is None else f"{temperature:g}"


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
