"""Expected tokens, speedup and break-even acceptance of speculative decoding.

The model of Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding": each draft token is
accepted with the same probability, given that all before it were accepted. Controller, planner and benchmarks share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PRECISION = 1e-6  # width of the interval at which the search for the break-even acceptance stops


def expected_tokens(acceptance: float, length: int) -> float:
    """Return the expected tokens of one step with `length` draft tokens, the target's own token included.

    This is (1 - a^(k+1)) / (1 - a), equation 1 of Leviathan et al. 2023.
    """
    if acceptance >= 1:
        return length + 1.0
    return float((1 - acceptance ** (length + 1)) / (1 - acceptance))


def speedup(acceptance: float, length: int, cost_ratio: float) -> float:
    """Return the speedup over plain decoding. `cost_ratio` is the time of the speculative step over a plain one."""
    return expected_tokens(acceptance, length) / cost_ratio


def break_even_acceptance(cost_ratio: float, length: int) -> float | None:
    """Return the smallest acceptance with a speedup of at least 1, or None if even full acceptance is slower.

    Expected tokens grow with acceptance, so bisection finds it.
    """
    if expected_tokens(1.0, length) < cost_ratio:
        return None
    low, high = 0.0, 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        if expected_tokens(middle, length) < cost_ratio:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class SpeculationCosts:
    """Seconds of a target step and of a draft, both as functions of the batch size and the draft length."""

    step_seconds: Callable[[int, int], float]
    draft_seconds: Callable[[int, int], float]

    def cost_ratio(self, batch: int, length: int) -> float:
        """Return the time of a step with drafts of `length` tokens over the time of a plain step."""
        speculative = self.step_seconds(batch, length) + self.draft_seconds(batch, length)
        return speculative / self.step_seconds(batch, 0)

    def speedup(self, batch: int, length: int, acceptance: float) -> float:
        """Return the speedup of drafts of `length` tokens over plain decoding."""
        return speedup(acceptance, length, self.cost_ratio(batch, length))

    def break_even(self, batch: int, length: int) -> float | None:
        """Return the acceptance at which drafts of `length` tokens pay for themselves, or None if they never do."""
        return break_even_acceptance(self.cost_ratio(batch, length), length)

    def best_length(self, batch: int, acceptance: float, max_length: int, margin: float) -> tuple[int, float]:
        """Return the fastest draft length and its speedup; (0, 1.0) if none wins by more than `margin`."""
        length = max(range(max_length + 1), key=lambda count: self.speedup(batch, count, acceptance))
        gain = self.speedup(batch, length, acceptance)
        return (length, gain) if gain > 1 + margin else (0, 1.0)
