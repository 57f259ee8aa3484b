"""Tables of reports fit the terminal, and a colour never says more than a word."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from foretell.bench import check, compare, load, never_slower, report, synthetic
from foretell.bench.intervals import compared
from foretell.cli.main import build_parser, main
from foretell.cli.tables import column_widths, open_console, print_blocks, print_columns
from foretell.utils.report_table import ReportTable
from tests.bench import pages
from tests.bench.test_page import result
from tests.laws.test_layers import loaded_by

REPORTS: dict[str, Callable[[], tuple[ReportTable, list[str]]]] = {}


def both(module: Any, found: Any) -> tuple[ReportTable, list[str]]:
    return module.report_table(found), module.remarks(found)


REPORTS |= {
    "offline": lambda: both(report, result()),
    "a grid": lambda: both(report, result(("ngram, adaptive", "suffix, 3 tokens", "model:smollm2-135m"), (1, 2))),
    "compare": lambda: both(compare, pages.compared("some text")),
    "check": lambda: both(check, pages.checked("some text")),
    "load": lambda: both(load, pages.loaded()),
    "synthetic": lambda: both(synthetic, pages.set_at_a_rate()),
    "never-slower": lambda: both(never_slower, pages.held_to_a_bar()),
}


def printed(blocks: list[str | ReportTable], width: int, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, **options)
    print_blocks(console, blocks)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_fits_its_terminal_and_loses_no_word(name: str, width: int) -> None:
    table, remarks = REPORTS[name]()
    text = printed([table, "\n".join(remarks)], width)
    assert max(map(len, text.splitlines())) <= width
    words = {word for row in (table.head, *table.rows) for cell in row for word in cell.split()}
    assert words <= set(text.split()), "cells are wrapped between words"


def test_names_of_columns_are_wrapped_before_cells() -> None:
    table = ReportTable(("a name of many words", "b"), [("two words", "1"), ("x", "22")])
    assert column_widths(table, 80) == ([20, 2], 2)
    assert column_widths(table, 14) == ([9, 2], 2), "the cell is whole, the name has three lines"
    assert column_widths(table, 12) == ([9, 2], 1), "then the gap is narrower"
    assert column_widths(table, 10) == ([7, 2], 1), "then the cell has two lines"
    assert column_widths(table, 3) == ([5, 2], 1), "a word is the least"
    assert column_widths(ReportTable(("a", "b"), []), 80) == ([1, 1], 2)


def test_a_narrow_terminal_folds_words_instead_of_cutting_them() -> None:
    text = printed([ReportTable(("drafter", "speedup"), [("suffix", "1.25")])], 10)
    assert max(map(len, text.splitlines())) <= 10 and "…" not in text
    assert "".join(text.split()).count("1.25") == 1 or "1.2" in text


def test_a_ratio_has_a_word_unless_its_interval_includes_one() -> None:
    assert compared(1.25, (1.2, 1.3)) == ("1.25x faster", "1.20-1.30")
    assert compared(0.9, (0.8, 0.95)) == ("0.90x slower", "0.80-0.95")
    assert compared(1.02, (0.98, 1.05)) == ("1.02x", "0.98-1.05")
    assert compared(1.3, (0.01, 170.0)) == ("1.30x", "wide")
    assert compared(1.25, None) == ("1.25x faster", "-")
    assert compared(None, None, "too short") == ("too short", "-")


def test_faster_is_green_and_slower_is_red_on_a_terminal_alone() -> None:
    table = ReportTable(("drafter", "speedup"), [("a", "1.25x faster"), ("b", "0.80x slower"), ("c", "1.00")])
    text = printed([table], 80, force_terminal=True, color_system="standard")
    assert "\x1b[32m1.25x faster" in text and "\x1b[1;31m0.80x slower" in text and "m1.00" not in text
    assert "\x1b" not in printed([table], 80)


def test_text_in_brackets_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_blocks(open_console(), ["[bold]x[/bold] :smile:", ReportTable(("[a]",), [("[red]1",)])])
    out, err = capsys.readouterr()
    assert "[bold]x[/bold] :smile:" in out and "[a]" in out and "[red]1" in out and not err
    print_blocks(open_console(to_stderr=True), ["y"])
    assert capsys.readouterr() == ("", "y\n")


def test_the_command_line_loads_rich_only_to_print() -> None:
    modules = "foretell.cli.tables, foretell.cli.bench, foretell.cli.plan, foretell.cli.tune, foretell.cli.train"
    assert "rich" not in loaded_by(f"import {modules}")


def test_a_name_is_not_wrapped_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    name = "eagle:owner/a-name-to-copy"
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout.isatty", lambda: True, raising=False)
        print_columns(("", "", ""), [(name, "400M", "a remark that is wider than the rest of the line")])
    shown = capsys.readouterr().out
    assert name in shown and max(map(len, shown.splitlines())) <= 50


def test_remarks_that_have_no_room_are_below_their_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("an/id-of-thirty-two-characters-xx", "420M", "to download"), ("b/c", "1B", "words " * 12)]
    monkeypatch.setenv("COLUMNS", "56")
    print_columns(("model", "size", ""), rows, right=(1,))
    assert capsys.readouterr().out.splitlines() == [
        "model                              size",
        "an/id-of-thirty-two-characters-xx  420M  to download",
        "b/c                                  1B",
        f"{' ' * 6}words words words words words words words words",
        f"{' ' * 6}words words words words",
    ]


def test_the_drafters_of_a_long_id_fit_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["pairs", "llama-3.1-8b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  eagle:lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge  420M   to download" in lines
    assert max(map(len, lines)) <= 80 and len(lines) < 40
    assert any("--draft-corpus FOLDER" in line for line in lines)


def test_every_page_of_help_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, parser in build_parser()[1].items():
        long = [line for line in parser.format_help(everything=True).splitlines() if len(line) > 80]
        assert not long, name


def test_choices_that_have_a_placeholder_are_in_the_help() -> None:
    shown = " ".join(build_parser(["serve"])[1]["serve"].format_help(everything=True).split())
    assert "--tool-call-parser FORMAT" in shown and ": auto, hermes, llama3, mistral" in shown
