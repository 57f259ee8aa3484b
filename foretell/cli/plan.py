"""foretell plan: expected speed and memory of models on devices, by calculation."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.errors import RequestError
from foretell.options import add_options, given_options, nearest
from foretell.plan.config import PlanConfig, resolve_inputs
from foretell.plan.fleet.config import FleetConfig, trial_of

from .common import Command, add_output_arguments, check_writable, output_result, write_atomic
from .tables import open_console, print_blocks

if TYPE_CHECKING:
    from foretell.plan.planner import PlanResult

FLEET = "fleet"
MAX_BATCH = 1 << 16
DEFAULT_BATCHES, DEFAULT_CONTEXT = "1..64", "2k"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # A positional, not a subparser, which would take the value of a mistyped flag for a command.
    parser.add_argument(
        "kind",
        nargs="?",
        metavar=FLEET,
        help="simulate how many replicas a demand needs; see `foretell plan fleet --help` (default: plan one replica)",
    )
    add_groups(parser, is_fleet=False)


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(kind=FLEET)
    add_groups(parser, is_fleet=True)


def add_groups(parser: argparse.ArgumentParser, is_fleet: bool) -> None:
    """Add all options; those of the other kind of plan have their own page of help."""
    on_this_page, on_the_other = None, argparse.SUPPRESS
    models = "models and devices" + (" of one replica" if is_fleet else "")
    add_options(parser.add_argument_group(models), PlanConfig)
    add_load_arguments(parser.add_argument_group("load", on_the_other if is_fleet else on_this_page))
    add_options(parser.add_argument_group("demand and fleet", on_this_page if is_fleet else on_the_other), FleetConfig)
    add_output_arguments(parser)


def add_load_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch",
        type=batches,
        metavar="N,N",
        help=f"batch sizes: 8, 1,8,32, or 1..64 for powers of two (default: {DEFAULT_BATCHES})",
    )
    group.add_argument(
        "--context",
        type=contexts,
        metavar="N,N",
        help=f"context lengths in tokens: 512, 8k or 1k,8k (default: {DEFAULT_CONTEXT})",
    )
    group.add_argument("--svg", type=Path, metavar="FILE", help="write the plots as SVG")
    group.add_argument("--html", type=Path, metavar="FILE", help="write an HTML report with tables and plots")
    group.add_argument("--no-plot", action="store_true", help="print no plots")


def run(args: argparse.Namespace) -> int:
    if args.kind not in (None, FLEET):
        raise RequestError("plan", f"has no {args.kind!r}; {nearest(args.kind, [FLEET])}")
    for name in ("out", "svg", "html"):
        if getattr(args, name) is not None:
            check_writable(getattr(args, name), name)
    return run_fleet(args) if args.kind == FLEET else run_steps(args)


def run_steps(args: argparse.Namespace) -> int:
    from foretell.plan.planner import PlanQuery, make_plan

    for name in given_options(args, FleetConfig):
        raise RequestError(name, "is for a fleet; use foretell plan fleet")
    config = PlanConfig(**given_options(args, PlanConfig))
    parts = resolve_inputs(config)
    query = PlanQuery(
        parts.target,
        parts.drafter,
        config.count,
        config.acceptance,
        batches(DEFAULT_BATCHES) if args.batch is None else args.batch,
        default_contexts(parts.target.shape.context) if args.context is None else args.context,
        config.max_draft,
        config.length,
    )
    report(args, make_plan(query, parts.calibration))
    return 0


def run_fleet(args: argparse.Namespace) -> int:
    from foretell.plan.fleet.sizing import fleet_report

    for name in ("batch", "context", "svg", "html"):
        if getattr(args, name) is not None:
            raise RequestError(name, "is not for a fleet, whose load is given by --rate, --prompt and --output")
    config = PlanConfig(**given_options(args, PlanConfig))
    fleet = FleetConfig(**given_options(args, FleetConfig))
    trial = trial_of(config, fleet, resolve_inputs(config))
    found = trial.smallest() if fleet.replicas is None else trial.simulate(fleet.replicas)
    print_blocks(open_console(to_stderr=args.json), fleet_report(trial, found, asked_for=fleet.replicas is not None))
    output_result({"plan": FLEET, "models": asdict(config), "fleet": asdict(fleet), **found.as_json()}, args)
    return 0


def report(args: argparse.Namespace, found: PlanResult) -> None:
    """Print the tables and plots, with --json on standard error; write the files."""
    from foretell.plan.page import html, svg
    from foretell.plan.planner import remarks
    from foretell.plan.table import plots, tables, title

    console = open_console(to_stderr=args.json)
    print_blocks(console, [title(found), *tables(found), *remarks(found)])
    if not args.no_plot:
        console.print("", plots(found), sep="\n")
    for path, text in ((args.svg, svg), (args.html, html)):
        if path is not None:
            write_atomic(path, text(found))
    output_result(found.as_json(), args)


def batches(text: str) -> tuple[int, ...]:
    """Parse comma-separated batch sizes; a..b is a, b and the powers of two between."""
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        ends = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part)
        low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= low <= high <= MAX_BATCH:
            raise argparse.ArgumentTypeError(f"{part!r} is not a batch size such as 8, 1,8,32 or 1..64")
        found += [low, *(size for size in (1 << i for i in range(17)) if low < size < high), high]
    return tuple(sorted(set(found)))


def default_contexts(longest: int) -> tuple[int, ...]:
    """Return the context lengths of a plan that names none, within the model's context."""
    return tuple(min(tokens, longest) for tokens in contexts(DEFAULT_CONTEXT))


def contexts(text: str) -> tuple[int, ...]:
    """Parse comma-separated token counts; k is 1024."""
    found: list[int] = []
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        size = re.fullmatch(r"(\d+(?:\.\d+)?)(k?)", part)
        tokens = float(size[1]) * (1024 if size[2] else 1) if size else 0
        if tokens < 1 or tokens != int(tokens):
            raise argparse.ArgumentTypeError(f"{part!r} is not a number of tokens such as 512 or 8k")
        found.append(int(tokens))
    return tuple(dict.fromkeys(found))


PLAN = Command("estimate speed and memory of models on devices", add_arguments, run)
PLAN_FLEET = Command("simulate how many replicas a demand needs", add_fleet_arguments, run)
