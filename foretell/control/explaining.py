"""What the measured costs mean: from when on guesses pay, and how many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Seconds = Callable[[int, int], float]  # of a step, or a draft, by texts and nodes each

RATES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Prices:
    """Seconds of a step with so many texts and nodes each, and of drafting those nodes."""

    step: Seconds
    draft: Seconds

    def speedup(self, texts: int, nodes: int, rate: float) -> float:
        """How much faster than plain, where each guess stands as often as `rate` if those before it did."""
        expected = sum(rate**depth for depth in range(nodes + 1))
        return expected * self.step(texts, 0) / (self.step(texts, nodes) + self.draft(texts, nodes))

    def break_even(self, texts: int, nodes: int) -> float | None:
        """How often a guess must stand for a draft of `nodes` to cost nothing; None where it never does."""
        if self.speedup(texts, nodes, 1.0) <= 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(texts, nodes, middle) >= 1 else (middle, high)
        return high

    def best(self, texts: int, rate: float, most: int, margin: float) -> tuple[int, float]:
        """The length that is fastest, and how much; 0 where none wins clearly."""
        nodes = max(range(most + 1), key=lambda count: self.speedup(texts, count, rate))
        gain = self.speedup(texts, nodes, rate)
        return (nodes, gain) if gain > 1 + margin else (0, 1.0)
