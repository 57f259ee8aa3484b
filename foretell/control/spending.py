"""Where rows are spent: the arithmetic of a step, as functions of numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Candidate:
    """What one drafter could guess for a sequence: for each node how likely it is to stand, and what drafting costs."""

    arm: str
    survival: list[float]
    draft_seconds: Callable[[int], float] = field(default=lambda nodes: 0.0)  # of the first so many nodes

    def most_likely_first(self) -> list[float]:
        """A node counts for no more than those before it: what is cut is always the end."""
        return [float(value) for value in np.minimum.accumulate(self.survival)] if self.survival else []


@dataclass(frozen=True)
class Market:
    """The step to be planned: `writers` sequences write, `rows` are run anyway, `curve[i]` prices a step of i rows.

    `held` is what the step costs besides its rows, such as looking at what is cached.
    """

    writers: int
    rows: int
    curve: Vector
    held: float = 0.0

    @property
    def plain(self) -> float:
        """Seconds of the step without drafts."""
        return float(self.curve[self.rows]) + self.held

    def spare(self, margin: float) -> int:
        """Further rows that cost next to nothing, by this share of the step."""
        most = float(self.curve[self.rows]) + margin * self.plain
        return int(np.searchsorted(self.curve, most, "right")) - 1 - self.rows

    def extra(self, rows: int) -> float:
        """Seconds that so many further rows cost."""
        at = min(self.rows + rows, len(self.curve) - 1)
        return float(self.curve[at] - self.curve[self.rows])

    @cached_property
    def extra_each(self) -> list[float]:
        """By nodes what each writer pays for their rows, if all draft as many; the last holds for all beyond it."""
        most = -(-(len(self.curve) - 1 - self.rows) // self.writers)
        at = np.minimum(self.rows + self.writers * np.arange(most + 1), len(self.curve) - 1)
        each: list[float] = ((self.curve[at] - self.curve[self.rows]) / self.writers).tolist()
        return each


@dataclass(frozen=True)
class Plan:
    """Nodes for one sequence, and how much faster than plain it should go; 0 nodes is plain."""

    arm: str = ""
    nodes: int = 0
    gain: float = 1.0
    survival: tuple[float, ...] = ()


def best_plan(market: Market, candidates: list[Candidate], margin: float) -> Plan:
    """The drafter and length that make a sequence fastest, if its neighbours do alike; plain unless it wins clearly."""
    best = Plan(gain=1 + margin)
    share, rows = market.plain / market.writers, market.extra_each
    for candidate in candidates:
        expected = 1.0
        for nodes, survival in enumerate(candidate.survival, 1):
            expected += survival
            seconds = rows[min(nodes, len(rows) - 1)] + candidate.draft_seconds(nodes)
            gain = expected * share / (share + seconds)
            if gain > best.gain:
                best = Plan(candidate.arm, nodes, gain, tuple(candidate.most_likely_first()[:nodes]))
    return best if best.nodes else Plan()


def share_out(
    market: Market, plans: list[Plan], drafting: float, throughput: bool, margin: float, most: int | None = None
) -> list[int]:
    """Nodes for each sequence, `most` in all, such that the whole batch goes fastest; `drafting` is paid if any drafts.

    Throughput counts tokens; else every sequence's own time a token counts, so that all get their turn.
    """
    items = sorted(_items(plans, throughput), key=lambda item: -item[0])[:most]
    if not items:
        return [0] * len(plans)
    gained = np.cumsum([item[0] for item in items])
    rows = np.minimum(market.rows + 1 + np.arange(len(items)), len(market.curve) - 1)
    seconds = market.curve[rows] + market.held + drafting
    speed = (market.writers + gained if throughput else 1 / (1 - gained / market.writers)) / seconds
    best = int(np.argmax(speed))
    plain = (market.writers if throughput else 1.0) / market.plain
    nodes = [0] * len(plans)
    if speed[best] > plain * (1 + margin):
        for _, sequence in items[: best + 1]:
            nodes[sequence] += 1
    return nodes


def _items(plans: list[Plan], throughput: bool) -> list[tuple[float, int]]:
    """For each node what it is worth, and whose it is; a sequence's nodes are worth less and less."""
    items = []
    for sequence, plan in enumerate(plans):
        expected, least = 1.0, float("inf")
        for survival in plan.survival:
            worth = survival if throughput else 1 / expected - 1 / (expected + survival)
            least = min(least, worth)
            items.append((least, sequence))
            expected += survival
    return items


def let_pass(market: Market, plans: list[Plan], hurried: list[bool], throughput: bool, margin: float) -> list[int]:
    """Those in a hurry get all they planned; of the others guess who can without making the step longer."""
    taken = sum(plan.nodes for plan, first in zip(plans, hurried, strict=True) if first)
    rest = replace(market, rows=min(market.rows + taken, len(market.curve) - 1))
    others = [Plan() if first else plan for plan, first in zip(plans, hurried, strict=True)]
    nodes = share_out(rest, others, 0.0, throughput, 0.0, rest.spare(margin))
    return [plan.nodes if first else count for plan, first, count in zip(plans, hurried, nodes, strict=True)]


def break_even(market: Market, draft_seconds: float = 0.0) -> float:
    """How often a single guess must stand to pay for its row."""
    return (market.extra(market.writers) / market.writers + draft_seconds) / (market.plain / market.writers)
