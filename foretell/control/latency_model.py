"""Latency model: seconds of a target step.

The model is linear in its features: a piecewise linear curve over the rows of a step (new tokens and draft tokens of
all sequences), the cached tokens, and the pairs of a further row and a cached token. Recursive least squares with
outlier clipping updates it from the steps themselves, so it follows the machine.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .settings import ControllerTuning

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # rows at which the curve has a parameter
FEATURES = len(KNOTS) + 2  # the knots, cached tokens, and pairs of a further row and a cached token
INITIAL_STEPS = 3  # steps whose median sets the initial pace, so that one outlier cannot
MAX_STEP_SECONDS = 3600.0  # upper bound of a plausible value in a saved file

Vector = NDArray[np.float64]


class Fit:
    """Recursive least squares with a Gaussian prior: seconds as a weighted sum of features.

    Residuals are clipped, so that an outlier moves the fit no further than usual noise does. If clipped residuals keep
    the same sign, the machine has a new pace and the prior deviation of the pace is restored.
    """

    def __init__(
        self, mean: Vector, covariance: NDArray[np.float64], tuning: ControllerTuning = ControllerTuning()
    ) -> None:
        self.mean, self.covariance, self.tuning = mean, covariance, tuning
        self.noise = tuning.noise  # running median of the absolute relative residual
        self.trend = 0.0  # moving average of the signed residual, in clips

    def observe(self, features: Vector, seconds: float) -> None:
        """Update the fit with one measurement."""
        tuning = self.tuning
        expected = max(float(features @ self.mean), 1e-9)
        residual = seconds / expected - 1
        limit = tuning.outlier * max(self.noise, tuning.noise)
        # The median and not the mean, which the outliers would dominate.
        self.noise *= 1.05 if abs(residual) > self.noise else 0.95
        residual = min(max(residual, -limit), limit)
        self.trend += 0.1 * (residual / limit - self.trend)
        if abs(self.trend) > 0.5:  # not a series of outliers: the pace has changed
            self.covariance = self.covariance + tuning.pace**2 * np.outer(self.mean, self.mean)
            self.noise, self.trend = tuning.noise, 0.0
        # All costs drift together: a slower machine makes every step longer by the same factor.
        self.covariance = self.covariance + (tuning.drift**2 * self.mean)[:, None] * self.mean
        projected = self.covariance @ features
        variance = float(features @ projected) + (max(self.noise, tuning.noise) * expected) ** 2
        gain = projected / variance
        self.mean = np.maximum(self.mean + gain * residual * expected, 0.0)
        self.covariance -= gain[:, None] * projected

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values. The keys are the file format of saved costs."""
        return {"mean": self.mean.tolist(), "spread": self.covariance.tolist(), "usual": self.noise}

    @classmethod
    def load(cls, saved: dict[str, Any], size: int, tuning: ControllerTuning = ControllerTuning()) -> Fit | None:
        """Return a saved fit, or None if another version wrote it or it is damaged.

        The machine may have changed since, so the pace gets a prior deviation again.
        """
        try:
            mean, covariance = np.array(saved.get("mean", ()), float), np.array(saved.get("spread", ()), float)
            noise = float(saved.get("usual", tuning.noise))
        except (TypeError, ValueError):
            return None
        if mean.shape != (size,) or covariance.shape != (size, size) or not is_plausible(mean, covariance, noise):
            return None
        found = cls(mean, covariance + (tuning.pace / 2) ** 2 * np.outer(mean, mean), tuning)
        found.noise = noise
        return found


def is_plausible(mean: Vector, covariance: NDArray[np.float64], noise: float) -> bool:
    """Return whether saved values can have been measured. Comparisons with NaN are false."""
    if not bool((mean >= 0).all() and 0 < mean.max() <= MAX_STEP_SECONDS):
        return False
    if not bool((np.abs(covariance) <= MAX_STEP_SECONDS**2).all() and (covariance.diagonal() >= 0).all()):
        return False
    return 0 < noise < 10


