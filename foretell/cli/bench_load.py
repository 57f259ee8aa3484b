"""foretell bench load: load test of a server, with and without speculation."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

from foretell import __version__
from foretell.bench.settings import LoadSettings
from foretell.bench.workloads import load
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.options import add_options, given_options

from .bench_common import add_result_arguments, add_workload_arguments, bench_command, integers, numbers, print_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretell.bench.http_client import Address, Level
    from foretell.bench.load import LoadResult, LoadVariant

FAILED = 1  # exit code if a request failed, an output differs, or auto is slower than allowed
MIN_RATIO = 0.97  # throughput that auto must reach, relative to the better of the others
CONCURRENCY = (1, 4, 16, 64)
FIXED = 4
QUICK: dict[str, Any] = {"seconds": 12.0, "turns": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", help="running server (default: start one)")
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help="the same as URL")
    group.add_argument("--fixed-url", metavar="URL", help="second server, started with --num-speculative-tokens N")
    group.add_argument("--api-key", metavar="KEY", help="API key of the servers")
    group.add_argument(
        "--fixed",
        type=int,
        metavar="N",
        help=f"draft tokens per step of the second server started; 0 starts none (default: {FIXED})",
    )
    add_workload_arguments(parser.add_argument_group("workload"))
    group = parser.add_argument_group("load")
    loops = ",".join(map(str, CONCURRENCY))
    group.add_argument(
        "--concurrency",
        type=integers,
        metavar="N,N",
        help=f"closed loop: concurrent clients, each sending its next request when answered (default: {loops})",
    )
    group.add_argument(
        "--rate", type=numbers, default=(), metavar="R,R", help="open loop: requests per second, with Poisson arrivals"
    )
    settings = LoadSettings(())
    group.add_argument("--seconds", type=float, help=f"seconds per load, shared by the variants ({settings.seconds:g})")
    group.add_argument(
        "--turns", type=int, metavar="N", help=f"time slices per variant in that time ({settings.turns})"
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        default=settings.max_tokens,
        metavar="N",
        help=f"maximum output tokens ({settings.max_tokens})",
    )
    group.add_argument("--quick", action="store_true", help="1 and 4 clients, one server: under a minute")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature (default: that of each request, else the model's)",
    )
    add_result_arguments(parser)
    add_options(parser.add_argument_group("model of a server started here"), EngineConfig)
    without = frozenset({"num_speculative_tokens", "num_speculative_tokens_per_batch_size"})
    add_options(
        parser.add_argument_group("speculation of a server started here"),
        SpeculationConfig,
        skip=without | {"workload"},
    )


def run(args: argparse.Namespace) -> int:
    from foretell.bench.load import check_servers, run_load, variants_of
    from foretell.cli.bench_common import ProgressBar

    if args.url is not None and args.base_url is not None:
        raise RequestError("base_url", "names a second server to load; give one URL")
    args.base_url = args.base_url or args.url
    options = given_options(args, EngineConfig) | given_options(args, SpeculationConfig)
    check_options(args, options)
    settings = settings_of(args)
    items = load(args.asked, args.data, args.tasks)
    with ExitStack() as stack:
        variants = variants_of(*servers(args, options, stack))
        check_servers(variants, items, settings)
        found = run_load(variants, items, settings, ProgressBar(), conditions(args, settings, variants, options))
    report(args, found)
    if found.stopped is not None:
        raise found.stopped
    slow = slower(found)
    for name in slow:
        print(
            f"SLOWER, {name}: auto is significantly below {MIN_RATIO:g}x of the better of the others", file=sys.stderr
        )
    return FAILED if found.errors or not found.same_text or slow else 0


def slower(found: LoadResult) -> list[str]:
    """Return the loads at which auto is below `MIN_RATIO` even at the upper end of its confidence interval."""
    from foretell.bench.load import AUTO

    below: list[str] = []
    for name in dict.fromkeys(cell.load for cell in found.cells):
        paces = {
            c.variant: c.speedup_interval for c in found.cells if c.load == name and c.speedup_interval is not None
        }
        auto, others = paces.pop(AUTO, None), [low for low, _ in paces.values()]
        if auto is not None and others and auto[1] < MIN_RATIO * max(others):
            below.append(name)
    return below


def settings_of(args: argparse.Namespace) -> LoadSettings:
    """Return the settings with the values of given flags."""
    settings = LoadSettings(levels(args), max_tokens=args.max_tokens, temperature=args.temperature)
    given = {"seconds": args.seconds, "turns": args.turns}
    usual = QUICK if args.quick else {}
    return replace(settings, **usual | {name: value for name, value in given.items() if value is not None})


def check_options(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Validate the flags before anything is started."""
    from foretell.bench.http_client import Address

    EngineConfig(**given_options(args, EngineConfig))
    SpeculationConfig(**given_options(args, SpeculationConfig))
    if args.base_url is not None and options:
        raise RequestError(next(iter(options)), "is a server setting; start the server with it")
    if args.base_url is None and args.fixed_url is not None:
        raise RequestError("fixed_url", "needs --base-url, the server with adaptive drafts")
    for url in (args.base_url, args.fixed_url):
        if url is not None:
            Address.parse(url)


def levels(args: argparse.Namespace) -> tuple[Level, ...]:
    """Return the closed-loop and open-loop loads."""
    from foretell.bench.http_client import ClosedLoop, Poisson

    usual = CONCURRENCY[:2] if args.quick else CONCURRENCY
    concurrency: Sequence[int] = args.concurrency or (() if args.rate else usual)
    return (*map(ClosedLoop, concurrency), *map(Poisson, args.rate))


def servers(args: argparse.Namespace, options: dict[str, Any], stack: ExitStack) -> tuple[Address, Address | None]:
    """Return the adaptive server and the fixed one, started unless named."""
    from foretell.bench.http_client import Address
    from foretell.bench.server_process import start_server

    if args.base_url is not None:
        fixed = None if args.fixed_url is None else Address.parse(args.fixed_url, args.api_key)
        return Address.parse(args.base_url, args.api_key), fixed
    adaptive = Address.parse(stack.enter_context(start_server(options)).url)
    fixed_length = (0 if args.quick else FIXED) if args.fixed is None else args.fixed
    if not fixed_length:
        return adaptive, None
    other = stack.enter_context(start_server(options | {"num_speculative_tokens": fixed_length}))
    return adaptive, Address.parse(other.url)


def report(args: argparse.Namespace, found: LoadResult) -> None:
    from foretell.bench.load import remarks, report_table
    from foretell.bench.page.load import page

    print_report(args, report_table(found), remarks(found), found.as_json(), lambda: page(found))


def conditions(
    args: argparse.Namespace, settings: LoadSettings, variants: list[LoadVariant], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the conditions to repeat the measurement."""
    from foretell.bench.machine import describe_host

    return {
        "version": __version__,
        "date": str(date.today()),
        "model": None if args.base_url is not None else options.get("model", EngineConfig.model),
        "server": args.base_url or "its own",
        "arms": [variant.name for variant in variants],
        "loads": [str(level) for level in settings.levels],
        "seconds": settings.seconds,
        "turns": settings.turns,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "workload": args.asked,
        "machine": describe_host(),
    }


LOAD = bench_command("bench load", add_arguments, run)
