"""foretell bench offline and drafters: speculation against plain decoding over a workload, in this process."""

from __future__ import annotations

import argparse
from datetime import date
from typing import TYPE_CHECKING, Any

from foretell import __version__
from foretell.bench.settings import DRAFTERS, OFFLINE, QUICK_DRAFTERS, QUICK_OFFLINE, BenchSettings
from foretell.bench.workloads import load
from foretell.config import EngineConfig, SpeculationConfig
from foretell.options import add_options, given_options

from .bench_common import (
    add_result_arguments,
    add_workload_arguments,
    bench_command,
    draft_lengths,
    integers,
    name_list,
    numbers,
    open_target,
    print_report,
    weights,
)

if TYPE_CHECKING:
    from foretell.bench.measure import Variant
    from foretell.bench.prompt import BenchPrompt
    from foretell.bench.run import FinishedRun
    from foretell.build.model_source import ModelSource
    from foretell.llm import LLM

OTHER_TEXT = 1  # exit code if an output differs
FIXED_NODES = (4,)
LISTS = frozenset({"drafter", "num_speculative_tokens"})  # flags of SpeculationConfig that take lists here


def add_drafters_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafters",
        type=name_list,
        metavar="A,B",
        help="drafters to compare; a+b is a mix of both (default: all that need no other model)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=integers,
        default=FIXED_NODES,
        dest="nodes",
        metavar="N,N",
        help="draft tokens per step, one or several; auto is always adaptive (default: 4)",
    )
    parser.set_defaults(bench="drafters")
    add_common_arguments(parser, DRAFTERS, QUICK_DRAFTERS, without=LISTS | {"num_speculative_tokens_per_batch_size"})


def run_drafters(args: argparse.Namespace) -> int:
    from foretell.bench.measure import default_drafters, variants_of
    from foretell.draft.registry import KINDS

    settings, items = asked(args, DRAFTERS, QUICK_DRAFTERS)
    base = SpeculationConfig(**given_options(args, SpeculationConfig))
    variants = variants_of(args.drafters or (), args.nodes, base)
    check_variants(variants)
    target = open_target(args)
    if not variants:
        variants = variants_of(default_drafters(KINDS, target.config.layers, items), args.nodes, base)
    return measure(args, target, variants, settings, items)


def add_offline_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafter",
        type=name_list,
        default=(SpeculationConfig().drafter,),
        dest="drafters",
        metavar="A,B",
        help="drafters, one or several; a+b is a mix of both (default: auto)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=draft_lengths,
        default=(None,),
        dest="nodes",
        metavar="N,N",
        help="draft tokens per step, one or several; auto is adaptive (default: auto)",
    )
    parser.set_defaults(bench="offline")
    add_common_arguments(parser, OFFLINE, QUICK_OFFLINE, without=LISTS)


def run_offline(args: argparse.Namespace) -> int:
    from foretell.bench.measure import variant_grid

    settings, items = asked(args, OFFLINE, QUICK_OFFLINE)
    variants = variant_grid(args.drafters, args.nodes, SpeculationConfig(**given_options(args, SpeculationConfig)))
    check_variants(variants)
    return measure(args, open_target(args), variants, settings, items)


def add_common_arguments(
    parser: argparse.ArgumentParser, settings: BenchSettings, quick: BenchSettings, without: frozenset[str]
) -> None:
    """Add the flags of workload, model and speculation."""
    group = parser.add_argument_group("workload")
    add_workload_arguments(group)
    per_task, max_tokens = settings.per_task or "all", settings.max_tokens or "as each asks"
    group.add_argument("--per-task", type=int, metavar="N", help=f"prompts per task (default: {per_task})")
    group.add_argument("--max-tokens", type=int, metavar="N", help=f"maximum output tokens (default: {max_tokens})")
    known = ",".join("as each asks" if each is None else f"{each:g}" for each in settings.temperatures)
    group.add_argument(
        "--temperature", type=numbers, metavar="T,T", help=f"sampling temperatures, one or several (default: {known})"
    )
    group.add_argument(
        "--batch",
        "--concurrency",
        type=integers,
        dest="batches",
        metavar="N,N",
        help="batch sizes, one or several (default: 1)",
    )
    prompts = "prompt" if quick.per_task == 1 else "prompts"
    per_quick = f"{quick.per_task} {prompts} of at most {quick.max_tokens} tokens"
    group.add_argument(
        "--rounds", type=int, metavar="N", help=f"repetitions of each prompt (default: {settings.rounds})"
    )
    group.add_argument(
        "--quick", action="store_true", help=f"{per_quick} per task, greedy: about a minute on two idle cores"
    )
    add_result_arguments(parser)
    add_options(parser.add_argument_group("model"), EngineConfig)
    add_options(parser.add_argument_group("speculation"), SpeculationConfig, skip=without | {"workload"})


def asked(
    args: argparse.Namespace, usual: BenchSettings, quick: BenchSettings
) -> tuple[BenchSettings, list[BenchPrompt]]:
    """Return the settings and the prompts of the flags."""
    settings = (quick if args.quick else usual).override(
        args.per_task, args.max_tokens, args.rounds, args.temperature, args.batches
    )
    return settings, load(args.asked, args.data, args.tasks)


def check_variants(variants: list[Variant]) -> None:
    """Refuse unknown drafters before a model is loaded."""
    from foretell import draft

    for variant in variants:
        draft.drafter_names(variant.speculation)


def measure(
    args: argparse.Namespace,
    target: ModelSource,
    variants: list[Variant],
    settings: BenchSettings,
    items: list[BenchPrompt],
) -> int:
    """Run and report; an interruption is raised again after the report."""
    from foretell.bench.drafter_slots import DrafterSlots, load_llm_for
    from foretell.bench.engine_backend import EngineBackend
    from foretell.bench.run import BenchJob, run
    from foretell.cli.bench_common import ProgressBar

    llm = load_llm_for(variants, **given_options(args, EngineConfig))
    if not llm.assembly.profiler.is_complete:
        llm.measure()
    order = BenchJob(args.bench, variants, items, settings, conditions(args, llm, target, variants, settings))
    done = run(order, EngineBackend(llm, DrafterSlots(llm, target)), ProgressBar())
    report(args, done)
    if done.stopped is not None:
        raise done.stopped
    return 0 if done.result.same_text else OTHER_TEXT


def report(args: argparse.Namespace, done: FinishedRun) -> None:
    from foretell.bench.page.offline import page
    from foretell.bench.report import remarks, report_table

    result = done.result
    print_report(args, report_table(result), remarks(result), result.as_json(), lambda: page(result))


def conditions(
    args: argparse.Namespace, llm: LLM, target: ModelSource, variants: list[Variant], settings: BenchSettings
) -> dict[str, Any]:
    """Return the conditions to repeat the measurement."""
    from foretell.bench.machine import describe

    return {
        "version": __version__,
        "date": str(date.today()),
        "model": llm.config.model,
        "weights": weights(target),
        "workload": args.asked,
        "drafters": {variant.name: variant.speculation.num_speculative_tokens for variant in variants},
        "temperatures": list(settings.temperatures),
        "batches": list(settings.batches),
        "max_tokens": settings.max_tokens,
        "rounds": settings.rounds,
        "per_task": settings.per_task,
        "machine": describe(llm),
    }


DRAFTERS_BENCH = bench_command("bench drafters", add_drafters_arguments, run_drafters)
OFFLINE_BENCH = bench_command("bench offline", add_offline_arguments, run_offline)
