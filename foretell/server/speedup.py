"""How much sooner texts came than plain decoding would have brought them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.engine.streams import StepReport

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
        texts, tokens = len(report.pieces), sum(len(piece.delta.tokens) for piece in report.pieces)
        drafted = sum(piece.delta.drafted for piece in report.pieces)
        if not texts or report.rows != texts + drafted:
            return
        step = self.plain_seconds(texts, report.context)
        if step is not None:
            self.plain += tokens / texts * (step + report.host)
            self.taken += report.seconds

    @property
    def value(self) -> float | None:
        return self.plain / self.taken if self.taken > 0 else None


def unknown(batch: int, context: int) -> float | None:
    """Where nobody measures plain steps."""
    return None
