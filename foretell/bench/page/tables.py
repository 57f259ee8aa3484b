"""A table of figures from the Markdown that the terminal shows: one source for both."""

from __future__ import annotations

from .charts import Table


def table_of(markdown: str) -> Table:
    """Rows of a Markdown table; columns that are not aligned to the right are words."""
    head, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines())
    words = next((place for place, mark in enumerate(rule) if mark.endswith(":")), len(rule))
    return Table(head, rows, words)
