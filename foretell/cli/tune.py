"""foretell tune: which drafter and length suit this machine, this model and these requests."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell import __version__
from foretell.bench.plan import Plan
from foretell.bench.workloads import OWN, WORKLOADS, load, take
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.options import add_options, given_options
from foretell.tune.space import LENGTHS

from .bench_common import look_at, wholes, words
from .command import Command
from .common import check_out, write_whole

if TYPE_CHECKING:
    from foretell.bench.measure import Variant
    from foretell.bench.prompt import BenchPrompt
    from foretell.build.model_source import ModelSource
    from foretell.llm import LLM
    from foretell.tune.successive_halving import Search
    from foretell.tune.verdict import TuneResult

DEFAULT_BUDGET, DEFAULT_FILE, MAX_TOKENS = "5m", Path("tuned.yaml"), 64
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
SHORTEST = 5.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--trace", type=Path, metavar="FILE", help="your own requests, OpenAI's form, one a line")
    names = f"{', '.join(WORKLOADS)} (default: {OWN})"
    group.add_argument("--workload", dest="asked", metavar="NAME", help=names)
    group.add_argument("--data", type=Path, metavar="FILE", help="the workload's file, or the folder it lies in")
    group.add_argument("--tasks", type=words, default=(), metavar="A,B", help="only these tasks (default: all)")
    group.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"the most a text (default: {MAX_TOKENS})"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="of all texts (default: as each request says)")
    group = parser.add_argument_group("search")
    group.add_argument(
        "--budget",
        type=seconds,
        default=seconds(DEFAULT_BUDGET),
        metavar="TIME",
        help=f"how long to try, such as 90s, 5m or 1h (default: {DEFAULT_BUDGET})",
    )
    group.add_argument(
        "--drafters", type=words, metavar="A,B", help="those to try; a+b is both behind one (default: all that fit)"
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=wholes,
        default=LENGTHS,
        dest="nodes",
        metavar="N,N",
        help=f"lengths to try beside adapting ones (default: {','.join(map(str, LENGTHS))})",
    )
    group.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_FILE,
        metavar="FILE",
        help=f"the config for foretell serve --config; the evidence goes beside it as .json (default: {DEFAULT_FILE})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    add_options(parser.add_argument_group("model"), EngineConfig)
    fixed = frozenset({"drafter", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "workload"})
    add_options(parser.add_argument_group("speculation"), SpeculationConfig, skip=fixed)


def seconds(text: str) -> float:
    """A time such as 90s, 5m or 1h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 5m or 1h")
    return float(found[1]) * UNITS[found[2]]


def run(args: argparse.Namespace) -> int:
    check_out(args)
    if args.budget < SHORTEST:
        raise RequestError("budget", f"must be {SHORTEST:g} seconds or more, not {args.budget:g}")
    plan = Plan(max_tokens=args.max_tokens, rounds=1, temperatures=(args.temperature,), schemas=True)
    items = workload(args)
    base = SpeculationConfig(**given_options(args, SpeculationConfig))
    target = look_at(args)
    arms = arms_to_try(args, base, items, target)
    return search(args, arms, items, plan, target)


def workload(args: argparse.Namespace) -> list[BenchPrompt]:
    """What is asked for, of a user's own trace or of a known workload."""
    if args.trace is not None and (args.asked is not None or args.data is not None):
        raise RequestError("trace", "is a workload of its own; leave out --workload and --data")
    if args.trace is not None:
        return load("trace", args.trace, args.tasks)
    return load(args.asked or OWN, args.data, args.tasks)


def arms_to_try(
    args: argparse.Namespace, base: SpeculationConfig, items: list[BenchPrompt], target: ModelSource
) -> list[Variant]:
    """All of them; a copy of the target in its own bits is left out, for it would only be the target again."""
    from foretell import draft
    from foretell.bench.variants import default_names
    from foretell.draft.registry import KINDS
    from foretell.tune.space import Space, is_sampled

    names = args.drafters or [*default_names(KINDS, target.config.layers, items), *heads_of(args)]
    own = f"self:{target.cpu_quantization}"
    names = [name for name in names if name != own or args.drafters]
    arms = Space(names, args.nodes, is_sampled(items, args.temperature)).arms(base)
    for arm in arms:
        draft.arms(arm.speculation)
    if not arms:
        raise RequestError("drafters", "leave nothing to try; name some, such as ngram,suffix")
    return arms


