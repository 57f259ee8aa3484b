"""foretell bench never-slower: tests that adaptive drafts are never slower than plain decoding or a fixed length."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell import __version__
from foretell.bench.never_slower_grid import (
    BATCHES,
    MAIN_DRAFTERS,
    QUICK,
    QUICK_CELLS,
    CellSettings,
    GridCell,
    all_cells,
    select_cells,
    variants_to_load,
)
from foretell.bench.workloads import load
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.options import add_options, given_options

from .bench_common import add_result_arguments, bench_command, integers, name_list, open_target, print_report

if TYPE_CHECKING:
    from foretell.bench.never_slower import NeverSlowerResult
    from foretell.bench.settings import BenchSettings
    from foretell.llm import LLM

BELOW, INCONCLUSIVE = 1, 4  # exit codes
UNSEEN_TOKENS = 96  # output tokens of a short text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="six short cells: about two minutes on two cores")
    add_result_arguments(parser)
    group = parser.add_argument_group("cells")
    group.add_argument("--tasks", type=name_list, default=(), metavar="A,B", help="only these tasks (default: all)")
    known = f"only these (default: {', '.join(MAIN_DRAFTERS)}, and at batch 1 all that need no other model)"
    group.add_argument("--drafters", type=name_list, default=(), metavar="A,B", help=known)
    sizes = ",".join(map(str, BATCHES))
    group.add_argument(
        "--batches", type=integers, default=(), metavar="N,N", help=f"only these batch sizes (default: {sizes})"
    )
    usual = CellSettings()
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"maximum output tokens (default: {usual.max_tokens})",
        dest="length",
    )
    group.add_argument(
        "--rounds", type=int, metavar="N", help=f"rounds before the first decision (default: {usual.rounds})"
    )
    group.add_argument("--most-rounds", type=int, metavar="N", help=f"maximum rounds (default: {usual.max_rounds})")
    unseen = parser.add_argument_group("short requests never seen before")
    unseen.add_argument("--unseen", type=int, metavar="N", help="measure N short requests one by one instead of cells")
    unseen.add_argument("--data", type=Path, metavar="PATH", help="take them from Spec-Bench in this folder")
    add_options(parser.add_argument_group("model"), EngineConfig)


def run(args: argparse.Namespace) -> int:
    if args.unseen is not None:
        return run_unseen(args)
    from foretell.bench import never_slower
    from foretell.bench.batch_backend import EngineBatchBackend
    from foretell.bench.drafter_slots import DrafterSlots, load_llm_for
    from foretell.bench.settings import BenchSettings
    from foretell.cli.bench_common import ProgressBar
    from foretell.draft.registry import KINDS

    extent = extent_of(args)
    target = open_target(args)
    known = QUICK_CELLS if args.quick else all_cells(list(KINDS), target.config.layers)
    cells = select_cells(known, args.tasks, args.drafters, args.batches)
    items = load("own")
    by_task = {cell.task: [item for item in items if item.task == cell.task] for cell in cells}
    llm = load_llm_for(variants_to_load(cells), **given_options(args, EngineConfig))
    if not llm.assembly.profiler.is_complete:
        llm.measure()
    # Without schemas: a grammar drafts as well, and this benchmark is about drafters.
    stage = EngineBatchBackend(
        llm, DrafterSlots(llm, target), BenchSettings(max_tokens=extent.max_tokens, schemas=False)
    )
    found = never_slower.run(stage, cells, by_task, extent, ProgressBar(), conditions(llm, cells, extent))
    report(args, found)
    if found.stopped is not None:
        raise found.stopped
    return exit_code(found)


def run_unseen(args: argparse.Namespace) -> int:
    """Measure short requests one by one."""
    from foretell.bench import unseen
    from foretell.bench.drafter_slots import DrafterSlots, load_llm_for
    from foretell.bench.measure import Variant
    from foretell.bench.page.never_slower import unseen_page
    from foretell.bench.settings import BenchSettings
    from foretell.cli.bench_common import ProgressBar

    if args.unseen < 1:
        raise RequestError("unseen", f"must be 1 or more, not {args.unseen}")
    if args.tasks or args.batches or args.quick:
        raise RequestError("unseen", "measures its own tasks at batch 1; leave out --tasks, --batches and --quick")
    # Without schemas: a grammar drafts as well, and this benchmark is about drafters.
    settings = BenchSettings(
        max_tokens=UNSEEN_TOKENS if args.length is None else args.length, rounds=args.rounds or 1, schemas=False
    )
    target = open_target(args)
    drafters = (",".join(args.drafters),) if args.drafters else unseen.DRAFTERS  # those named are one mix
    variants = [Variant(name, SpeculationConfig(drafter=name)) for name in drafters]
    items = unseen.prompts(load("own" if args.data is None else "spec-bench", args.data), args.unseen)
    llm = load_llm_for(variants, **given_options(args, EngineConfig))
    if not llm.assembly.profiler.is_complete:
        llm.measure()
    cells = [(drafter, temperature) for drafter in drafters for temperature in unseen.TEMPERATURES]
    measured = unseen.UnseenBench(llm, DrafterSlots(llm, target), settings).run(cells, items, ProgressBar())
    found = unseen.UnseenResult(unseen_conditions(llm, settings), measured)
    print_report(args, unseen.report_table(found), unseen.remarks(found), found.as_json(), lambda: unseen_page(found))
    if found.verdict == "slower" or not all(cell.same_text for cell in found.cells):
        return BELOW
    return INCONCLUSIVE if found.verdict == "inconclusive" else 0


def unseen_conditions(llm: LLM, settings: BenchSettings) -> dict[str, Any]:
    """Return the conditions to repeat the measurement."""
    from foretell.bench.machine import describe

    return {
        "version": __version__,
        "model": llm.config.model,
        "max_tokens": settings.max_tokens,
        "rounds": settings.rounds,
        "machine": describe(llm),
    }


def extent_of(args: argparse.Namespace) -> CellSettings:
    """Return the extent with the values of given flags."""
    usual = QUICK if args.quick else CellSettings()
    rounds = usual.rounds if args.rounds is None else args.rounds
    most = max(usual.max_rounds, rounds) if args.most_rounds is None else args.most_rounds
    length = usual.max_tokens if args.length is None else args.length
    return replace(usual, rounds=rounds, max_rounds=most, max_tokens=length)


def report(args: argparse.Namespace, found: NeverSlowerResult) -> None:
    from foretell.bench.never_slower import remarks, report_table
    from foretell.bench.page.never_slower import page

    print_report(args, report_table(found), remarks(found), found.as_json(), lambda: page(found))


def exit_code(found: NeverSlowerResult) -> int:
    """Return the exit code: slower or another output is a failure, inconclusive a warning."""
    if found.verdict == "slower" or not found.same_text:
        return BELOW
    return INCONCLUSIVE if found.verdict == "inconclusive" else 0


def conditions(llm: LLM, cells: list[GridCell], extent: CellSettings) -> dict[str, Any]:
    """Return the conditions to repeat the measurement."""
    from foretell.bench.machine import describe

    return {
        "version": __version__,
        "model": llm.config.model,
        "lengths": [0, *extent.lengths],
        "max_tokens": extent.max_tokens,
        "rounds": [extent.rounds, extent.max_rounds],
        "drafters": list(dict.fromkeys(cell.drafter for cell in cells)),
        "machine": describe(llm),
    }


NEVER_SLOWER = bench_command("bench never-slower", add_arguments, run)
