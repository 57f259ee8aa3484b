"""What an engine reaches on a machine, fitted to what was measured there.

The usual values are beliefs of a stated strength; a few steps move those that they tell of, many steps all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .bench_reader import Observation
from .drafter_cost import FREE, DrafterCost, estimate_step
from .steps import DeployedModel, Efficiency

# How far off each usual value may be, as a factor's logarithm; what is not named here stays as it is.
DOUBT = {
    "weights": 0.15,
    "cache": 0.2,
    "products": 0.4,
    "attention": 0.4,
    "layer": 0.3,
    "host": 0.7,
    "host_text": 0.3,
    "guess": 0.3,
    "guess_text": 0.3,
}
NOISE = 0.02  # of a measured step, likewise
TURNS = 25
NUDGE = 1e-4
CLOSE = 1e-7

Vector = list[float]


@dataclass(frozen=True)
class EfficiencyFit:
    """What came of it: the fitted values, and how far its own steps are from them, as shares."""

    efficiency: Efficiency
    steps: int
    mean_error: float
    worst_error: float
    doubts: tuple[str, ...] = ()  # whether the steps are those of this target on this device


def calibrate(target: DeployedModel, guesser: DrafterCost, observations: Sequence[Observation]) -> EfficiencyFit:
    """Fit a machine's efficiency to steps of `target`, and of the guesser's model where there is one."""
    told = [each for each in observations if each.drafter != "model" or guesser.model is not None]
    told = [each for each in told if not each.of_draft or guesser.model is not None]
    usual = target.efficiency
    names = list(DOUBT)

    def efficiency(moved: Vector) -> Efficiency:
        values = {n: getattr(usual, n) * math.exp(by) for n, by in zip(names, moved, strict=True)}
        return replace(usual, **values)

    def misses(moved: Vector) -> Vector:
        """In units of what is to be expected: of steps, and of beliefs that were moved."""
        reached = efficiency(moved)
        wrong = [math.log(predicted_seconds(target, guesser, reached, each) / each.seconds) / NOISE for each in told]
        return wrong + [by / DOUBT[name] for name, by in zip(names, moved, strict=True)]

    moved = least_squares(misses, len(names))
    reached = efficiency(moved)
    errors = [abs(predicted_seconds(target, guesser, reached, each) / each.seconds - 1) for each in told]
    return EfficiencyFit(reached, len(told), sum(errors) / max(1, len(errors)), max(errors, default=0.0))


def predicted_seconds(target: DeployedModel, guesser: DrafterCost, reached: Efficiency, seen: Observation) -> float:
    """The seconds an observation should have taken."""
    placed = target.with_efficiency(reached)
    drafts = None if guesser.model is None else guesser.model.with_efficiency(reached)
    if seen.of_draft:
        assert drafts is not None, "steps of a draft model are told only where there is one"
        return drafts.step(seen.batch, seen.length + 1, seen.context).total
    if not seen.wall:
        return placed.step(seen.batch, seen.length + 1, seen.context).total
    who = DrafterCost(FREE[0]) if seen.drafter != "model" else replace(guesser, model=drafts)
    return estimate_step(placed, who, seen.batch, seen.context, seen.length).seconds


def least_squares(misses: Callable[[Vector], Vector], size: int) -> Vector:
    """Where the sum of squares is least, by Gauss and Newton from 0, with steps halved until they help."""
    at = [0.0] * size
    found = misses(at)
    for _ in range(TURNS):
        slopes = [_slope(misses, at, found, place) for place in range(size)]
        square = [[_dot(one, other) for other in slopes] for one in slopes]
        step = solve(square, [-_dot(one, found) for one in slopes])
        share, better = 1.0, found
        while share > CLOSE:
            there = [a + share * s for a, s in zip(at, step, strict=True)]
            better = misses(there)
            if _dot(better, better) <= _dot(found, found):
                break
            share /= 2
        else:
            return at
        moved = max(abs(share * s) for s in step)
        at, found = there, better
        if moved < CLOSE:
            break
    return at


def _slope(misses: Callable[[Vector], Vector], at: Vector, found: Vector, place: int) -> Vector:
    nudged = [value + (NUDGE if i == place else 0.0) for i, value in enumerate(at)]
    return [(new - old) / NUDGE for new, old in zip(misses(nudged), found, strict=True)]


def _dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def solve(matrix: list[Vector], right: Vector) -> Vector:
    """Gauss's elimination; every belief has a strength, so there is one solution."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for place in range(size):
        best = max(range(place, size), key=lambda i: abs(rows[i][place]))
        rows[place], rows[best] = rows[best], rows[place]
        for below in range(place + 1, size):
            factor = rows[below][place] / rows[place][place]
            rows[below] = [a - factor * b for a, b in zip(rows[below], rows[place], strict=True)]
    found = [0.0] * size
    for place in reversed(range(size)):
        rest = sum(rows[place][i] * found[i] for i in range(place + 1, size))
        found[place] = (rows[place][size] - rest) / rows[place][place]
    return found
