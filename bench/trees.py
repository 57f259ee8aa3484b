"""Trees against chains of the same head, by nodes: `python bench/trees.py --drafter eagle:FOLDER`

On a GPU with `--device cuda --inflate --workload spec-bench --data FILE`. Every text is written by every arm in turn:
chains of several lengths, and trees of several numbers of nodes and depths. Then what masks and the moving of an
accepted branch take of a step. `--inflate` lets the target cost what 5.9 billion weights cost and say what the small
one says (`inflate.py`). One table comes last, and the same as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from inflate import inflate

from foretell.bench.item import Item
from foretell.bench.workloads import load
from foretell.control.controller import FixedController
from foretell.draft.heads import HeadDrafter
from foretell.draft.heads_kinds import beside, head_drafter
from foretell.engine.engine import Engine
from foretell.engine.requests import Limits, RequestMaker
from foretell.engine.scheduler import Scheduler
from foretell.hub import open_checkpoint, resolve
from foretell.models.heads import Lender
from foretell.models.heads.open import open_head, pack_head
from foretell.models.load import load_model
from foretell.models.variants import quantize_weights
from foretell.opened import read_tokenizer
from foretell.params import SamplingParams
from foretell.runner.runner import ModelRunner
from foretell.tokenizer import Tokenizer
from foretell.types import Draft, Sequence, Share, SpeculationChoice

CONTEXT, PAGE, PAGES = 2048, 16, 512


@dataclass(frozen=True)
class Way:
    """One way to guess; `levels` 0 is a chain, or with no nodes plain decoding."""

    nodes: int
    levels: int = 0

    @property
    def name(self) -> str:
        return "plain" if not self.nodes else f"{self.nodes} in {self.levels}" if self.levels else f"chain {self.nodes}"


@dataclass
class Taken:
    """What texts took in one way, the prompts left out."""

    seconds: float = 0.0
    drafting: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    rounds: list[float] = field(default_factory=list)  # tokens a second


def chosen(args: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    """Beginnings of the first items of each task, as many in all as are wanted."""
    items = load(args.workload, args.data)
    by_task = [[item for item in items if item.task == task] for task in dict.fromkeys(item.task for item in items)]
    turns = [beginning(item, tokenizer) for some in zip_longest(*by_task) for item in some if item is not None]
    return [each for each in turns if len(each) + args.max_tokens + args.at < CONTEXT][: args.texts]


def beginning(item: Item, tokenizer: Tokenizer) -> list[int]:
    if item.text is not None:
        return tokenizer.encode(item.text)
    asked = [{"role": "user", "content": turn} for turn in item.turns[:1]]
    return tokenizer.encode_chat([*item.messages, *asked])


class Bench:
    """A target with a head, and texts to be written."""

    def __init__(self, args: argparse.Namespace) -> None:
        kind, _, folder = args.drafter.partition(":")
        device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
        checkpoint = open_checkpoint(resolve(args.model))
        base, self.tokenizer = load_model(checkpoint, dtype, device), read_tokenizer(checkpoint)
        head = open_head(Path(folder), base.config).load(Lender.of(base), dtype, CONTEXT)
        model = inflate(base) if args.inflate else quantize_weights(base, 8) if args.int8 else base
        runner = ModelRunner(model, PAGES, PAGE, CONTEXT, head.config.taps, beside(head.config))
        if not args.inflate:
            pack_head(head, runner.model)
        self.drafter: HeadDrafter = head_drafter(runner, head, model.config.layers, kind)
        if args.inflate:  # of the repeated states those of the small model
            wide, own = model.config.width, torch.arange(head.config.target_width, device=device)
            self.drafter._columns = torch.cat([tap * wide + own for tap in range(len(head.config.taps))])
        scheduler = Scheduler(runner, None, 1, 512)
        self.engine = Engine(runner, self.drafter, FixedController(0), scheduler)
        limits = Limits(CONTEXT, frozenset(), model.config.vocab)
        self.maker = RequestMaker(limits, self.tokenizer, self.drafter)
        self.prompts = chosen(args, self.tokenizer)
        self.args = args

    def write(self, number: int, way: Way, taken: Taken) -> tuple[int, ...]:
        """One text; its tokens."""
        engine, args = self.engine, self.args
        engine.controller = FixedController(way.nodes, way.levels)
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=number, ignore_eos=True)
        choice = SpeculationChoice(rule=args.rule)
        track = engine.add(self.maker.make(str(number), self.prompts[number], params, choice)[0])
        while not track.seq.written:
            engine.step()
        drafting, steps, began = engine.stats.drafting_seconds, engine.stats.forwards, perf_counter()
        before = track.seq.written
        while engine.busy:
            engine.step()
        seconds, tokens = perf_counter() - began, track.seq.written - before
        taken.seconds, taken.tokens = taken.seconds + seconds, taken.tokens + tokens
        taken.drafting += engine.stats.drafting_seconds - drafting
        taken.steps, taken.drafted = (
            taken.steps + engine.stats.forwards - steps,
            taken.drafted + track.speculation.drafted,
        )
        return tuple(track.seq.tokens)

    def run(self, ways: list[Way]) -> dict[Way, Taken]:
        """All texts in all ways, in turn; under `match` every way must write the same."""
        found = {way: Taken() for way in ways}
        for way in ways:
            self.write(0, way, Taken())  # warms up: graphs are recorded, libraries loaded
        for turn in range(self.args.rounds):
            parts = {way: Taken() for way in ways}
            for number in range(len(self.prompts)):
                written = {self.write(number, way, parts[way]) for way in ways[turn:] + ways[:turn]}
                if self.args.rule == "match" and self.args.device == "cpu":
                    assert len(written) == 1, "a way to guess changed the text"
            for way, part in parts.items():
                whole = found[way]
                whole.rounds.append(part.tokens / part.seconds)
                for name in ("seconds", "drafting", "tokens", "steps", "drafted"):
                    setattr(whole, name, getattr(whole, name) + getattr(part, name))
        return found

    def masks_and_moves(self, nodes: int, cached: int = 512) -> dict[str, float]:
        """Seconds of a step over a tree, over a chain of as many rows, and of moving a branch; medians."""
        runner = self.engine.runner
        seq = Sequence(-1, self.maker.make("0", [1], SamplingParams(max_tokens=9))[0], [1] * (cached + 1), cached)
        assert runner.reserve(seq, cached + 1 + nodes)
        tokens, share = tuple(range(nodes)), Share.of(seq, 1)
        tree = Draft(tokens, tuple((node - 1) // 3 if node > 2 else -1 for node in range(nodes)), "tree")
        chain, path = Draft.chain(tokens, "chain"), (2, nodes // 3, nodes - 1)

        def step(draft: Draft) -> None:
            runner.forward([share], [draft]).logits.argmax(-1).tolist()

        def move() -> None:
            runner.keep(seq, cached, path)
            if self.args.device == "cuda":
                torch.cuda.synchronize()

        times = timed({"tree": lambda: step(tree), "chain": lambda: step(chain), "move": move}, self.args.repeats)
        runner.trim(seq, 0)
        return times


def timed(jobs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Medians of each, in turn."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 3):
        for name, job in jobs.items():
            began = perf_counter()
            job()
            if turn >= 3:
                found[name].append(perf_counter() - began)
    return {name: median(each) for name, each in found.items()}


def ways(args: argparse.Namespace) -> list[Way]:
    trees = [Way(nodes, levels) for nodes in args.nodes for levels in args.depths if levels < nodes]
    return [Way(0), *(Way(length) for length in args.chains), *trees]


def report(found: dict[Way, Taken], times: dict[str, float], args: argparse.Namespace) -> dict[str, object]:
    plain = median(found[Way(0)].rounds)
    print("| nodes | tokens/s | of plain | accepted per step | drafting of a step | nodes drafted |")
    print("|---|---:|---:|---:|---:|---:|")
    for way, taken in found.items():
        speed, steps = median(taken.rounds), max(1, taken.steps)
        share = taken.drafting / taken.seconds
        print(
            f"| {way.name} | {speed:.1f} | {speed / plain:.2f} | {taken.tokens / steps:.2f} | {share:.0%} "
            f"| {taken.drafted / steps:.1f} |"
        )
    best = {
        kind: max(
            (way for way in found if way.nodes and bool(way.levels) == tree), key=lambda w: median(found[w].rounds)
        )
        for kind, tree in (("chain", False), ("tree", True))
    }
    pairs = zip(found[best["tree"]].rounds, found[best["chain"]].rounds, strict=True)
    gain = median(tree / chain for tree, chain in pairs)
    extra = max(0.0, times["tree"] - times["chain"]) + times["move"]
    print(f"\nbest tree ({best['tree'].name}) / best chain ({best['chain'].name}): {gain:.3f}")
    print(
        f"a step of {args.at} nodes: tree {times['tree'] * 1e3:.2f} ms, chain {times['chain'] * 1e3:.2f} ms, moving a "
        f"branch {times['move'] * 1e3:.3f} ms: masks and moves are {extra / times['tree']:.1%}"
    )
    return {
        "ways": {
            way.name: {"rounds": each.rounds, "per_step": each.tokens / each.steps} for way, each in found.items()
        },
        "tree_over_chain": gain,
        "masks_and_moves": extra / times["tree"],
        "times": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", required=True, help="KIND:FOLDER of a head")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--inflate", action="store_true")
    parser.add_argument("--int8", action="store_true", help="a CPU's weights in 8 bits")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 5, 7])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--workload", default="own")
    parser.add_argument("--data", type=Path, help="where the workload lies, if it does not come with the package")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rule", default="match")
    parser.add_argument("--at", type=int, default=64, help="nodes of the step whose masks and moves are timed")
    args = parser.parse_args()
    bench = Bench(args)
    found = bench.run(ways(args))
    said = report(found, bench.masks_and_moves(args.at), args)
    said["ranks"] = bench.drafter.ranks.rates[:3]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
