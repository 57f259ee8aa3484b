"""Trees against chains of the same head, by nodes: `python bench/trees.py --drafter eagle:FOLDER`

On a GPU: `--device cuda --inflate --workload spec-bench --data FOLDER --per-task 1 --seconds 150 --out FILE`. Every
text is written in every way in turn: plainly, in chains of several lengths, in trees of several nodes and depths, and
as the controller likes (`--controller`). After `--seconds` none but the first is begun; tasks take turns, so what is
there is even.
Then what masks and the moving of an accepted branch take of a step. `--inflate` lets the target cost what 5.9 billion
weights cost and say what the small one says (`inflate.py`). The JSON file is whole after every text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from inflate import inflate, inflate_head
from rounds import DeviceClock, Taken, write
from tree_report import Record, Report, Setting, Way

from foretell.bench.workloads import load
from foretell.build.model_source import read_tokenizer
from foretell.config import DEFAULT_TREE
from foretell.control.adaptive import AdaptiveController
from foretell.control.controller import Controller, FixedController
from foretell.control.latency_model import CostPrior, StepCosts
from foretell.control.settings import ControllerSettings
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.mix import MixDrafter
from foretell.draft.registry import head_drafter
from foretell.draft.suffix import SuffixDrafter
from foretell.engine.cost_profiler import CostProfiler
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.engine.warmup import Warmup, warmup_tasks
from foretell.hub import open_checkpoint, resolve
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import TargetWeights
from foretell.models.draft_heads.loading import open_head, pack_head
from foretell.models.load import load_model
from foretell.models.quantize import quantize_weights, quantize_weights_cuda
from foretell.runner.cuda.graph_shapes import CAPTURE_ROWS
from foretell.runner.cuda.graphs import capture_now
from foretell.runner.heads.kv import head_layer_shapes
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.tokenizer import Tokenizer
from foretell.types import Draft, ScheduledSequence, Sequence, SpeculationChoice

CONTEXT, PAGE, PAGES = 2048, 16, 512
SIZES = (512, 1024, CONTEXT)  # sequence lengths for which a GPU captures CUDA graphs
SHORT = 24  # tokens of a text that warms up
REHEARSING = 20.0  # seconds at most


@dataclass(frozen=True)
class Text:
    task: str
    prompt: list[int]


def chosen(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Text]:
    """The first questions of each task that fit, tasks in turn."""
    items = load(args.workload, args.data, args.tasks)
    by_task: dict[str, list[Text]] = {item.task: [] for item in items}
    for item in items:
        prompt = tokenizer.encode(item.text) if item.text is not None else tokenizer.encode_chat(list(item.messages))
        some = by_task[item.task]
        if len(some) < args.per_task and len(prompt) + args.max_tokens + max(args.at, 0, *args.nodes) < CONTEXT:
            some.append(Text(item.task, prompt))
    return [text for some in zip_longest(*by_task.values()) for text in some if text is not None]


class Bench:
    """A target with a head, and prompts to complete."""

    def __init__(self, args: argparse.Namespace) -> None:
        kind, _, folder = args.drafter.partition(":")
        device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
        checkpoint = open_checkpoint(resolve(args.model))
        base, self.tokenizer = load_model(checkpoint, dtype, device), read_tokenizer(checkpoint)
        head = open_head(Path(folder), base.config).load(TargetWeights.of(base), dtype, CONTEXT)
        model = inflate(base, args.inflate, dtype=dtype) if args.inflate else base
        if args.inflate:
            head = inflate_head(head, model, args.inflate, CONTEXT)
        model = quantized(model, args)
        runner = ModelRunner(model, PAGES, PAGE, CONTEXT, head.config.taps, head_layer_shapes(head.config))
        pack_head(head, runner.model)
        whole = False if args.by_steps else None  # None: as it is served
        self.head: HeadDrafter = head_drafter(runner, head, model.config.layers, kind, single_graph=whole)
        # The head comes first: fixed lengths are the first one's. `suffix` keeps no finished text: what was written in
        # another way, or to warm up, must not be copied.
        self.drafter = MixDrafter([self.head, SuffixDrafter(tenants=0)] if args.suffix else [self.head])
        self.engine = Engine(runner, self.drafter, FixedController(0), Scheduler(runner, None, 1, 512))
        self.maker = RequestBuilder(
            RequestLimits(CONTEXT, frozenset(), model.config.vocab), self.tokenizer, self.drafter
        )
        self.prompts, self.args, self.clock = chosen(args, self.tokenizer), args, DeviceClock(runner)
        self.controllers: dict[Setting, AdaptiveController] = {}

    def write(self, text: Text, setting: Setting, way: Way, tokens: int) -> tuple[Taken, tuple[int, ...]]:
        """One text, and its tokens."""
        self.engine.controller = self.controller(setting, way)
        params = SamplingParams(temperature=setting.temperature, max_tokens=tokens, seed=0, ignore_eos=True)
        request = self.maker.make("0", text.prompt, params, SpeculationChoice(rule=setting.rule))[0]
        track = self.engine.add(request)
        return write(self.engine, self.clock, track), tuple(track.seq.tokens)

    def controller(self, setting: Setting, way: Way) -> Controller:
        """That of a setting learns from text to text."""
        if not way.free:
            return FixedController(way.nodes, way.levels)
        if setting not in self.controllers:
            traits = {name: each.traits for name, each in self.drafter.drafters.items()}
            on_gpu = self.args.device == "cuda"
            costs = StepCosts(CostPrior(row=0.002 if on_gpu else 0.03), CAPTURE_ROWS if on_gpu else ())
            found = AdaptiveController(traits, ControllerSettings(max_tree_nodes=way.nodes), costs, loader=self.drafter)
            CostProfiler(self.engine, found).run()
            self.controllers[setting] = found
        return self.controllers[setting]

    def warm_up(self, settings: list[Setting], ways: list[Way]) -> None:
        """Steps are recorded by their sizes and kernels compiled: what a server rehearses, and a text of each size in
        every way."""
        if self.args.device == "cuda":
            some = partial(
                warmup_tasks,
                names=set(self.drafter.drafters),
                max_draft=16,
                max_tree=max(DEFAULT_TREE, *self.args.nodes),
            )
            Warmup(self.engine, some).run(REHEARSING)
        sizes = {min(size for size in SIZES if len(text.prompt) < size): text for text in self.prompts}
        for number, setting in enumerate(settings):
            for text in list(sizes.values())[: 1 if number else None]:
                for way in ways:
                    with nullcontext() if way.free else capture_now():  # a controller finds what a server's would find
                        self.write(text, setting, way, SHORT)

    def masks_and_moves(self, nodes: int, cached: int = 512) -> dict[str, float]:
        """Seconds of a step over a tree, what it takes beyond a chain of as many rows, and the move of a branch."""
        runner = self.engine.runner
        seq = Sequence(-1, self.maker.make("0", [1], SamplingParams(max_tokens=9))[0], [1] * (cached + 1), cached)
        assert runner.reserve(seq, cached + 1 + nodes)
        tokens, share = tuple(range(nodes)), ScheduledSequence.of(seq, 1)
        tree = Draft(tokens, tuple((node - 1) // 3 if node > 2 else -1 for node in range(nodes)), "tree")
        chain, path = Draft.chain(tokens, "chain"), (2, nodes // 3, nodes - 1)

        def step(draft: Draft) -> None:
            runner.forward([share], [draft]).logits.argmax(-1).tolist()

        def move() -> None:
            runner.compact_kv(seq, cached, path)
            if self.args.device == "cuda":
                torch.cuda.synchronize()

        found = timed({"tree": lambda: step(tree), "chain": lambda: step(chain), "move": move}, self.args.repeats)
        runner.trim(seq, 0)
        beyond = median(tree - chain for tree, chain in zip(found["tree"], found["chain"], strict=True))
        return {"step": median(found["tree"]), "masks": beyond, "move": median(found["move"])}


def quantized(model: Decoder, args: argparse.Namespace) -> Decoder:
    if args.quantization == "none":
        return model
    if args.device == "cuda":
        return quantize_weights_cuda(model, args.quantization)
    return quantize_weights(model, "int8")


def timed(jobs: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, in turn."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 3):
        for name, job in jobs.items():
            began = perf_counter()
            job()
            if turn >= 3:
                found[name].append(perf_counter() - began)
    return found


def ways(args: argparse.Namespace) -> list[Way]:
    trees = [Way(nodes, levels) for nodes in args.nodes for levels in args.depths if levels < nodes]
    trees += [Way(*map(int, shape.split(":"))) for shape in args.shapes]
    # The controller may have trees as large as a server's.
    free = [Way(DEFAULT_TREE, free=True)] if args.controller else []
    return [Way(0), *(Way(length) for length in args.chains), *dict.fromkeys(trees), *free]


def run(bench: Bench, report: Report, args: argparse.Namespace, began: float) -> None:
    """Run all prompts with all shapes of drafts while there is time."""
    rules = [Setting(heat, rule) for heat in args.temperatures for rule in args.rules]
    settings = list(dict.fromkeys(each if each.temperature else Setting(0.0, "match") for each in rules))
    some = ways(args)
    bench.warm_up(settings, some)
    print(f"ready after {perf_counter() - began:.0f} s; {len(bench.prompts)} prompts", flush=True)
    for turn in range(args.rounds):
        for number, text in enumerate(bench.prompts):
            for setting in settings:
                if (turn or number) and perf_counter() - began > args.seconds:
                    return
                first = (turn + number) % len(some)
                written = {w: bench.write(text, setting, w, args.max_tokens) for w in some[first:] + some[:first]}
                records = [Record(setting, way, text.task, turn, written[way][0]) for way in some]
                report.add(records, {way: tokens for way, (_, tokens) in written.items()})


def show_masks(bench: Bench, report: Report, nodes: int) -> None:
    times = bench.masks_and_moves(nodes)
    share = (max(0.0, times["masks"]) + times["move"]) / times["step"]
    said = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in times.items())
    print(f"\na step over a tree of {nodes} nodes: {said}; masks and moves are {share:.1%}", flush=True)
    report.more["masks_and_moves"] = {**times, "share": share, "nodes": nodes}
    report.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", required=True, help="KIND:FOLDER of a head")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--inflate", type=int, nargs="?", default=0, const=7, help="copies of every unit")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "fp8"), help="a CPU has int8 alone")
    parser.add_argument("--nodes", type=int, nargs="*", default=[7, 15, 31, 63, 127])
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 5, 7], help="each with each of --nodes")
    parser.add_argument("--shapes", nargs="*", default=[], help="further trees, as NODES:LEVELS")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--controller", action="store_true", help="also as the controller likes")
    parser.add_argument("--suffix", action="store_true", help="the controller may also copy from the text itself")
    parser.add_argument("--by-steps", action="store_true", help="drafts step by step, as they are defined")
    parser.add_argument("--workload", default="own")
    parser.add_argument("--data", type=Path, help="where the workload lies, if it does not come with the package")
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="none but the first text is begun later")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--rules", nargs="+", default=["match"], help="for temperatures above 0")
    parser.add_argument("--at", type=int, default=64, help="nodes of the step whose masks and moves are timed")
    parser.add_argument("--masks-only", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, report = perf_counter(), Report(args)
    bench = Bench(args)
    if not args.masks_only:
        run(bench, report, args, began)
        report.show()
        report.more["ranks"] = bench.head.rank_acceptance.rates[:3]
    show_masks(bench, report, args.at)


if __name__ == "__main__":
    main()
