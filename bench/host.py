"""Measure the host time of a step by component: python bench/host.py

The engine, a draft head and the tables of the GPU kernels are real; the device is not. A target without weights accepts
a random branch of each draft, and the head's CUDA graphs are replayed from stored outputs; their time is left out. The
second table measures the controller with three drafters, two of them free, on a machine with steps of 40 ms.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from foretell.certify.distribution_test import random_decoder
from foretell.control.adaptive import AdaptiveController
from foretell.control.controller import FixedController
from foretell.control.latency_model import CostPrior, StepCosts
from foretell.control.settings import ControllerSettings
from foretell.draft.base import Drafter
from foretell.draft.heads.eagle import EagleDrafter
from foretell.draft.mix import MixDrafter
from foretell.draft.registry import head_drafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.kernels.attention import Span
from foretell.kv.prefix import PrefixIndex
from foretell.models.config import ModelConfig
from foretell.models.draft_heads import EagleConfig, LayerConfig, TargetWeights, make_head
from foretell.models.draft_heads.layer import init_weights
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.cuda.graph_shapes import CAPTURE_ROWS, split_step, step_shape
from foretell.runner.cuda.tables import PageTable, write_tables
from foretell.runner.executor import Executor, StepOutput
from foretell.runner.heads.kv import head_layer_shapes
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams

VOCAB, CONTEXT, PAGE, PAGES, PROMPT = 512, 4096, 16, 4096, 200
MODEL = ModelConfig(vocab=VOCAB, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, context=CONTEXT)
HEAD = EagleConfig(LayerConfig(width=32, heads=4, kv_heads=2, head_dim=8, ffn=48), VOCAB, 32, (0, 1, 2))
STANDS = 0.6  # acceptance rate of each further draft token
PEAK = 1e3  # logit of a row's token over all others, so that it is sampled at any temperature
STEP, ROW = 0.04, 5e-4  # seconds of a step and of each of its rows on the machine that is decided for
PARTS = ("plan", "draft", "pack", "tables", "verify", "commit", "observe")


@dataclass(frozen=True)
class Run:
    """How many steps are run before any is timed, how many are, and which of them is shown, by rank."""

    warm: int
    steps: int
    rank: float


@dataclass
class Watch:
    """Seconds of each part of a step; what a device would do is no part of it."""

    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PARTS, "device"), 0.0))

    def time(self, thing: Any, name: str, part: str) -> None:
        """Charge a method to a part, less what is charged to others meanwhile."""
        inner = getattr(thing, name)

        def timed(*given: Any, **named: Any) -> Any:
            began, before = perf_counter(), sum(self.spent.values())
            try:
                return inner(*given, **named)
            finally:
                self.spent[part] += perf_counter() - began - (sum(self.spent.values()) - before)

        setattr(thing, name, timed)


class Replay:
    """A graph cache without CUDA: runs the work of each shape once and returns its result from then on."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}

    def select(self, requested: Hashable) -> Hashable:
        """Return the shape itself: every shape is captured."""
        return requested

    def __call__(self, shape: Hashable, run: Callable[[], Any], keep: bool = True) -> Any:
        return self.replay(shape, run)

    def replay(self, shape: Hashable, run: Callable[[], Any]) -> Any:
        if shape not in self.known:
            self.known[shape] = run()
        return self.known[shape]


