"""foretell bench: speedup of speculation on this machine, as ratios with confidence intervals."""

from __future__ import annotations

import argparse

from .bench_check import CHECK
from .bench_common import check_output_paths
from .bench_compare import COMPARE
from .bench_load import LOAD
from .bench_never_slower import NEVER_SLOWER
from .bench_offline import DRAFTERS_BENCH, OFFLINE_BENCH
from .bench_synthetic import SYNTHETIC
from .common import Command
from .interrupts import sigterm_as_interrupt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="BENCH")
    for name, command in BENCHES.items():
        sub = benches.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        command.add_arguments(sub)
        sub.set_defaults(parser=sub)


def run_bench(args: argparse.Namespace) -> int:
    if args.bench is None:
        args.parser.print_help()
        return 0
    check_output_paths(args)
    with sigterm_as_interrupt():
        return BENCHES[args.bench].run(args)


BENCHES = {
    "offline": OFFLINE_BENCH,
    "drafters": DRAFTERS_BENCH,
    "synthetic": SYNTHETIC,
    "never-slower": NEVER_SLOWER,
    "load": LOAD,
    "compare": COMPARE,
    "check": CHECK,
}
BENCH = Command("measure the speedup of speculation", add_arguments, run_bench)
