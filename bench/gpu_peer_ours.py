"""Foretell as a child of `gpu_peers.py`: one engine on which drafters take turns, each with no learned state."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from engine_child import Job, Written, answer

from foretell import SamplingParams
from foretell.bench.drafter_slots import DrafterSlots, load_llm_for
from foretell.bench.machine import describe
from foretell.bench.measure import Variant
from foretell.build.model_source import no_progress, open_model
from foretell.config import SpeculationConfig
from foretell.outputs import RequestOutput
from foretell.version import VERSION

WARM_UP = 8  # tokens
IDLE = 45.0  # seconds, the most for what a server does while it is idle: graphs and costs


class OurEngine:
    """`ways` are settings of speculation by name, `settings` those of the `LLM`."""

    def __init__(self, ways: dict[str, dict[str, Any]], settings: dict[str, Any]) -> None:
        self.ways = {name: SpeculationConfig(**config) for name, config in ways.items()}
        arms = [Variant(name, config) for name, config in self.ways.items() if config.drafter != "none"]
        self.llm = load_llm_for(arms, quiet=True, **settings)
        self.seats = DrafterSlots(self.llm, open_model(settings["model"], self.llm.config, no_progress))

    def about(self) -> dict[str, Any]:
        rehearsed = self.llm.assembly.warmup.num_done
        return {"foretell": VERSION, "rehearsed": rehearsed, **describe(self.llm)}

    def prepare(self, jobs: Sequence[Job]) -> None:
        until = monotonic() + IDLE
        while monotonic() < until and self.llm.assembly.while_idle():
            pass
        for job in jobs:
            self.begin(job)(job.prompts[: job.batch])

    def begin(self, job: Job) -> Callable[[list[list[int]]], list[RequestOutput]]:
        self.seats.make(self.ways[job.way]).activate()
        wanted = {"temperature": job.temperature, "ignore_eos": True}
        warm_up = SamplingParams(max_tokens=min(WARM_UP, job.tokens), **wanted)
        self.llm.generate([job.prompts[0][::-1]], warm_up)  # no text of a job: who learns from it learns nothing of use

        def write(prompts: list[list[int]]) -> list[RequestOutput]:
            params = [SamplingParams(max_tokens=job.tokens, seed=i, **wanted) for i in range(len(prompts))]
            return self.llm.generate(prompts, params)

        return write

    def read(self, outputs: list[RequestOutput]) -> Written:
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        steps = sum(output.speculation.steps for output in outputs)
        return Written(tokens, sum(output.timings.decode for output in outputs), sum(map(len, tokens)) - steps)


if __name__ == "__main__":
    answer(lambda: OurEngine(**json.loads(sys.argv[1])))