class Unreal(Executor):
    """An executor that makes a GPU's tables and knows what the target says: a branch of the draft, then anything."""

    def __init__(self, share: int, taps: int) -> None:
        self.share, self.rng = share, random.Random(0)
        self.pages = PageTable(CAPTURE_ROWS[-1], CONTEXT // PAGE, torch.device("cpu"))
        self.host, self.device = torch.zeros(1 << 17, dtype=torch.int32), torch.zeros(1 << 17, dtype=torch.int32)
        self.features = torch.zeros(CAPTURE_ROWS[-1], taps * MODEL.width)

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        if packed.rows > CAPTURE_ROWS[-1] or len(packed.logits_indices) < len(packed.spans):
            return self.answer(packed)  # a prompt
        self.send(packed)
        return self.answer(packed)

    def send(self, packed: BatchLayout) -> None:
        for some in split_step(packed, CAPTURE_ROWS[-1]):
            sizes, tiles = step_shape(some, self.share)
            self.pages.update(some.spans)
            write_tables(self.host.numpy(), some, tiles, sizes)
            self.device[: sizes.table_size].copy_(self.host[: sizes.table_size], non_blocking=True)

    def answer(self, packed: BatchLayout) -> StepOutput:
        tokens = packed.table[0].tolist()
        said = [self.rng.randrange(VOCAB) for _ in packed.logits_indices]
        wanted = {row: place for place, row in enumerate(packed.logits_indices)}
        for span in packed.spans:
            for parent, child in self.branch(span):
                if parent in wanted:
                    said[wanted[parent]] = tokens[child]
        logits = torch.zeros(len(said), VOCAB)
        logits[torch.arange(len(said)), torch.tensor(said, dtype=torch.long)] = PEAK
        features = (
            self.features if packed.rows <= CAPTURE_ROWS[-1] else torch.zeros(packed.rows, self.features.shape[1])
        )
        return StepOutput(logits, features[: packed.rows], lambda: said)

    def branch(self, span: Span) -> list[tuple[int, int]]:
        """Return the rows of a span, each followed by its own row."""
        parents = span.parents or tuple(range(-1, span.rows - 2))
        root, node = span.first + span.rows - len(parents) - 1, -1
        found: list[tuple[int, int]] = []
        while self.rng.random() < STANDS:
            children = [child for child in range(node + 1, len(parents)) if parents[child] == node]
            if not children:
                break
            before, node = node, self.rng.choice(children)
            found.append((root + 1 + before, root + 1 + node))
        return found


class PlayedCosts(StepCosts):
    """Steps of a machine that is not here."""

    def observe(self, rows: int, context: int, seconds: float, pairs: int = 0) -> None:
        super().observe(rows, context, STEP + ROW * rows, pairs)


def runner_and_head() -> tuple[ModelRunner, EagleDrafter]:
    model = random_decoder(MODEL, 0, 0.3)
    lender, head = TargetWeights.of(model), make_head(HEAD)
    init_weights(head, torch.Generator().manual_seed(0), spread=0.2)
    runner = ModelRunner(model, PAGES, PAGE, CONTEXT, HEAD.hidden_layers, head_layer_shapes(HEAD))
    head.share_weights(lender)
    head.prepare(CONTEXT)
    drafter = head_drafter(runner, head, MODEL.layers, "eagle", single_graph=True)
    assert isinstance(drafter, EagleDrafter)
    return runner, drafter


def controller_of(drafter: MixDrafter, tree: int) -> AdaptiveController:
    traits = {name: each.traits for name, each in drafter.drafters.items()}
    return AdaptiveController(traits, ControllerSettings(max_tree_nodes=tree), PlayedCosts(CostPrior(row=0.002)))


class Bench:
    """An engine with running sequences whose parts are timed."""

    def __init__(self, batch: int, temperature: float, mixed: bool = False) -> None:
        """`mixed` adds two free drafters to the head."""
        self.watch, (runner, head) = Watch(), runner_and_head()
        drafter: Drafter = MixDrafter([head, SuffixDrafter(), TokenRecyclingDrafter(VOCAB)]) if mixed else head
        self.engine = Engine(
            runner, drafter, FixedController(3), Scheduler(runner, PrefixIndex(runner.pool), batch, 8192)
        )
        runner.executor = Unreal(MODEL.heads // MODEL.kv_heads, len(HEAD.hidden_layers))
        assert head._graph is not None and head._graph_prefill is not None, "it drafts in a single graph"
        replays = head._graph.graphs, head._graph_prefill.graphs = Replay(), Replay()  # type: ignore[assignment]
        self._charge(runner.executor, replays)
        maker = RequestBuilder(RequestLimits(CONTEXT, frozenset(), VOCAB), None, self.engine.drafter)
        params = SamplingParams(max_tokens=CONTEXT - PROMPT - 64, temperature=temperature, seed=0)
        rng = random.Random(batch)
        for name in range(batch):
            self.engine.add(maker.make(str(name), [rng.randrange(VOCAB) for _ in range(PROMPT)], params)[0])

    def _charge(self, unreal: Unreal, replays: tuple[Replay, ...]) -> None:
        engine, time = self.engine, self.watch.time
        time(engine, "schedule", "plan")
        time(engine, "draft", "draft")
        time(engine.runner, "forward", "pack")
        time(unreal, "send", "tables")
        time(engine.verifier, "verify", "verify")
        time(engine, "commit", "commit")
        time(engine, "observe", "observe")
        time(unreal, "answer", "device")
        for replayed in replays:
            time(replayed, "replay", "device")

    def measured(self, nodes: int, levels: int, run: Run) -> dict[str, float]:
        """Microseconds of a step with drafts of one size, and of its parts."""
        self.engine.controller = FixedController(nodes, levels)
        self._warm(run.warm)
        seen: dict[str, list[float]] = {part: [] for part in ("whole", *PARTS)}
        for _ in range(run.steps):
            self.watch.spent.update(dict.fromkeys(self.watch.spent, 0.0))
            began = perf_counter()
            self.engine.step()
            seen["whole"].append(perf_counter() - began - self.watch.spent["device"])
            for part in PARTS:
                seen[part].append(self.watch.spent[part])
        return _ranked(seen, run.rank)

    def decided(self, tree: int, run: Run) -> dict[str, float]:
        """The same of a controller, in steps in which every sequence decodes: what it polls, decides and learns."""
        self._warm(run.warm)  # what the head does for the first time would be taken for its price
        self.engine.controller = controller = controller_of(self.engine.drafter, tree)
        watch = Watch(dict.fromkeys(("wants_free_drafts", "free_drafts", "choose_draft_lengths", "observe"), 0.0))
        for name in ("wants_free_drafts", "choose_draft_lengths", "observe"):
            watch.time(controller, name, name)
        watch.time(self.engine.safe_drafter, "free_drafts", "free_drafts")
        self._warm(run.warm)
        seen: dict[str, list[float]] = {part: [] for part in watch.spent}
        for _ in range(run.steps):
            watch.spent.update(dict.fromkeys(watch.spent, 0.0))
            self.engine.step()
            if len(controller._decoding) == len(self.engine.states):
                for part, seconds in watch.spent.items():
                    seen[part].append(seconds)
        found = _ranked(seen, run.rank)
        drafted = sum(count for (_, done, _), count in controller.decisions.counts.items() if done == "drafted")
        return {**found, "drafts a step": drafted / (run.warm + run.steps), "steps": len(seen["wants_free_drafts"])}

    def _warm(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
        assert self.engine.stats.drafter_failures == 0, "no drafter failed"


def _ranked(seen: dict[str, list[float]], rank: float) -> dict[str, float]:
    """Microseconds of each part: of all steps the one of this rank."""
    return {part: 1e6 * sorted(each)[int(rank * (len(each) - 1))] for part, each in seen.items()}


def rounds(run: Run) -> dict[str, dict[str, float]]:
    """By drafts."""
    found = {}
    for batch, nodes, levels in ((1, 3, 0), (1, 16, 4), (1, 64, 6), (32, 3, 0)):
        for temperature in (0.0, 1.0):
            kind = f"tree of {nodes}" if levels else f"chain of {nodes}"
            found[f"batch {batch}, {kind}, T={temperature:g}"] = Bench(batch, temperature).measured(nodes, levels, run)
    return found


def deciding(run: Run) -> dict[str, dict[str, float]]:
    """Measure by batch size and largest tree."""
    found = {}
    for batch in (1, 16):
        for tree in (0, 64):
            kind = f"trees of up to {tree}" if tree else "chains"
            found[f"batch {batch}, {kind}"] = Bench(batch, 0.0, mixed=True).decided(tree, run)
    return found


def show(table: dict[str, dict[str, float]]) -> None:
    parts = list(next(iter(table.values())))
    print(f"| us a step | {' | '.join(parts)} |\n|---|{'---:|' * len(parts)}")
    for name, of in table.items():
        print(f"| {name} | {' | '.join(f'{of[part]:.4g}' for part in parts)} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", type=int, default=60)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", type=float, default=0.5, help="of the steps, 0.5: the middle one; less if it is busy")
    run = Run(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    found = {"rounds": rounds(run), "deciding": deciding(run)}
    for table in found.values():
        show(table)
    print(json.dumps({"bench": "host", **found}))


if __name__ == "__main__":
    main()