@dataclass(frozen=True)
class CostPrior:
    """Relative costs of a device before any step ran. The first steps set the absolute pace."""

    row: float = 0.03  # cost of a further row, over a step with one row
    token: float = 1e-4  # cost of a cached token, over a step with one row
    pair: float = 0.1  # cost of a cached token for each further row of its sequence, over `token`
    free_rows: int = 1  # rows that cost no more than one


class StepCosts:
    """Seconds of a target step by rows, cached tokens, and pairs of a further row and a cached token.

    At long context it is the pairs that make drafts expensive.
    """

    def __init__(
        self, prior: CostPrior = CostPrior(), sizes: tuple[int, ...] = (), tuning: ControllerTuning = ControllerTuning()
    ) -> None:
        """`sizes` are the row counts of captured CUDA graphs: a step is padded to the next one and costs as much."""
        self.prior, self.sizes, self.tuning = prior, sizes, tuning
        self.steps = 0  # observed
        self.single_row_seconds = 0.0  # seconds of a step of one row; 0 before the first step ran
        self._fit: Fit | None = None
        self._means: list[float] = []  # the parameters as floats, since numpy is slow on short arrays
        self._initial: list[tuple[Vector, float]] = []  # features and seconds of the first steps
        self._curve: list[float] = []  # cached result of `curve`
        self._skipped: dict[int, int] = {}  # by the bit length of rows: steps since the last update

    @property
    def is_known(self) -> bool:
        return self._fit is not None

    def seconds(self, rows: int, context: int = 0, pairs: int = 0) -> float:
        """Return the expected seconds of a step; 0 before the first one ran."""
        means = self._means  # another thread may update it meanwhile
        if not means:
            return 0.0
        knots = _knot_weights(self.padded_rows(rows))
        return sum(means[knot] * weight for knot, weight in knots) + means[-2] * context + means[-1] * pairs

    @property
    def token_seconds(self) -> float:
        """Return the seconds of attention per cached token, further rows of a sequence aside."""
        return self._means[-2] if self._means else 0.0

    @property
    def pair_seconds(self) -> float:
        """Return the seconds of a further row of a sequence per cached token of it."""
        return self._means[-1] if self._means else 0.0

    def curve(self, rows: int) -> list[float]:
        """Return the seconds of steps of 0 to at least `rows` rows with an empty KV cache. They never decrease."""
        if self._fit is None:
            return [0.0] * (rows + 1)
        if len(self._curve) <= rows:
            variances = self._fit.covariance.diagonal()[: len(KNOTS)].tolist()
            smooth = isotonic(self._means[: len(KNOTS)], variances)
            self._curve = pad_to_sizes(interpolate_knots(smooth, self.padded_rows(max(rows, 64))), self.sizes)
        return self._curve

    def padded_rows(self, rows: int) -> int:
        """Return the rows that run after padding."""
        return next((size for size in self.sizes if rows <= size), rows) if rows else 0

    def should_observe(self, rows: int) -> bool:
        """Return whether a step of so many rows is worth an update. Call it once per step."""
        size, tuning = rows.bit_length(), self.tuning
        skipped = self._skipped.get(size, tuning.subsample) + 1
        is_due = self.steps < tuning.warm_steps or skipped >= tuning.subsample
        self._skipped[size] = 0 if is_due else skipped
        return is_due

    def observe(self, rows: int, context: int, seconds: float, pairs: int = 0) -> None:
        """Update the model with a measured step."""
        if seconds <= 0:
            return
        features = _features(self.padded_rows(rows), context, pairs)
        if len(self._initial) < INITIAL_STEPS and self.steps == len(self._initial):
            self._initial.append((features, seconds))
            self._fit = self._initial_fit()
        else:
            assert self._fit is not None, "the first steps started it"
            self._fit.observe(features, seconds)
        self.steps += 1
        self._refresh()

    def _refresh(self) -> None:
        self._curve = []
        self._means = [] if self._fit is None else self._fit.mean.tolist()
        self.single_row_seconds = 0.0 if self._fit is None else float(self._fit.mean[0])  # the first knot is one row

    def _initial_fit(self) -> Fit:
        """Return the fit of the first steps, at the median of their paces."""
        prior, tuning = self.prior, self.tuning
        tokens = [prior.token, prior.token * prior.pair]
        shape = np.array([1 + prior.row * max(0, knot - prior.free_rows) for knot in KNOTS] + tokens)
        shape *= median_low(seconds / float(features @ shape) for features, seconds in self._initial)
        # The prior covariance has three parts: the overall pace, the cost of a row, and a bend of the curve around that
        # line, which is correlated over three doublings of rows.
        doublings, bend = np.log2(KNOTS), np.eye(FEATURES)
        bend[:-2, :-2] = tuning.bend**2 * np.exp(-np.abs(doublings[:, None] - doublings) / 3)
        slope = tuning.slope * prior.row * shape[0] * np.array([*(knot - 1 for knot in KNOTS), 0, 0])
        covariance = np.outer(shape, shape) * (bend + tuning.pace**2) + np.outer(slope, slope)
        fit = Fit(shape, covariance, tuning)
        for features, seconds in self._initial:
            fit.observe(features, seconds)
        return fit

    def dump(self) -> dict[str, Any]:
        """Return the model as plain values."""
        return {} if self._fit is None else self._fit.dump()

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from a saved model."""
        self._fit, self._initial = Fit.load(saved, FEATURES, self.tuning), []
        self.steps = self.tuning.warm_steps // 2 if self.is_known else 0
        self._refresh()


def isotonic(values: list[float], variances: list[float]) -> list[float]:
    """Return the nearest non-decreasing values, by isotonic regression weighted with the inverse variances.

    The algorithm is pool-adjacent-violators.
    """
    pools: list[tuple[float, float, int]] = []  # value, weight, number of values
    for value, variance in zip(values, variances, strict=True):
        weight, count = 1 / max(variance, 1e-30), 1
        while pools and pools[-1][0] > value:
            pooled, pooled_weight, pooled_count = pools.pop()
            value = (pooled * pooled_weight + value * weight) / (pooled_weight + weight)
            weight, count = pooled_weight + weight, pooled_count + count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


def interpolate_knots(values: list[float], rows: int) -> list[float]:
    """Return the values at 0 to `rows` rows: linear between the knots, the last segment extended beyond them."""
    found = np.interp(np.arange(rows + 1), KNOTS, values)
    if rows > KNOTS[-1]:
        slope = (values[-1] - values[-2]) / (KNOTS[-1] - KNOTS[-2])
        found[KNOTS[-1] :] += slope * np.arange(rows + 1 - KNOTS[-1])
    return list(found.tolist())


def pad_to_sizes(curve: list[float], sizes: tuple[int, ...]) -> list[float]:
    """Return the curve where any number of rows costs as much as the next of the padded sizes."""
    found = curve[:1]
    for size in sizes:
        if size < len(curve):
            found += [curve[size]] * (size + 1 - len(found))
    return found + curve[len(found) :]


def _knot_weights(rows: int) -> tuple[tuple[int, float], ...]:
    """Return the indices of the knots around `rows` and their weights in the interpolation."""
    above = bisect_left(KNOTS, rows)
    if above == len(KNOTS):
        return ((above - 1, rows / KNOTS[-1]),)
    if above == 0 or KNOTS[above] == rows:
        return ((above, 1.0),)
    low, high = KNOTS[above - 1], KNOTS[above]
    weight = (rows - low) / (high - low)
    return ((above - 1, 1 - weight), (above, weight))


def _features(rows: int, context: int, pairs: int) -> Vector:
    found = np.zeros(FEATURES)
    found[-2], found[-1] = context, pairs
    for knot, weight in _knot_weights(rows):
        found[knot] = weight
    return found
