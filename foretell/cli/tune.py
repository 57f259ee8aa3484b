"""foretell tune: searches the fastest drafter and draft length for a machine, a model and a workload."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell import __version__
from foretell.bench.settings import BenchSettings
from foretell.bench.workloads import OWN, WORKLOADS, load, select
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.options import add_options, given_options
from foretell.tune.search_space import LENGTHS

from .bench_common import integers, name_list, open_target
from .common import Command, check_writable, log, write_atomic
from .interrupts import sigterm_as_interrupt
from .tables import open_console, print_blocks

if TYPE_CHECKING:
    from foretell.bench.measure import Variant
    from foretell.bench.prompt import BenchPrompt
    from foretell.build.model_source import ModelSource
    from foretell.llm import LLM
    from foretell.tune.successive_halving import SuccessiveHalving, TuneResult

DEFAULT_BUDGET, DEFAULT_FILE, MAX_TOKENS = "5m", Path("tuned.yaml"), 64
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
MIN_BUDGET = 5.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--trace", type=Path, metavar="FILE", help="your own requests in OpenAI's format, one per line")
    known = f"{', '.join(WORKLOADS)} (default: {OWN})"
    group.add_argument("--workload", dest="asked", metavar="NAME", help=known)
    group.add_argument("--data", type=Path, metavar="FILE", help="file of the workload, or its folder")
    group.add_argument("--tasks", type=name_list, default=(), metavar="A,B", help="only these tasks (default: all)")
    group.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"maximum output tokens (default: {MAX_TOKENS})"
    )
    group.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature (default: that of each request)"
    )
    group = parser.add_argument_group("search")
    group.add_argument(
        "--budget",
        type=seconds,
        default=seconds(DEFAULT_BUDGET),
        metavar="TIME",
        help=f"search time, such as 90s, 5m or 1h (default: {DEFAULT_BUDGET})",
    )
    group.add_argument(
        "--drafters",
        type=name_list,
        metavar="A,B",
        help="drafters to try; a+b is a mix of both (default: all that fit)",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=integers,
        default=LENGTHS,
        dest="nodes",
        metavar="N,N",
        help=f"fixed draft lengths to try besides adaptive ones (default: {','.join(map(str, LENGTHS))})",
    )
    group.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_FILE,
        metavar="FILE",
        help=f"config file for foretell serve --config; measurements go next to it as .json (default: {DEFAULT_FILE})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    add_options(parser.add_argument_group("model"), EngineConfig)
    fixed = frozenset({"drafter", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "workload"})
    add_options(parser.add_argument_group("speculation"), SpeculationConfig, skip=fixed)


def seconds(text: str) -> float:
    """Parse a duration such as 90s, 5m or 1h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 5m or 1h")
    return float(found[1]) * UNITS[found[2]]


def run(args: argparse.Namespace) -> int:
    from foretell.tune.successive_halving import evidence_path

    check_writable(args.out)
    check_writable(evidence_path(args.out))
    if args.budget < MIN_BUDGET:
        raise RequestError("budget", f"must be {MIN_BUDGET:g} seconds or more, not {args.budget:g}")
    settings = BenchSettings(max_tokens=args.max_tokens, rounds=1, temperatures=(args.temperature,), schemas=True)
    items = workload(args)
    base = SpeculationConfig(**given_options(args, SpeculationConfig))
    target = open_target(args)
    variants = variants_to_try(args, base, items, target)
    return search(args, variants, items, settings, target)


def workload(args: argparse.Namespace) -> list[BenchPrompt]:
    """Return the prompts of --trace or of a known workload."""
    if args.trace is not None and (args.asked is not None or args.data is not None):
        raise RequestError("trace", "is a workload itself; leave out --workload and --data")
    if args.trace is not None:
        return load("trace", args.trace, args.tasks)
    return load(args.asked or OWN, args.data, args.tasks)


def variants_to_try(
    args: argparse.Namespace, base: SpeculationConfig, items: list[BenchPrompt], target: ModelSource
) -> list[Variant]:
    """Return the variants to try, without self-drafting in the target's own quantization."""
    from foretell import draft
    from foretell.bench.measure import default_drafters
    from foretell.draft.registry import KINDS
    from foretell.tune.search_space import SearchSpace, is_sampled

    chosen = args.drafters or [*default_drafters(KINDS, target.config.layers, items), *heads_of(args)]
    own = f"self:{target.cpu_quantization}"
    chosen = [name for name in chosen if name != own or args.drafters]
    variants = SearchSpace(chosen, args.nodes, is_sampled(items, args.temperature)).variants(base)
    for variant in variants:
        draft.drafter_names(variant.speculation)
    if not variants:
        raise RequestError("drafters", "leave nothing to try; name some, such as ngram,suffix")
    return variants


def heads_of(args: argparse.Namespace) -> list[str]:
    """Return the heads shipped for this model."""
    from foretell.draft.registry import HEADS
    from foretell.models.draft_heads.loading import SHIPPED

    model = given_options(args, EngineConfig).get("model", EngineConfig.model)
    return [kind for kind in HEADS if "/" not in model and (SHIPPED / model / kind).is_dir()]


