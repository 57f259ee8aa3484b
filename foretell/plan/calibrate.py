"""Calibration: fit an engine's efficiency to measured steps.

The default efficiency is a Gaussian prior on the logarithms of its values. A few steps change the values they
depend on, many steps change all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .bench_reader import Observation
from .drafter_cost import FREE, DrafterCost, estimate_step
from .steps import DeployedModel, Efficiency

# Prior standard deviations of the logarithms of the fitted values. The other values stay as they are.
PRIOR_DEVIATION = {
    "weights": 0.15,
    "cache": 0.2,
    "products": 0.4,
    "attention": 0.4,
    "layer": 0.3,
    "host": 0.7,
    "host_per_sequence": 0.3,
    "draft_host": 0.3,
    "draft_host_per_sequence": 0.3,
}
NOISE = 0.02  # standard deviation of the logarithm of a measured time
ITERATIONS = 25  # at most
DIFFERENCE = 1e-4  # step of the numerical derivative
CONVERGED = 1e-7  # largest change of a value at which the fit stops

Vector = list[float]


@dataclass(frozen=True)
class EfficiencyFit:
    """Fitted efficiency and its relative errors on the measured steps."""

    efficiency: Efficiency
    steps: int
    mean_error: float
    worst_error: float
    warnings: tuple[str, ...] = ()  # if the steps seem to be of another model or device

    def as_json(self) -> dict[str, Any]:
        """Return the fit under the stable names of the JSON of a plan."""
        return {
            "efficiency": self.efficiency.as_json(),
            "steps": self.steps,
            "mean_error": self.mean_error,
            "worst_error": self.worst_error,
            "doubts": self.warnings,
        }


def calibrate(target: DeployedModel, drafter: DrafterCost, observations: Sequence[Observation]) -> EfficiencyFit:
    """Fit the efficiency to steps of `target`, and of the draft model if there is one."""
    usable = [
        each for each in observations if drafter.model is not None or (each.drafter != "model" and not each.of_draft)
    ]
    default = target.efficiency
    names = list(PRIOR_DEVIATION)

    def efficiency(shifts: Vector) -> Efficiency:
        values = {n: getattr(default, n) * math.exp(by) for n, by in zip(names, shifts, strict=True)}
        return replace(default, **values)

    def residuals(shifts: Vector) -> Vector:
        """Return the residuals of steps and prior, in standard deviations."""
        fitted = efficiency(shifts)
        errors = [math.log(predicted_seconds(target, drafter, fitted, each) / each.seconds) / NOISE for each in usable]
        return errors + [by / PRIOR_DEVIATION[name] for name, by in zip(names, shifts, strict=True)]

    fitted = efficiency(least_squares(residuals, len(names)))
    errors = [abs(predicted_seconds(target, drafter, fitted, each) / each.seconds - 1) for each in usable]
    return EfficiencyFit(fitted, len(usable), sum(errors) / max(1, len(errors)), max(errors, default=0.0))


def predicted_seconds(target: DeployedModel, drafter: DrafterCost, efficiency: Efficiency, step: Observation) -> float:
    """Return the seconds that the model predicts for an observation."""
    deployed = target.with_efficiency(efficiency)
    drafts = None if drafter.model is None else drafter.model.with_efficiency(efficiency)
    if step.of_draft:
        assert drafts is not None, "steps of a draft model need one"
        return drafts.step(step.batch, step.length + 1, step.context).total
    if not step.wall:
        return deployed.step(step.batch, step.length + 1, step.context).total
    used = DrafterCost(FREE[0]) if step.drafter != "model" else replace(drafter, model=drafts)
    return estimate_step(deployed, used, step.batch, step.context, step.length).seconds


def least_squares(residuals: Callable[[Vector], Vector], size: int) -> Vector:
    """Minimise the sum of squares by the Gauss-Newton method from 0, with steps halved until they improve it."""
    at = [0.0] * size
    found = residuals(at)
    for _ in range(ITERATIONS):
        slopes = [_slope(residuals, at, found, index) for index in range(size)]
        square = [[_dot(one, other) for other in slopes] for one in slopes]
        step = solve(square, [-_dot(one, found) for one in slopes])
        share, better = 1.0, found
        while share > CONVERGED:
            there = [a + share * s for a, s in zip(at, step, strict=True)]
            better = residuals(there)
            if _dot(better, better) <= _dot(found, found):
                break
            share /= 2
        else:
            return at
        moved = max(abs(share * s) for s in step)
        at, found = there, better
        if moved < CONVERGED:
            break
    return at


def _slope(residuals: Callable[[Vector], Vector], at: Vector, found: Vector, index: int) -> Vector:
    nudged = [value + (DIFFERENCE if i == index else 0.0) for i, value in enumerate(at)]
    return [(new - old) / DIFFERENCE for new, old in zip(residuals(nudged), found, strict=True)]


def _dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def solve(matrix: list[Vector], right: Vector) -> Vector:
    """Solve linear equations by Gaussian elimination. The prior makes the matrix positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for index in range(size):
        best = max(range(index, size), key=lambda i: abs(rows[i][index]))
        rows[index], rows[best] = rows[best], rows[index]
        for below in range(index + 1, size):
            factor = rows[below][index] / rows[index][index]
            rows[below] = [a - factor * b for a, b in zip(rows[below], rows[index], strict=True)]
    found = [0.0] * size
    for index in reversed(range(size)):
        rest = sum(rows[index][i] * found[i] for i in range(index + 1, size))
        found[index] = (rows[index][size] - rest) / rows[index][index]
    return found
