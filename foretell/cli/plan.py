"""foretell plan: what to expect of models and machines, before there are any."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from foretell.options import add_options, given_options
from foretell.plan.config import PlanConfig, parts_of
from foretell.plan.page import html, svg
from foretell.plan.planner import Forecast, forecast
from foretell.plan.question import Question
from foretell.plan.table import markdown, plots

from .command import Command
from .common import add_output_arguments, check_out, give, write_whole
from .plan_fleet import FLEET

MOST_TEXTS = 1 << 16
DEFAULT_BATCHES, DEFAULT_CONTEXT = "1..64", "2k"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="plan", metavar="[fleet]")
    fleet = kinds.add_parser("fleet", help=FLEET.help, description=FLEET.help, allow_abbrev=False)
    FLEET.add_arguments(fleet)
    fleet.set_defaults(parser=fleet)
    add_options(parser.add_argument_group("models and devices"), PlanConfig)
    group = parser.add_argument_group("load")
    group.add_argument(
        "--batch",
        type=batches,
        default=batches(DEFAULT_BATCHES),
        metavar="N,N",
        help=f"texts at once: 8, 1,8,32, or 1..64 for powers of two (default: {DEFAULT_BATCHES})",
    )
    group.add_argument(
        "--context",
        type=contexts,
        default=contexts(DEFAULT_CONTEXT),
        metavar="N,N",
        help=f"tokens of a text: 512, 8k or 1k,8k (default: {DEFAULT_CONTEXT})",
    )
    add_output_arguments(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the plots as a drawing")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with tables and plots")
    parser.add_argument("--no-plot", action="store_true", help="leave the plots out of the terminal")


def run(args: argparse.Namespace) -> int:
    check_files(args)
    if args.plan == "fleet":
        return FLEET.run(args)
    config = PlanConfig(**given_options(args, PlanConfig))
    parts = parts_of(config)
    question = Question(
        parts.target,
        parts.guesser,
        config.count,
        config.acceptance,
        args.batch,
        args.context,
        config.max_draft,
        config.length,
    )
    tell(args, forecast(question, parts.calibration))
    return 0


def check_files(args: argparse.Namespace) -> None:
    """Refuse places that cannot be written to before any work is done."""
    for name in ("out", "svg", "html"):
        check_out(argparse.Namespace(out=getattr(args, name, None)))


def tell(args: argparse.Namespace, found: Forecast) -> None:
    """Standard output is for the tables, or with --json for the JSON alone."""
    stream = sys.stderr if args.json else sys.stdout
    print(markdown(found), file=stream)
    if not args.no_plot:
        print("", plots(found), sep="\n", file=stream)
    for path, text in ((args.svg, svg), (args.html, html)):
        if path is not None:
            write_whole(path, text(found))
    give(found.as_json(), args)


def batches(text: str) -> tuple[int, ...]:
    """Whole numbers between commas; a..b is a, b and the powers of two between."""
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        ends = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part)
        low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= low <= high <= MOST_TEXTS:
            raise argparse.ArgumentTypeError(f"{part!r} is no number of texts such as 8, 1,8,32 or 1..64")
        found += [low, *(size for size in (1 << i for i in range(17)) if low < size < high), high]
    return tuple(sorted(set(found)))


def contexts(text: str) -> tuple[int, ...]:
    """Tokens between commas; k is 1024."""
    found: list[int] = []
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        size = re.fullmatch(r"(\d+(?:\.\d+)?)(k?)", part)
        tokens = float(size[1]) * (1024 if size[2] else 1) if size else 0
        if tokens < 1 or tokens != int(tokens):
            raise argparse.ArgumentTypeError(f"{part!r} is no number of tokens such as 512 or 8k")
        found.append(int(tokens))
    return tuple(dict.fromkeys(found))


PLAN = Command("what to expect of models and machines, before there are any", add_arguments, run)