def search(
    args: argparse.Namespace,
    variants: list[Variant],
    items: list[BenchPrompt],
    settings: BenchSettings,
    target: ModelSource,
) -> int:
    """Search, write the results after every rung, and raise an interruption again at the end."""
    from time import monotonic

    from foretell.bench.drafter_slots import DrafterSlots, load_llm_for
    from foretell.bench.engine_backend import EngineBackend
    from foretell.cli.bench_common import ProgressBar
    from foretell.tune.search_space import interleave_tasks
    from foretell.tune.successive_halving import SuccessiveHalving

    began = monotonic()
    llm = load_llm_for(variants, **given_options(args, EngineConfig))
    fitting, left_out = fitting_variants(variants, llm)
    stage = EngineBackend(llm, DrafterSlots(llm, target))
    items, too_long = select(items, None, lambda item: stage.fits(item, settings))
    if not items:
        raise RequestError("workload", "has no prompt that fits into this model's context; lower --max-tokens")
    left = max(MIN_BUDGET, args.budget - (monotonic() - began))
    search_run = SuccessiveHalving(stage, fitting, interleave_tasks(items), settings, left, monotonic, ProgressBar())
    conditions = conditions_of(args, llm, left_out, [item.id for item in too_long])
    search_run.after = lambda: write(args, search_run, conditions | {"complete": False, "seconds": monotonic() - began})
    stopped: BaseException | None = None
    try:
        with sigterm_as_interrupt():
            search_run.run()
    except BaseException as error:
        stopped = error
        if not search_run.ranking():
            log("no variant was measured before the end; nothing was written")
            raise
    whole = {"complete": stopped is None, "seconds": monotonic() - began}
    report(args, search_run, write(args, search_run, conditions | whole), conditions | whole)
    if stopped is not None:
        raise stopped
    return 0


def fitting_variants(variants: list[Variant], llm: LLM) -> tuple[list[Variant], list[str]]:
    """Return the variants whose drafters fit in memory, and the drafters that do not."""
    from foretell import draft
    from foretell.bench.drafter_slots import has_weights

    loaded = set(llm.engine.drafter.drafters)
    lacking = {
        name
        for variant in variants
        for name in draft.drafter_names(variant.speculation)
        if has_weights(name) and name not in loaded
    }
    return [variant for variant in variants if not lacking & set(draft.drafter_names(variant.speculation))], sorted(
        lacking
    )


def conditions_of(args: argparse.Namespace, llm: LLM, no_room: list[str], too_long: list[str]) -> dict[str, Any]:
    """Return the conditions to repeat the search."""
    from foretell.bench.machine import describe

    return {
        "version": __version__,
        "model": llm.config.model,
        "workload": str(args.trace or args.asked or OWN),
        "budget": args.budget,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "rule": SpeculationConfig(**given_options(args, SpeculationConfig)).rule,
        "machine": describe(llm),
        "memory": str(llm.assembly.memory),
        "no_memory_for": no_room,
        "left_out": too_long,
    }


def write(args: argparse.Namespace, search_run: SuccessiveHalving, conditions: dict[str, Any]) -> TuneResult:
    """Write the config file and its measurements atomically."""
    from foretell.tune.successive_halving import choose_variant, config_text, evidence, evidence_path, evidence_text

    ranking = search_run.ranking()
    verdict = choose_variant(ranking)
    engine = {"model": conditions["model"]} | given_options(args, EngineConfig)
    rungs = [{"arms": len(r.variants), "texts": r.num_prompts, "seconds": r.seconds} for r in search_run.rungs]
    found = {"tune": verdict.variant.name, "words": verdict.summary, **conditions, "rungs": rungs}
    write_atomic(args.out, config_text(verdict, ranking, engine, conditions))
    write_atomic(evidence_path(args.out), evidence_text(found | {"arms": evidence(ranking)}))
    return verdict


def report(
    args: argparse.Namespace, search_run: SuccessiveHalving, verdict: TuneResult, conditions: dict[str, Any]
) -> None:
    """Print the table, with --json on standard error."""
    import json

    from foretell.tune.successive_halving import evidence_path, report_table

    lines = [f"Chosen: {verdict.summary}."]
    if conditions["no_memory_for"]:
        lines.append(f"Not tried, because they do not fit in memory: {', '.join(conditions['no_memory_for'])}.")
    if not conditions["complete"]:
        lines.append("Interrupted: these are the results so far. Run the command again to measure more.")
    console = open_console(to_stderr=args.json)
    print_blocks(console, [report_table(search_run.ranking()), "\n".join(lines)])
    console.print(f"Serve with: foretell serve --config {args.out}", soft_wrap=True)
    console.print(f"Measurements: {evidence_path(args.out)}", soft_wrap=True)
    if args.json:
        print(json.dumps(json.loads(evidence_path(args.out).read_text()), ensure_ascii=False))


TUNE = Command("find the fastest drafter and settings for this machine and workload", add_arguments, run)
