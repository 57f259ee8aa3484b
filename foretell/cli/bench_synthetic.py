"""foretell bench synthetic: the engine with a synthetic drafter of a given acceptance rate."""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

from foretell import __version__
from foretell.bench.synthetic import QUICK, SyntheticSettings
from foretell.bench.workloads import load
from foretell.config import EngineConfig
from foretell.options import add_options, given_options

from .bench_common import add_result_arguments, bench_command, integers, numbers, open_target, print_report, weights

if TYPE_CHECKING:
    from foretell.bench.synthetic import SyntheticResult
    from foretell.build.model_source import ModelSource
    from foretell.llm import LLM

TASKS = ("chat", "math", "story")  # with short prompts, so that a batch starts decoding together
OFF = 1  # exit code if the measured speedup is off or an output differs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usual = SyntheticSettings()
    group = parser.add_argument_group("synthetic drafts")
    rates, lengths, batches = (",".join(map(str, each)) for each in (usual.rates, usual.lengths, usual.batches))
    group.add_argument("--acceptance", type=numbers, metavar="A,A", help=f"acceptance rates (default: {rates})")
    group.add_argument("--lengths", type=integers, metavar="N,N", help=f"draft tokens per step (default: {lengths})")
    group.add_argument("--batch", type=integers, metavar="N,N", help=f"batch sizes (default: {batches})")
    group.add_argument("--max-tokens", type=int, metavar="N", help=f"output tokens (default: {usual.max_tokens})")
    group.add_argument(
        "--texts", type=int, metavar="N", help=f"minimum outputs per batch size (default: {usual.min_sequences})"
    )
    group.add_argument("--rounds", type=int, metavar="N", help=f"repetitions (default: {usual.rounds})")
    group.add_argument("--quick", action="store_true", help="one rate and length: under a minute on an idle machine")
    add_result_arguments(parser)
    add_options(parser.add_argument_group("model"), EngineConfig)


def run(args: argparse.Namespace) -> int:
    from foretell.bench.batch_backend import SyntheticBackend
    from foretell.bench.drafter_slots import DrafterSlots
    from foretell.bench.settings import BenchSettings
    from foretell.bench.synthetic import run_synthetic
    from foretell.cli.bench_common import ProgressBar
    from foretell.llm import LLM

    settings = settings_of(args)
    target = open_target(args)
    llm = LLM(drafter="ngram", **given_options(args, EngineConfig))
    cases = {case.variant.name: case for case in settings.cases}
    stage = SyntheticBackend(llm, DrafterSlots(llm, target), BenchSettings(max_tokens=settings.max_tokens), cases)
    found = run_synthetic(stage, load("own", tasks=TASKS), settings, ProgressBar(), conditions(llm, target, settings))
    report(args, found)
    if found.stopped is not None:
        raise found.stopped
    return 0 if found.holds and found.same_text else OFF


def settings_of(args: argparse.Namespace) -> SyntheticSettings:
    """Return the settings with the values of given flags."""
    given = {
        "rates": args.acceptance,
        "lengths": args.lengths,
        "batches": args.batch,
        "max_tokens": args.max_tokens,
        "min_sequences": args.texts,
        "rounds": args.rounds,
    }
    return replace(
        QUICK if args.quick else SyntheticSettings(),
        **{name: value for name, value in given.items() if value is not None},
    )


def report(args: argparse.Namespace, found: SyntheticResult) -> None:
    from foretell.bench.page.synthetic import page
    from foretell.bench.synthetic import remarks, report_table

    print_report(args, report_table(found), remarks(found), found.as_json(), lambda: page(found))


def conditions(llm: LLM, target: ModelSource, settings: SyntheticSettings) -> dict[str, Any]:
    """Return the conditions to repeat the measurement."""
    from foretell.bench.machine import describe

    return {
        "version": __version__,
        "date": str(date.today()),
        "model": llm.config.model,
        "weights": weights(target),
        "max_tokens": settings.max_tokens,
        "rounds": settings.rounds,
        "machine": describe(llm),
    }


SYNTHETIC = bench_command("bench synthetic", add_arguments, run)