def heads_of(args: argparse.Namespace) -> list[str]:
    """The heads that come with the package for this model."""
    from foretell.draft.registry import HEADS
    from foretell.models.draft_heads.loading import SHIPPED

    model = given_options(args, EngineConfig).get("model", EngineConfig.model)
    return [kind for kind in HEADS if "/" not in model and (SHIPPED / model / kind).is_dir()]


def search(
    args: argparse.Namespace, arms: list[Variant], items: list[BenchPrompt], plan: Plan, target: ModelSource
) -> int:
    """Try, write what was found after every rung, and go on with what stopped it."""
    from time import monotonic

    from foretell.bench.drafter_slots import DrafterSlots, open_with
    from foretell.bench.engine_backend import EngineBackend
    from foretell.bench.progress import Progress
    from foretell.tune.space import mixed
    from foretell.tune.successive_halving import Search

    began = monotonic()
    llm = open_with(arms, **given_options(args, EngineConfig))
    fitting, left_out = with_room(arms, llm)
    stage = EngineBackend(llm, DrafterSlots(llm, target))
    items, too_long = take(items, None, lambda item: stage.fits(item, plan))
    if not items:
        raise RequestError("workload", "has no prompt that fits into this model's context; lower --max-tokens")
    left = max(SHORTEST, args.budget - (monotonic() - began))
    seeker = Search(stage, fitting, mixed(items), plan, left, monotonic, Progress())
    conditions = conditions_of(args, llm, left_out, [item.id for item in too_long])
    seeker.after = lambda: write(args, seeker, conditions | {"complete": False, "seconds": monotonic() - began})
    stopped: BaseException | None = None
    try:
        seeker.run()
    except BaseException as error:
        if not seeker.rungs:
            raise  # there is nothing to leave
        stopped = error
    whole = {"complete": stopped is None, "seconds": monotonic() - began}
    tell(args, seeker, write(args, seeker, conditions | whole), conditions | whole)
    if stopped is not None:
        raise stopped
    return 0


def with_room(arms: list[Variant], llm: LLM) -> tuple[list[Variant], list[str]]:
    """Those whose weights found room beside the target's, and the drafters that did not."""
    from foretell import draft
    from foretell.bench.drafter_slots import has_weights

    loaded = set(llm.engine.drafter.drafters)
    lacking = {name for arm in arms for name in draft.arms(arm.speculation) if has_weights(name) and name not in loaded}
    return [arm for arm in arms if not lacking & set(draft.arms(arm.speculation))], sorted(lacking)


def conditions_of(args: argparse.Namespace, llm: LLM, no_room: list[str], too_long: list[str]) -> dict[str, Any]:
    """What a reader needs to try it again."""
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


def write(args: argparse.Namespace, seeker: Search, conditions: dict[str, Any]) -> TuneResult:
    """The config and its evidence, whole or not at all."""
    from foretell.tune.successive_halving import evidence
    from foretell.tune.verdict import beside, choose, config_text, evidence_text

    standing = seeker.standing()
    verdict = choose(standing)
    engine = {"model": conditions["model"]} | given_options(args, EngineConfig)
    rungs = [{"arms": len(r.arms), "texts": r.texts, "seconds": r.seconds} for r in seeker.rungs]
    found = {"tune": verdict.arm.name, "words": verdict.words, **conditions, "rungs": rungs}
    write_whole(args.out, config_text(verdict, standing, engine, conditions))
    write_whole(beside(args.out), evidence_text(found | {"arms": evidence(standing)}))
    return verdict


def tell(args: argparse.Namespace, seeker: Search, verdict: TuneResult, conditions: dict[str, Any]) -> None:
    """Standard output is for the table, or with --json for the JSON alone."""
    import json

    from foretell.tune.verdict import beside, table

    lines = [table(seeker.standing()), "", f"Taken: {verdict.words}."]
    if conditions["no_memory_for"]:
        lines.append(f"Not tried, for there is no memory for them: {', '.join(conditions['no_memory_for'])}.")
    if not conditions["complete"]:
        lines.append("Stopped before the end: this is what was found until then.")
    lines.append(f"{args.out}: foretell serve --config {args.out}; evidence in {beside(args.out)}")
    print("\n".join(lines), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps(json.loads(beside(args.out).read_text()), ensure_ascii=False))


TUNE = Command("find the drafter and settings that suit this machine and workload", add_arguments, run)
