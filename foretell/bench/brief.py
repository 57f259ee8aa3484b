"""The last line of a bench: what a program wants to know, short enough to stand in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
