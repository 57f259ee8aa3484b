"""How fast a copy of a model reads prompts and writes texts, by how many are written at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foretell.plan.drafter_cost import DrafterCost, Round, best_round, round_of
from foretell.plan.steps import Placed

Speculation = Literal["on", "off", "load"]
SPECULATION = ("on", "off", "load")
CHUNK = 2048  # tokens of prompts that one step takes along


@dataclass(frozen=True)
class Pace:
    """`steps[n]` is the step with n texts being written, from 1 on; `read` the seconds of a prompt's token."""

    steps: tuple[Round, ...]
    read: float
    chunk: float = CHUNK

    @property
    def seats(self) -> int:
        return len(self.steps) - 1

    def writing(self, texts: int, reading: bool) -> float:
        """Tokens a second of each text; a step that takes prompts along is longer by them."""
        if texts == 0:
            return 0.0
        step = self.steps[texts]
        return step.tokens / (step.seconds + (self.chunk * self.read if reading else 0.0))

    def reading(self, texts: int) -> float:
        """Prompt tokens a second beside so many texts."""
        if self.read == 0:
            return float("inf")
        if texts == 0:
            return 1 / self.read
        return self.chunk / (self.steps[texts].seconds + self.chunk * self.read)


def pace_of(
    target: Placed,
    guesser: DrafterCost,
    seats: int,
    context: float,
    prompt: float,
    acceptance: float,
    most: int,
    speculation: Speculation,
    length: int | None,
) -> Pace:
    """As a plan has it: guesses always of one length, never, or as many as pay among so many texts."""
    alone = best_round(target, guesser, 1, context, most, acceptance).length

    def step(texts: int) -> Round:
        if speculation == "off":
            return round_of(target, guesser, texts, context, 0)
        if speculation == "load" and length is None:
            return best_round(target, guesser, texts, context, most, acceptance)
        wanted = alone if length is None else length
        fixed = round_of(target, guesser, texts, context, wanted, acceptance)
        if speculation == "on":
            return fixed
        return max(fixed, round_of(target, guesser, texts, context, 0), key=lambda each: each.rate)

    steps = [step(1), *(step(texts) for texts in range(1, seats + 1))]  # the first is never asked for
    return Pace(tuple(steps), target.prompt(prompt) / prompt if prompt else 0.0)
