"""Reports on a terminal: tables and notes within its width, with colours for results, and aligned columns."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod, RenderableType
    from rich.table import Table

    from foretell.utils.report_table import ReportTable

PIPE_COLUMNS = 1000  # wide enough that no line is wrapped for a program that reads it
GAP = 2  # characters between two columns
LEAST_ROOM = 30  # characters of the last column; with fewer its phrases are printed below
BELOW = " " * 6  # the indent of those

# A cell is coloured by its last word, so that the colour never says more than the text.
STYLES = {
    "faster": "green",
    "held": "green",
    "slower": "bold red",
    "inconclusive": "yellow",
    "NO": "bold red",
    "big": "bold red",
}


def open_console(to_stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints text as it is; its width is the given one, the terminal's, $COLUMNS, or 80."""
    from rich.console import Console

    return Console(stderr=to_stderr, width=width, highlight=False, markup=False, emoji=False)


def print_blocks(console: Console, blocks: Sequence[str | ReportTable]) -> None:
    """Print paragraphs and tables with an empty line between them."""
    for index, block in enumerate(blocks):
        if index:
            console.print()
        if isinstance(block, str):
            console.print(block)
            continue
        if block.title:
            console.print(block.title, style="bold")
        console.print(terminal_table(block, console.width))


def terminal_table(table: ReportTable, width: int) -> Table:
    """Return the table without its title for a terminal of that width."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    widths, gap = column_widths(table, width)
    found = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        show_header=any(table.head),
        padding=(0, gap - 1, 0, 0),
    )
    for index, (name, size) in enumerate(zip(table.head, widths, strict=True)):
        found.add_column(name, justify="left" if index < table.words else "right", width=size, overflow="fold")
    for row in table.rows:
        found.add_row(*map(styled, row))
    return found


def column_widths(table: ReportTable, width: int) -> tuple[list[int], int]:
    """Return widths of columns that fit the terminal, and the gap between two of them.

    Names of columns are wrapped first, then the gap becomes narrower, then cells are wrapped, always between words.
    """
    columns = list(zip(*table.rows, strict=True)) or [("",)] * len(table.head)
    cells = [max(map(len, column)) for column in columns]
    widths = [max(len(name), size) for name, size in zip(table.head, cells, strict=True)]
    for gap, wrapped in ((2, False), (1, True)):
        least = [
            max(longest_word(name), *map(longest_word, column) if wrapped else (size,))
            for name, column, size in zip(table.head, columns, cells, strict=True)
        ]
        excess = sum(widths) + gap * len(widths) - 1 - width
        while excess > 0 and (spare := [i for i in range(len(widths)) if widths[i] > least[i]]):
            widths[max(spare, key=lambda i: widths[i])] -= 1
            excess -= 1
        if excess <= 0:
            break
    return widths, gap


def longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def styled(cell: str) -> RenderableType:
    """Return a cell in the colour of its last word."""
    from rich.text import Text

    last = cell.rsplit(maxsplit=1)[-1:] or [""]
    return Text(cell, style=STYLES.get(last[0], ""))


def print_columns(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> None:
    """Print aligned columns; those in `right` are right-aligned. Without a header text, the header is left out.

    Names in the first column are not wrapped, so that they can be copied; phrases are. Remarks in a last column without
    a name are printed below their rows where little room is left after them. A pipe gets long lines unless $COLUMNS is
    set.
    """
    rows, right = list(rows), frozenset(right)
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    columns = open_console(width=width).width
    are_names = not any(" " in row[0].strip() for row in rows)
    if not are_names or headers[-1] or _has_room(rows, columns):
        print("\n".join(_aligned(headers, rows, right, are_names, columns)))
        return
    lines = _aligned(headers[:-1], [row[:-1] for row in rows], right, are_names, PIPE_COLUMNS)
    offset = max(map(len, lines)) + GAP
    for line, remark in zip(lines, [*[""] * (len(lines) - len(rows)), *(row[-1] for row in rows)], strict=True):
        if offset + len(remark) <= columns:
            print(f"{line:{offset}}{remark}".rstrip())
        else:
            print("\n".join([line, *textwrap.wrap(remark, columns, initial_indent=BELOW, subsequent_indent=BELOW)]))


def _has_room(rows: Sequence[Sequence[str]], width: int) -> bool:
    """Return whether the last column fits after the others, or has enough room to be wrapped there."""
    room = width - sum(max(map(len, column)) + GAP for column in list(zip(*rows, strict=True))[:-1])
    return room >= min(LEAST_ROOM, max((len(row[-1]) for row in rows), default=0))


def _aligned(
    headers: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int], are_names: bool, width: int
) -> list[str]:
    """Return the lines of a table of that width."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=any(headers))
    for column, header in enumerate(headers):
        side: JustifyMethod = "right" if column in right else "left"
        table.add_column(header, justify=side, overflow="fold", no_wrap=are_names and column == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = open_console(width=width)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
