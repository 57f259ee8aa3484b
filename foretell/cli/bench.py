"""foretell bench: speedup of speculation on this machine, as ratios with confidence intervals."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .bench_check import CHECK
from .bench_common import check_output_paths
from .bench_compare import COMPARE
from .bench_load import LOAD
from .bench_never_slower import NEVER_SLOWER
from .bench_offline import DRAFTERS_BENCH, OFFLINE_BENCH
from .bench_synthetic import SYNTHETIC
from .common import Command


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


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM, which `timeout` sends, as Ctrl-C, so that results so far are reported."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
