"""foretell bench: the list of benchmarks, each of which is a command of the table."""

from __future__ import annotations

import argparse

from .command_table import BENCHES
from .common import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="BENCH")
    for name, entry in BENCHES.items():
        benches.add_parser(name.removeprefix("bench "), help=entry.summary)


def run(args: argparse.Namespace) -> int:
    args.parser.print_help()
    return 0


BENCH = Command("measure the speedup of speculation", add_arguments, run)
