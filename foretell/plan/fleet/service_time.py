"""Service times of a replica: decode and prefill rates by the number of decoding sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foretell.plan.drafter_cost import DrafterCost, StepEstimate, best_step, estimate_step
from foretell.plan.steps import DeployedModel

Speculation = Literal["on", "off", "load"]
SPECULATION = ("on", "off", "load")
CHUNK = 2048  # prompt tokens per step (chunked prefill)


@dataclass(frozen=True)
class ServiceTimes:
    """Decode steps by batch size, and the cost of a prompt token. `steps[0]` is unused."""

    steps: tuple[StepEstimate, ...]
    prefill_seconds_per_token: float
    chunk: float = CHUNK

    @property
    def max_num_seqs(self) -> int:
        return len(self.steps) - 1

    def decode_rate(self, num_decoding: int, is_prefilling: bool) -> float:
        """Return tokens per second of each sequence; a chunk of prefill lengthens the step."""
        if num_decoding == 0:
            return 0.0
        step = self.steps[num_decoding]
        return step.tokens / (step.seconds + (self.chunk * self.prefill_seconds_per_token if is_prefilling else 0.0))

    def prefill_rate(self, num_decoding: int) -> float:
        """Return prompt tokens per second alongside `num_decoding` sequences."""
        if self.prefill_seconds_per_token == 0:
            return float("inf")
        if num_decoding == 0:
            return 1 / self.prefill_seconds_per_token
        return self.chunk / (self.steps[num_decoding].seconds + self.chunk * self.prefill_seconds_per_token)


def service_times(
    target: DeployedModel,
    drafter: DrafterCost,
    max_num_seqs: int,
    context: float,
    prompt: float,
    acceptance: float,
    max_length: int,
    speculation: Speculation,
    length: int | None,
) -> ServiceTimes:
    """Return the service times of a plan, with speculation on, off, or by load."""
    alone = best_step(target, drafter, 1, context, max_length, acceptance).length

    def step(num_decoding: int) -> StepEstimate:
        if speculation == "off":
            return estimate_step(target, drafter, num_decoding, context, 0)
        if speculation == "load" and length is None:
            return best_step(target, drafter, num_decoding, context, max_length, acceptance)
        wanted = alone if length is None else length
        fixed = estimate_step(target, drafter, num_decoding, context, wanted, acceptance)
        if speculation == "on":
            return fixed
        return max(
            fixed, estimate_step(target, drafter, num_decoding, context, 0), key=lambda each: each.tokens_per_second
        )

    steps = [step(1), *(step(num_decoding) for num_decoding in range(1, max_num_seqs + 1))]
    return ServiceTimes(tuple(steps), target.prefill_seconds(prompt) / prompt if prompt else 0.0)
