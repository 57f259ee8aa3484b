"""Whether the metric `speedup` tells the truth: python bench/speedup.py

The same prompts with speculation and without, alternating, one at a time, through the server's own engine and metric.
What the metric says of the runs with speculation is compared with the time the others took; of those it should say 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field
from statistics import median

from foretell.bench.prompt import BenchPrompt
from foretell.bench.workloads import load, select
from foretell.build.engine_builder import Assembly, build_engine
from foretell.config import EngineConfig, SpeculationConfig
from foretell.engine.async_engine import AsyncEngine
from foretell.engine.streams import StreamItem
from foretell.sampling_params import SamplingParams
from foretell.server.metrics import Speedup
from foretell.types import SpeculationChoice

TASKS = ("edit", "code", "chat", "story")
TOLERANCE = 0.05


@dataclass
class Arm:
    """A variant with its value of the metric, and the seconds of each output after its first token."""

    choice: SpeculationChoice
    metric: Speedup
    seconds: dict[str, list[float]] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)


class Scene:
    """An engine in its thread, one request at a time."""

    def __init__(self, assembly: Assembly, tokens: int) -> None:
        self.assembly = assembly
        self.engine = AsyncEngine(assembly.engine, 4)
        self.params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.count = 0

    async def write(self, item: BenchPrompt, arm: Arm) -> None:
        self.engine.observe = arm.metric.observe
        self.count += 1
        tokens, name = self.assembly.tokenizer.encode_chat(item.messages), str(self.count)
        # A tenant each, so that no request hits the prefix cache.
        requests = self.assembly.requests.make(name, tokens, self.params, arm.choice, tenant=name)
        pieces: list[StreamItem] = [piece async for piece in self.engine.submit(requests).items()]
        clock = pieces[-1].state.timings
        assert clock.finished is not None and clock.first_token is not None
        arm.seconds.setdefault(item.id, []).append(clock.finished - clock.first_token)
        arm.outputs[item.id] = [token for piece in pieces for token in piece.delta.tokens]


async def measure(scene: Scene, items: list[BenchPrompt], rounds: int) -> tuple[Arm, Arm]:
    known = scene.assembly.engine.plain_seconds
    scene.engine.start()
    warm = Arm(SpeculationChoice(), Speedup(known))
    for item in items:  # costs are learnt, pages touched
        await scene.write(item, warm)
    plain, speculative = Arm(SpeculationChoice(enabled=False), Speedup(known)), Arm(SpeculationChoice(), Speedup(known))
    for _ in range(rounds):
        for item in items:
            for arm in (plain, speculative):
                await scene.write(item, arm)
    await scene.engine.stop()
    return plain, speculative


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=1, help="of each task")
    args = parser.parse_args()
    assembly = build_engine(EngineConfig(), SpeculationConfig())
    items, _ = select(load("own", tasks=TASKS), args.prompts, lambda item: True)
    plain, speculative = asyncio.run(measure(Scene(assembly, args.max_tokens), items, args.rounds))
    for item in items:
        assert speculative.outputs[item.id] == plain.outputs[item.id], "equal outputs"
        pairs = zip(plain.seconds[item.id], speculative.seconds[item.id], strict=True)
        print(f"{item.task}: {median(a / b for a, b in pairs):.2f}x plain")
    measured = sum(map(sum, plain.seconds.values())) / sum(map(sum, speculative.seconds.values()))
    metric, of_plain = speculative.metric.value, plain.metric.value
    assert metric is not None and of_plain is not None, "steps were measured"
    off = max(abs(metric / measured - 1), abs(of_plain - 1))
    print(f"measured {measured:.3f}, metric {metric:.3f}, of plain {of_plain:.3f}")
    print(json.dumps({"measured": measured, "metric": metric, "metric_of_plain": of_plain, "off": off}))
    return 0 if off <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
