"""Host time of speculation while nothing is drafted: python bench/idle_controller.py

A runner without a model generates random outputs that no drafter can predict. Three engines write them in turn: one
without drafters, one whose controller has switched them off, and one whose requests want none. The first is taken off
the others: what is left should be under 30 microseconds a step and 3 a text, the rare looks included.
"""

from __future__ import annotations

import argparse
import json
import random
from statistics import mean, median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

from foretell.config import SpeculationConfig
from foretell.control.adaptive import AdaptiveController
from foretell.control.controller import FixedController
from foretell.control.latency_model import StepCosts
from foretell.draft import DrafterParts, build
from foretell.draft.mix import MixDrafter
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.kv.pages import PagePool
from foretell.kv.prefix import PrefixIndex
from foretell.runner.batch_layout import num_logits
from foretell.runner.executor import StepOutput
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, ScheduledSequence, Sequence, SpeculationChoice

VOCAB, PAGE, CONTEXT, PROMPT = 2048, 16, 1 << 20, 64
STEP, ROW = 0.01, 0.002  # seconds that a step and a row of it would take on the machine that is played


class Chance(ModelRunner):
    """Samples every token at random, low ids more often, so that sequences repeat a little without a pattern."""

    def __init__(self, rows: int, seed: int) -> None:
        self.pool, self.context, self.hidden_layers = PagePool(1 << 16, PAGE), CONTEXT, ()
        self.model: Any = SimpleNamespace(config=SimpleNamespace(vocab=VOCAB))
        self.workers = None
        self.executor: Any = SimpleNamespace(supports_async=False, is_batch_invariant=True)
        self.rng, self.logits, self.set = random.Random(seed), torch.zeros(rows, VOCAB), (torch.tensor([0]),) * 2

    def forward(self, shares: list[ScheduledSequence], drafts: list[Draft]) -> StepOutput:
        rows = sum(num_logits(share, draft) for share, draft in zip(shares, drafts, strict=True))
        self.logits[self.set] = 0.0
        tokens = [int(VOCAB ** self.rng.random()) - 1 for _ in range(rows)]
        self.set = (torch.arange(rows), torch.tensor(tokens))
        self.logits[self.set] = 1.0
        return StepOutput(self.logits[:rows], None)

    def compact_kv(self, seq: Sequence, root: int, path: tuple[int, ...]) -> None:
        """There is nothing to move."""


class PlayedCosts(StepCosts):
    """Steps of a machine that is slower than a runner without a model."""

    def observe(self, rows: int, context: int, seconds: float, pairs: int = 0) -> None:
        super().observe(rows, context, seconds + STEP + ROW * rows, pairs)


def controlled(drafter: MixDrafter) -> AdaptiveController:
    traits = {name: each.traits for name, each in drafter.drafters.items()}
    return AdaptiveController(traits, costs=PlayedCosts())


def engine(batch: int, speculates: bool, seed: int) -> Engine:
    runner = Chance(batch * 17, seed)
    drafter = build(DrafterParts(SpeculationConfig(), runner)) if speculates else MixDrafter([])
    controller = controlled(drafter) if speculates else FixedController(0)
    scheduler = Scheduler(runner, PrefixIndex(runner.pool), batch, 8192)
    return Engine(runner, drafter, controller, scheduler)


def filled(made: Engine, batch: int, choice: SpeculationChoice, warm: int) -> Engine:
    maker = RequestBuilder(RequestLimits(CONTEXT, frozenset(), VOCAB), None, made.drafter)
    params, rng = SamplingParams(max_tokens=1 << 19, temperature=0.0), random.Random(batch)
    for i in range(batch):
        prompt = [int(VOCAB ** rng.random()) - 1 for _ in range(PROMPT)]
        made.add(maker.make(str(i), prompt, params, choice)[0])
    for _ in range(warm):
        made.step()
    return made


def block(made: Engine, steps: int) -> float:
    """Mean microseconds of a step."""
    began = perf_counter()
    for _ in range(steps):
        made.step()
    return (perf_counter() - began) / steps * 1e6


def measure(batch: int, warm: int, blocks: int, steps: int) -> dict[str, float]:
    arms = {
        "plain": filled(engine(batch, False, 1), batch, SpeculationChoice(), warm),
        "switched off": filled(engine(batch, True, 1), batch, SpeculationChoice(), warm),
        "not wanted": filled(engine(batch, True, 1), batch, SpeculationChoice(enabled=False), warm),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    drafted = arms["switched off"].stats.speculation.drafted
    for _ in range(blocks):
        for name, made in arms.items():
            times[name].append(block(made, steps))
    written = blocks * steps * batch
    found = {name: median(of) for name, of in times.items()}
    for name in ("switched off", "not wanted"):
        found[f"{name}, beyond plain"] = mean(median_part(times[name], times["plain"]))
    found["drafted a step and text"] = (arms["switched off"].stats.speculation.drafted - drafted) / written
    return found


def median_part(arm: list[float], plain: list[float]) -> list[float]:
    """Differences block by block, without the quarter at either end: what other programs did meanwhile."""
    pairs = sorted(a - b for a, b in zip(arm, plain, strict=True))
    cut = len(pairs) // 4
    return pairs[cut : len(pairs) - cut]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--warm", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=64, help="in a block")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    print(
        "| batch | plain, us a step | switched off, beyond | not wanted, beyond | allowed |\n|---:|---:|---:|---:|---:|"
    )
    for batch in args.batch:
        found = result[batch] = measure(batch, args.warm, args.blocks, args.steps)
        off, unwanted = found["switched off, beyond plain"], found["not wanted, beyond plain"]
        print(f"| {batch} | {found['plain']:.0f} | {off:.0f} | {unwanted:.0f} | {30 + 3 * batch} |", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
