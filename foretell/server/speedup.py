"""How much sooner texts came than plain decoding would have brought them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.engine.streams import StepReport, StepTiming

# Seconds of the target in a plain step of so many texts that look at so many cached tokens; None where not known.
PlainSeconds = Callable[[int, int], float | None]


@dataclass
class Speedup:
    """Tokens times the plain step's time at their batch and context, over the time they took.

    A plain step's time is the target's, and what the step at hand took beside guessing and running the target.
    Steps that also ran prompts say nothing of decoding and are left out; so are steps whose plain time is not known.
    """

    plain_seconds: PlainSeconds
    plain: float = 0.0
    taken: float = 0.0

    def observe(self, report: StepReport) -> None:
        """Count one step."""
        step = plain_step(self.plain_seconds, report.timing)
        if step is not None:
            tokens = sum(len(piece.delta.tokens) for piece in report.items)
            self.plain += tokens / report.timing.num_sequences * step
            self.taken += report.timing.seconds

    @property
    def value(self) -> float | None:
        return self.plain / self.taken if self.taken > 0 else None


def plain_step(plain_seconds: PlainSeconds, clock: StepTiming) -> float | None:
    """What the same step would have taken without guesses; None where that is not known, or where it read prompts."""
    step = plain_seconds(clock.num_sequences, clock.context_tokens) if clock.is_decode_only else None
    return None if step is None else step + clock.host_seconds


def unknown(batch: int, context: int) -> float | None:
    """Where nobody measures plain steps."""
    return None
