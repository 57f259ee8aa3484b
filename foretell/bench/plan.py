"""How much is measured, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams


@dataclass(frozen=True)
class Plan:
    """How many prompts of each task, how long and how often; None leaves it to the workload."""

    per_task: int | None = None
    max_tokens: int | None = None  # the most for any text
    rounds: int = 3
    temperatures: tuple[float | None, ...] = (None,)  # None: as each request says, greedy where it says nothing
    schemas: bool = True  # whether a wanted JSON schema is enforced
    batches: tuple[int, ...] = (1,)  # texts written at once

    def __post_init__(self) -> None:
        for name in ("per_task", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(name, f"must be 1 or more, not {value}")
        for batch in self.batches:
            if batch < 1:
                raise RequestError("batch", f"must be 1 or more, not {batch}")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature or 0.0, max_tokens=self.max_tokens)

    def but(
        self,
        per_task: int | None = None,
        max_tokens: int | None = None,
        rounds: int | None = None,
        temperatures: tuple[float, ...] | None = None,
        batches: tuple[int, ...] | None = None,
    ) -> Plan:
        """With what a user asked for in the place of our own."""
        return replace(
            self,
            per_task=self.per_task if per_task is None else per_task,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            rounds=self.rounds if rounds is None else rounds,
            temperatures=temperatures or self.temperatures,
            batches=batches or self.batches,
        )


OFFLINE = Plan()
# Without schemas: a grammar guesses as well, and this one is about drafters.
DRAFTERS = Plan(per_task=5, max_tokens=64, temperatures=(0.0, 1.0), schemas=False)


def quick(plan: Plan) -> Plan:
    """As little as still tells something."""
    return replace(plan, per_task=1, max_tokens=24, rounds=2, temperatures=(0.0,), batches=plan.batches[:1])
