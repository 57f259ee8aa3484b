"""How fast a copy of a model reads prompts and writes texts, by how many are written at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foretell.plan.drafter_cost import DrafterCost, StepEstimate, best_step, estimate_step
from foretell.plan.steps import DeployedModel

Speculation = Literal["on", "off", "load"]
SPECULATION = ("on", "off", "load")
CHUNK = 2048  # tokens of prompts that one step takes along


@dataclass(frozen=True)
class ServiceTimes:
    """`steps[n]` is the step with n texts being written, from 1 on; `read` the seconds of a prompt's token."""

    steps: tuple[StepEstimate, ...]
    prefill_seconds_per_token: float
    chunk: float = CHUNK

    @property
    def max_num_seqs(self) -> int:
        return len(self.steps) - 1

    def decode_rate(self, texts: int, reading: bool) -> float:
        """Tokens a second of each text; a step that takes prompts along is longer by them."""
        if texts == 0:
            return 0.0
        step = self.steps[texts]
        return step.tokens / (step.seconds + (self.chunk * self.prefill_seconds_per_token if reading else 0.0))

    def prefill_rate(self, texts: int) -> float:
        """Prompt tokens a second beside so many texts."""
        if self.prefill_seconds_per_token == 0:
            return float("inf")
        if texts == 0:
            return 1 / self.prefill_seconds_per_token
        return self.chunk / (self.steps[texts].seconds + self.chunk * self.prefill_seconds_per_token)


def service_times(
    target: DeployedModel,
    guesser: DrafterCost,
    seats: int,
    context: float,
    prompt: float,
    acceptance: float,
    most: int,
    speculation: Speculation,
    length: int | None,
) -> ServiceTimes:
    """As a plan has it: guesses always of one length, never, or as many as pay among so many texts."""
    alone = best_step(target, guesser, 1, context, most, acceptance).length

    def step(texts: int) -> StepEstimate:
        if speculation == "off":
            return estimate_step(target, guesser, texts, context, 0)
        if speculation == "load" and length is None:
            return best_step(target, guesser, texts, context, most, acceptance)
        wanted = alone if length is None else length
        fixed = estimate_step(target, guesser, texts, context, wanted, acceptance)
        if speculation == "on":
            return fixed
        return max(fixed, estimate_step(target, guesser, texts, context, 0), key=lambda each: each.tokens_per_second)

    steps = [step(1), *(step(texts) for texts in range(1, seats + 1))]  # the first is never asked for
    return ServiceTimes(tuple(steps), target.prefill_seconds(prompt) / prompt if prompt else 0.0)
