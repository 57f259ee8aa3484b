"""What several benches share: flags of several values, where results go, and the target before it is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench.report import brief
from foretell.bench.workloads import OWN, WORKLOADS
from foretell.config import EngineConfig
from foretell.options import given_options

from .common import add_output_arguments, check_out, give, write_whole

if TYPE_CHECKING:
    from foretell.build.model_source import ModelSource

AUTO = "auto"


def look_at(args: argparse.Namespace) -> ModelSource:
    """The target, before it is loaded."""
    from foretell.build.model_source import open_model, say_on_stderr

    config = EngineConfig(**given_options(args, EngineConfig))
    return open_model(config.model, config, say_on_stderr)


def weights(target: ModelSource) -> str:
    """What its weights are made of."""
    return target.cpu_quantization or str(target.dtype).removeprefix("torch.")


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for results: for programs, and for people with a browser."""
    add_output_arguments(parser)
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with charts to FILE, for a browser")


def add_workload_arguments(group: argparse._ArgumentGroup) -> None:
    """Flags for what is asked."""
    # SpeculationConfig has a `workload` of its own, so inside this one goes by another name.
    names = f"{', '.join(WORKLOADS)} (default: {OWN})"
    group.add_argument("--workload", dest="asked", default=OWN, metavar="NAME", help=names)
    group.add_argument("--data", type=Path, metavar="FILE", help="the workload's file, or the folder it lies in")
    group.add_argument("--tasks", type=words, default=(), metavar="A,B", help="only these tasks (default: all)")


def check_places(args: argparse.Namespace) -> None:
    """Refuse a place that cannot be written to before any work is done."""
    check_out(args)
    check_out(argparse.Namespace(out=args.html))


def tell(
    args: argparse.Namespace,
    table: str,
    remarks: Sequence[str],
    result: Mapping[str, Any],
    page: Callable[[], str],
) -> None:
    """A table and its remarks for people, one JSON line last for programs; --json prints the whole object alone."""
    stream = sys.stderr if args.json else sys.stdout
    print(table, "", *remarks, sep="\n", file=stream, flush=True)
    give(result, args)
    if args.html is not None:
        write_whole(args.html, page())
        print(f"A page of it: {args.html}", file=stream)
    if not args.json:
        print(json.dumps(brief(result), ensure_ascii=False))


def words(text: str) -> tuple[str, ...]:
    """Words between commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def some(text: str) -> tuple[str, ...]:
    """Words between commas, one at least."""
    found = words(text)
    if not found:
        raise ValueError("nothing stands between the commas")
    return found


def numbers(text: str) -> tuple[float, ...]:
    """Numbers between commas."""
    try:
        return tuple(float(word) for word in some(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1") from None


def wholes(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    try:
        return tuple(int(word) for word in some(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 2,4,8") from None


def budgets(text: str) -> tuple[int | None, ...]:
    """Whole numbers between commas; `auto` stands for one that is found out."""
    try:
        return tuple(None if word == AUTO else int(word) for word in some(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as auto,4,8") from None
