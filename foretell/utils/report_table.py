"""The table of a report, for a terminal or a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReportTable:
    """Column names and rows of text; the first `words` columns are aligned left, figures right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    title: str = ""
