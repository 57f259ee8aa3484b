"""What a plan is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.errors import RequestError

from .drafter_cost import DrafterCost, Round, best_round, round_of
from .steps import Placed


@dataclass(frozen=True)
class PlanQuery:
    """What a plan is asked: how much is written at once, how long texts are, and how often guesses stand."""

    target: Placed
    guesser: DrafterCost
    devices: int
    acceptance: float
    texts: Sequence[int]  # at once, on all devices
    contexts: Sequence[int]
    most: int  # the longest draft that is tried
    length: int | None = None  # the one to take, where it is not to be the best

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise RequestError("acceptance", f"must be between 0 and 1, not {self.acceptance:g}")
        if not self.texts or min(self.texts) < 1:
            raise RequestError("batch", "must be 1 or more, such as 8, 1,8,32 or 1..64")
        if not self.contexts or min(self.contexts) < 1:
            raise RequestError("context", "must be 1 or more, such as 512, 8k or 1k,8k")
        if max(self.contexts) > self.target.shape.context:
            most, name = self.target.shape.context, self.target.shape.name
            raise RequestError("context", f"{max(self.contexts)} is more than the {most} of {name}")
        if self.devices % self.target.split:
            raise RequestError("tensor_parallel", f"{self.target.split} must divide the count, {self.devices}")

    @property
    def copies(self) -> int:
        """How often the whole model is there."""
        return self.devices // self.target.split

    @property
    def dollars_per_hour(self) -> float:
        return self.devices * self.target.device.price

    def plain(self, texts: int, context: int) -> Round:
        """A step without guesses, where texts are shared out over the copies."""
        return self.round(texts, context, 0)

    def round(self, texts: int, context: int, length: int) -> Round:
        """A step with drafts of so many tokens."""
        return round_of(self.target, self.guesser, self.each(texts), context, length, self.acceptance)

    def best(self, texts: int, context: int, acceptance: float) -> Round:
        """A step with drafts of the best length at this acceptance."""
        return best_round(self.target, self.guesser, self.each(texts), context, self.most, acceptance)

    def each(self, texts: int) -> float:
        """Texts on one copy."""
        return max(1.0, texts / self.copies)
