"""What a streamed answer cost and what speculation did for it, counted from its deltas."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from foretell.types import TARGET, Delta


@dataclass
class Tally:
    """One answer. A delta is a step of the target that gave it tokens."""

    began: float = field(default_factory=perf_counter)
    first: float | None = None
    last: float = 0.0
    steps: int = 0
    drafted: int = 0
    first_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    text: str = ""
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        """Count one delta, now."""
        self.last = perf_counter()
        if self.first is None:
            self.first, self.first_tokens = self.last, len(delta.tokens)
        self.steps += 1
        self.drafted += delta.num_drafted
        self.tokens += delta.tokens
        self.origins += delta.origins
        self.text += delta.text
        self.finish = delta.finish_reason

    @property
    def accepted(self) -> int:
        return sum(origin != TARGET for origin in self.origins)

    @property
    def accepted_per_step(self) -> float:
        return len(self.tokens) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: from the first token on, that one not counted."""
        seconds = self.last - (self.first or self.last)
        return (len(self.tokens) - self.first_tokens) / seconds if seconds > 0 else 0.0

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{len(self.tokens)} tokens in {self.steps} steps ({self.accepted_per_step:.2f} a step, "
            f"{self.accepted} of {self.drafted} guesses accepted), {self.tokens_per_second:.1f} tokens/s, "
            f"first after {(self.first or self.began) - self.began:.2f} s"
        )
