"""Shared by benchmarks: list-valued flags, progress, output of results, and the target before it is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from foretell.bench.workloads import OWN, WORKLOADS
from foretell.config import EngineConfig
from foretell.options import given_options

from .command_table import BENCHES
from .common import Command, add_output_arguments, check_output_path, check_writable, output_result, write_atomic
from .interrupts import sigterm_as_interrupt
from .tables import open_console, print_blocks

if TYPE_CHECKING:
    from foretell.build.model_source import ModelSource
    from foretell.utils.report_table import ReportTable

AUTO = "auto"


def bench_command(
    name: str, add_arguments: Callable[[argparse.ArgumentParser], None], run: Callable[[argparse.Namespace], int]
) -> Command:
    """Return the command of a benchmark: output files are checked first, and SIGTERM stops it as Ctrl-C does."""

    def checked(args: argparse.Namespace) -> int:
        check_output_paths(args)
        with sigterm_as_interrupt():
            return run(args)

    return Command(BENCHES[name].summary, add_arguments, checked)


def open_target(args: argparse.Namespace) -> ModelSource:
    """Open the target without loading its weights."""
    from foretell.build.model_source import open_model, print_progress

    config = EngineConfig(**given_options(args, EngineConfig))
    return open_model(config.model, config, print_progress)


def weights(target: ModelSource) -> str:
    """Return the dtype or quantization of its weights."""
    return target.cpu_quantization or str(target.dtype).removeprefix("torch.")


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for JSON and HTML output."""
    add_output_arguments(parser)
    parser.add_argument("--html", metavar="FILE", type=Path, help="write an HTML report with charts to FILE")


def add_workload_arguments(group: argparse._ArgumentGroup) -> None:
    # SpeculationConfig has a `workload` too, so this one has another attribute name.
    known = f"{', '.join(WORKLOADS)} (default: {OWN})"
    group.add_argument("--workload", dest="asked", default=OWN, metavar="NAME", help=known)
    group.add_argument("--data", type=Path, metavar="FILE", help="file of the workload, or its folder")
    group.add_argument("--tasks", type=name_list, default=(), metavar="A,B", help="only these tasks (default: all)")


def check_output_paths(args: argparse.Namespace) -> None:
    """Check before any work that the output files can be written."""
    check_output_path(args)
    if args.html is not None:
        check_writable(args.html, "html")


def print_report(
    args: argparse.Namespace,
    table: ReportTable,
    remarks: Sequence[str],
    result: Mapping[str, Any],
    page: Callable[[], str],
) -> None:
    """Print the table with remarks, into a pipe a JSON summary line too; with --json only the full object."""
    from foretell.bench.report import brief

    console = open_console(to_stderr=args.json)
    print_blocks(console, [table, "\n".join(remarks)])
    output_result(result, args)
    if args.html is not None:
        write_atomic(args.html, page())
        console.print(f"HTML report: {args.html}", soft_wrap=True)
    if not args.json and not sys.stdout.isatty():
        print(json.dumps(brief(result), ensure_ascii=False))


def name_list(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of names, without duplicates."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def nonempty(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of at least one name."""
    found = name_list(text)
    if not found:
        raise ValueError("the list is empty")
    return found


def numbers(text: str) -> tuple[float, ...]:
    """Parse a comma-separated list of numbers such as 0,1."""
    try:
        return tuple(float(word) for word in nonempty(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1") from None


def integers(text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of integers such as 2,4,8."""
    try:
        return tuple(int(word) for word in nonempty(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 2,4,8") from None


def draft_lengths(text: str) -> tuple[int | None, ...]:
    """Parse comma-separated draft lengths; `auto` (None) is an adaptive one."""
    try:
        return tuple(None if word == AUTO else int(word) for word in nonempty(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as auto,4,8") from None


LINE_SECONDS = 10.0  # seconds between two lines without a terminal
WIDTH = 24  # characters of the bar
EIGHTHS = ("", *"▏▎▍▌▋▊▉")


class ProgressBar:
    """A progress bar that is overwritten on a terminal; elsewhere a new line every `LINE_SECONDS`."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.stream, self.clock = stream or sys.stderr, clock
        self.began = clock()
        self.last_line: float | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        now, last = self.clock(), done == total
        line = f"[{done}/{total}] {what}{self._left(now - self.began, done, total)}"
        if self.stream.isatty():
            # The cursor waits at the start of the line, where the report of a stopped run begins.
            print(f"\x1b[K{bar(done, total)} {line}", end="\n" if last else "\r", file=self.stream, flush=True)
        elif last or self.last_line is None or now - self.last_line >= LINE_SECONDS:
            self.last_line = now
            print(line, file=self.stream, flush=True)

    @staticmethod
    def _left(seconds: float, done: int, total: int) -> str:
        if not done or done == total:
            return ""
        left = seconds / done * (total - done)
        return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"


def bar(done: int, total: int) -> str:
    """Draw the finished part in eighths of a character."""
    eighths = round(8 * WIDTH * done / total) if total else 8 * WIDTH
    full, rest = divmod(eighths, 8)
    return str(("█" * full + EIGHTHS[rest]).ljust(WIDTH, "░"))
