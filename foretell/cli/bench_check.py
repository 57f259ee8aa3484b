"""foretell bench check URL: a dozen short requests, and whether speculation pays."""

from __future__ import annotations

import argparse
from datetime import date
from typing import TYPE_CHECKING

from foretell import __version__

from .bench_common import add_result_arguments, bench_command, print_report

if TYPE_CHECKING:
    from foretell.bench.check import CheckResult
    from foretell.bench.peers import Endpoint
    from foretell.bench.prompt import BenchPrompt

FAILED = 1  # exit code if a request failed or an output differs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="URL of a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server")
    parser.add_argument(
        "--quick", action="store_true", help="no effect, for consistency: this benchmark is always quick"
    )
    add_result_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from foretell.bench.check import run_check
    from foretell.bench.peers import Endpoint
    from foretell.cli.bench_common import ProgressBar

    endpoint = Endpoint.parse(args.url, args.api_key)
    endpoint.connect()
    found = run_check(endpoint, short_prompts(), ProgressBar(), conditions(endpoint))
    report(args, found)
    if found.stopped is not None:
        raise found.stopped
    return FAILED if found.reasons or found.facts.same_text is False else 0


def short_prompts() -> list[BenchPrompt]:
    """Return the two shortest prompts of each task, one of each first."""
    from foretell.bench.check import TASKS
    from foretell.bench.workloads import load, select

    ranked = sorted(load("own", tasks=TASKS), key=lambda item: len(str(item.messages)))
    items, _ = select(sorted(ranked, key=lambda item: TASKS.index(item.task)), 2, lambda item: True)
    return [*items[::2], *items[1::2]]


def report(args: argparse.Namespace, found: CheckResult) -> None:
    from foretell.bench.check import remarks, report_table
    from foretell.bench.page.check import page

    print_report(args, report_table(found), remarks(found), found.as_json(), lambda: page(found))


def conditions(endpoint: Endpoint) -> dict[str, object]:
    """Return the conditions to repeat the measurement; `machine` is the client's."""
    from foretell.bench.check import MAX_TOKENS
    from foretell.bench.machine import describe_host

    return {
        "version": __version__,
        "date": str(date.today()),
        "server": endpoint.describe(),
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "machine": describe_host(),
    }


CHECK = bench_command("bench check", add_arguments, run)
