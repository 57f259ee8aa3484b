"""foretell bench load: many callers of a server, with and without speculation."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

from foretell import __version__
from foretell.bench.http_client import Address, ClosedLoop, Level, Poisson
from foretell.bench.load import AUTO, LoadPlan, LoadResult, LoadVariant, check_servers, run_load, variants_of
from foretell.bench.workloads import load
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.options import add_options, given_options

from .bench_common import add_result_arguments, add_workload_arguments, numbers, tell, wholes
from .command import Command

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED = 1  # the exit code where a request failed, a text differs, or adapting is slower than it may be
BAR = 0.97  # of the better of the others, that adapting must reach
CONCURRENCY = (1, 4, 16, 64)
FIXED = 4
QUICK: dict[str, Any] = {"seconds": 12.0, "turns": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help="a server that runs (default: one is started for this)")
    group.add_argument("--fixed-url", metavar="URL", help="another, started with --num-speculative-tokens N")
    group.add_argument("--api-key", metavar="KEY", help="the key they want")
    group.add_argument(
        "--fixed",
        type=int,
        metavar="N",
        help=f"tokens guessed each step by the second server that is started; 0 starts none (default: {FIXED})",
    )
    add_workload_arguments(parser.add_argument_group("workload"))
    group = parser.add_argument_group("load")
    loops = ",".join(map(str, CONCURRENCY))
    group.add_argument(
        "--concurrency",
        type=wholes,
        metavar="N,N",
        help=f"so many callers, each of whom asks again when answered (default: {loops})",
    )
    group.add_argument("--rate", type=numbers, default=(), metavar="R,R", help="so many requests a second, at random")
    plan = LoadPlan(())
    group.add_argument("--seconds", type=float, help=f"of each load, shared by the arms ({plan.seconds:g})")
    group.add_argument("--turns", type=int, metavar="N", help=f"slices of each arm in that time ({plan.turns})")
    group.add_argument(
        "--max-tokens", type=int, default=plan.max_tokens, metavar="N", help=f"the most a text ({plan.max_tokens})"
    )
    group.add_argument("--quick", action="store_true", help="1 and 4 callers, one server: under a minute")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="default: as each request says, or the model recommends"
    )
    add_result_arguments(parser)
    add_options(parser.add_argument_group("model, of a server that is started"), EngineConfig)
    without = frozenset({"num_speculative_tokens", "num_speculative_tokens_per_batch_size"})
    add_options(
        parser.add_argument_group("speculation, of a server that is started"),
        SpeculationConfig,
        skip=without | {"workload"},
    )


def run(args: argparse.Namespace) -> int:
    from foretell.bench.progress import ProgressBar

    settings = given_options(args, EngineConfig) | given_options(args, SpeculationConfig)
    check_settings(args, settings)
    plan = plan_of(args)
    items = load(args.asked, args.data, args.tasks)
    with ExitStack() as stack:
        arms = variants_of(*servers(args, settings, stack))
        check_servers(arms, items, plan)
        found = run_load(arms, items, plan, ProgressBar(), conditions(args, plan, arms, settings))
    report(args, found)
    if found.stopped is not None:
        raise found.stopped
    slow = slower(found)
    for name in slow:
        print(f"SLOWER, {name}: auto is below {BAR:g} of the better of the others, beyond noise", file=sys.stderr)
    return FAILED if found.errors or not found.same_text or slow else 0


def slower(found: LoadResult) -> list[str]:
    """Loads at which adapting is below the bar even where noise is taken in its favour; one turn tells nothing."""
    below: list[str] = []
    for name in dict.fromkeys(cell.load for cell in found.cells):
        paces = {
            c.variant: c.speedup_interval for c in found.cells if c.load == name and c.speedup_interval is not None
        }
        auto, others = paces.pop(AUTO, None), [low for low, _ in paces.values()]
        if auto is not None and others and auto[1] < BAR * max(others):
            below.append(name)
    return below


def plan_of(args: argparse.Namespace) -> LoadPlan:
    """How much, with what a user asked for in the place of our own."""
    plan = LoadPlan(levels(args), max_tokens=args.max_tokens, temperature=args.temperature)
    given = {"seconds": args.seconds, "turns": args.turns}
    usual = QUICK if args.quick else {}
    return replace(plan, **usual | {name: value for name, value in given.items() if value is not None})


def check_settings(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Refuse what cannot be before anything is started."""
    EngineConfig(**given_options(args, EngineConfig))
    SpeculationConfig(**given_options(args, SpeculationConfig))
    if args.base_url is not None and settings:
        raise RequestError(next(iter(settings)), "is a setting of the server; start that with it")
    if args.base_url is None and args.fixed_url is not None:
        raise RequestError("fixed_url", "goes with --base-url, which names the server that adapts")
    for url in (args.base_url, args.fixed_url):
        if url is not None:
            Address.parse(url)


def levels(args: argparse.Namespace) -> tuple[Level, ...]:
    """Callers who wait for answers, callers who do not, or both."""
    usual = CONCURRENCY[:2] if args.quick else CONCURRENCY
    concurrency: Sequence[int] = args.concurrency or (() if args.rate else usual)
    return (*map(ClosedLoop, concurrency), *map(Poisson, args.rate))


def servers(args: argparse.Namespace, settings: dict[str, Any], stack: ExitStack) -> tuple[Address, Address | None]:
    """The one that adapts, and the one that does not; where none is named they are started."""
    from foretell.bench.server_process import start_server

    if args.base_url is not None:
        fixed = None if args.fixed_url is None else Address.parse(args.fixed_url, args.api_key)
        return Address.parse(args.base_url, args.api_key), fixed
    adaptive = Address.parse(stack.enter_context(start_server(settings)).url)
    fixed_length = (0 if args.quick else FIXED) if args.fixed is None else args.fixed
    if not fixed_length:
        return adaptive, None
    other = stack.enter_context(start_server(settings | {"num_speculative_tokens": fixed_length}))
    return adaptive, Address.parse(other.url)


def report(args: argparse.Namespace, found: LoadResult) -> None:
    from foretell.bench.load import markdown, remarks
    from foretell.bench.page.load import page

    tell(args, markdown(found), remarks(found), found.as_json(), lambda: page(found))


def conditions(
    args: argparse.Namespace, plan: LoadPlan, arms: list[LoadVariant], settings: dict[str, Any]
) -> dict[str, Any]:
    """What a reader needs to measure it again."""
    from foretell.bench.machine import describe_host

    return {
        "version": __version__,
        "date": str(date.today()),
        "model": None if args.base_url is not None else settings.get("model", EngineConfig.model),
        "server": args.base_url or "its own",
        "arms": [arm.name for arm in arms],
        "loads": [str(level) for level in plan.levels],
        "seconds": plan.seconds,
        "turns": plan.turns,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "workload": args.asked,
        "machine": describe_host(),
    }


LOAD = Command("many callers of a server, with and without speculation", add_arguments, run)
