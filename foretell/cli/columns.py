"""Aligned columns of text in the terminal, by rich."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

PIPE_COLUMNS = 1000  # wide enough that no line is wrapped for a program that reads it


def print_columns(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> None:
    """Print aligned columns; those in `right` are right-aligned. Without a header text, the header is left out."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headers))
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if column in set(right) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
