"""Latency model: seconds of a target step, the host gap between steps, and the cost of the step to be planned.

The model is linear in its features: a piecewise linear curve over the rows of a step (new tokens and draft tokens of
all sequences), the cached tokens, and the pairs of a further row and a cached token. Recursive least squares with
outlier clipping updates it from the steps themselves, so it follows the machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .settings import HostGapTuning, LatencyTuning

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # rows at which the curve has a parameter
FEATURES = len(KNOTS) + 2  # the knots, cached tokens, and pairs of a further row and a cached token
MAX_STEP_SECONDS = 3600.0  # upper bound of a plausible value in a saved file

Vector = NDArray[np.float64]


class Fit:
    """Recursive least squares with a Gaussian prior: seconds as a weighted sum of features.

    Residuals are clipped, so that an outlier moves the fit no further than usual noise does. If clipped residuals keep
    the same sign, the machine has a new pace and the prior deviation of the pace is restored.
    """

    def __init__(self, mean: Vector, covariance: NDArray[np.float64], tuning: LatencyTuning = LatencyTuning()) -> None:
        self.mean, self.covariance, self.tuning = mean, covariance, tuning
        self.noise = tuning.initial_noise  # running median of the absolute relative residual
        self.trend = 0.0  # moving average of the signed residual, in clips

    def value(self, features: Vector) -> float:
        """Return the expected seconds."""
        return float(features @ self.mean)

    def observe(self, features: Vector, seconds: float) -> None:
        """Update the fit with one measurement."""
        tuning = self.tuning
        expected = max(self.value(features), 1e-9)
        residual = seconds / expected - 1
        limit = tuning.outlier * max(self.noise, tuning.noise)
        # The median and not the mean, which the outliers would dominate.
        self.noise *= 1 + tuning.noise_rate if abs(residual) > self.noise else 1 - tuning.noise_rate
        residual = min(max(residual, -limit), limit)
        self.trend += tuning.trend_ema * (residual / limit - self.trend)
        if abs(self.trend) > tuning.trend_limit:  # not a series of outliers: the pace has changed
            self.covariance = self.covariance + tuning.pace**2 * np.outer(self.mean, self.mean)
            self.noise, self.trend = tuning.initial_noise, 0.0
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
    def load(cls, saved: dict[str, Any], size: int, tuning: LatencyTuning = LatencyTuning()) -> Fit | None:
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
        found = cls(mean, covariance + tuning.loaded_pace**2 * np.outer(mean, mean), tuning)
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
        self, prior: CostPrior = CostPrior(), sizes: tuple[int, ...] = (), tuning: LatencyTuning = LatencyTuning()
    ) -> None:
        """`sizes` are the row counts of captured CUDA graphs: a step is padded to the next one and costs as much."""
        self.prior, self.sizes, self.tuning = prior, sizes, tuning
        self.steps = 0  # observed
        self.single_row_seconds = 0.0  # seconds of a step of one row; 0 before the first step ran
        self._fit: Fit | None = None
        self._means: list[float] = []  # the parameters as floats, since numpy is slow on short arrays
        self._initial: list[tuple[Vector, float]] = []  # features and seconds of the first steps
        self._curve: list[float] = []  # cached result of `seconds_by_rows`
        self._asked = 0  # calls of `should_observe`
        self._observed_at: dict[int, int] = {}  # by the bit length of rows: `_asked` at the last update
        self._last_observed = 0  # `_asked` at the last update of any size

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
    def pair_seconds(self) -> float:
        """Return the seconds of a further row of a sequence per cached token of it."""
        return self._means[-1] if self._means else 0.0

    def context_seconds(self, context: int) -> float:
        """Return the seconds of attention over `context` cached tokens, further rows of a sequence aside."""
        return self._means[-2] * context if self._means else 0.0

    def curve(self, rows: int) -> Vector:
        """Return the seconds of steps of 0 to `rows` rows with an empty KV cache. They never decrease."""
        return np.array(self.seconds_by_rows(rows))

    def seconds_by_rows(self, rows: int) -> list[float]:
        """Return the curve as a list, which is faster to make than an array."""
        if self._fit is None:
            return [0.0] * (rows + 1)
        if len(self._curve) <= rows:
            variances = self._fit.covariance.diagonal()[: len(KNOTS)].tolist()
            smooth = isotonic(self._means[: len(KNOTS)], variances)
            self._curve = pad_to_sizes(interpolate_knots(smooth, self.padded_rows(max(rows, 64))), self.sizes)
        return self._curve[: rows + 1]

    def padded_rows(self, rows: int) -> int:
        """Return the rows that run after padding."""
        return next((size for size in self.sizes if rows <= size), rows) if rows else 0

    def should_observe(self, rows: int, has_drafts: bool = False) -> bool:
        """Return whether a step of so many rows is worth an update. Call it once per step."""
        tuning = self.tuning
        self._asked += 1
        size = rows.bit_length()
        if self.steps >= tuning.warm_steps:
            is_recent = self._asked - self._observed_at.get(size, -tuning.subsample) < tuning.subsample
            waited = (self._asked - self._last_observed) * tuning.update_time_share * self.single_row_seconds
            if is_recent and not (has_drafts and waited >= tuning.update_seconds):
                return False
        self._observed_at[size] = self._last_observed = self._asked
        return True

    def observe(self, rows: int, context: int, seconds: float, pairs: int = 0) -> None:
        """Update the model with a measured step."""
        if seconds <= 0:
            return
        features = _features(self.padded_rows(rows), context, pairs)
        if len(self._initial) < self.tuning.initial_steps and self.steps == len(self._initial):
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
        # line, which is correlated between neighbouring knots.
        log_rows = np.log2(np.array(KNOTS, float))
        further_rows = np.append(np.array(KNOTS, float) - 1, [0.0, 0.0])
        bend = np.diag(np.ones(len(shape)))
        distance = np.abs(log_rows[:, None] - log_rows[None, :])
        bend[: len(KNOTS), : len(KNOTS)] = tuning.bend**2 * np.exp(-distance / tuning.bend_scale)
        slope = tuning.slope * prior.row * shape[0] * further_rows
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
        self._fit = Fit.load(saved, FEATURES, self.tuning)
        self.steps = self.tuning.loaded_steps if self.is_known else 0
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
    found = [values[0]]
    for low, high, value, after in zip(KNOTS, KNOTS[1:], values, values[1:], strict=False):
        slope = (after - value) / (high - low)
        found += [slope * more + value for more in range(min(high, rows + 1) - low)]
    if rows >= KNOTS[-1]:
        slope = (values[-1] - values[-2]) / (KNOTS[-1] - KNOTS[-2])
        found += [values[-1] + slope * more for more in range(rows + 1 - KNOTS[-1])]
    return found


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


class HostGap:
    """Seconds that the device idles between two steps while the host schedules, by batch size.

    Async scheduling removes the gap, but an async step is sent before its input tokens are known and can have no draft.
    So this class also tracks what drafts save, and decides which is worth more.
    """

    def __init__(self, tuning: HostGapTuning = HostGapTuning()) -> None:
        self.tuning = tuning
        # Both by the bit length of the batch size, since the host works on each sequence; and by whether the device
        # makes the drafts itself: it idles less then, because the host prepares the verification meanwhile.
        self._samples: dict[tuple[int, bool], deque[float]] = {}
        self._medians: dict[bool, dict[int, float]] = {False: {}, True: {}}
        self._savings = 0.0  # moving average of the seconds that drafts save per step
        self._async_steps = 0  # since the last synchronous one

    def observe(self, batch_size: int, seconds: float, device_drafts: bool = False) -> None:
        """Add a measured gap."""
        size = batch_size.bit_length()
        samples = self._samples.setdefault((size, device_drafts), deque(maxlen=self.tuning.window))
        samples.append(seconds)
        self._medians[device_drafts][size] = median_low(samples)

    def observe_savings(self, seconds: float) -> None:
        """Add the time that the drafts of one step are expected to save."""
        self._savings += self.tuning.savings_ema * (seconds - self._savings)

    def outweighs_drafts(self, batch_size: int) -> bool:
        """Return whether the next step should run asynchronously. Call it once per step.

        Every 16th step runs synchronously to measure the gap again; every 256th once three samples exist.
        """
        if self._savings >= self.seconds(batch_size):
            return False
        tuning = self.tuning
        self._async_steps += 1
        known = len(self._samples.get((batch_size.bit_length(), False), ())) >= tuning.known
        if self._async_steps < (tuning.resample_every_known if known else tuning.resample_every):
            return True
        self._async_steps = 0
        return False

    def seconds(self, batch_size: int) -> float:
        """Return the median gap at this batch size or the nearest measured one; 0 before any measurement."""
        size, known = batch_size.bit_length(), self._medians[False] or self._medians[True]
        if size in known or not known:
            return known.get(size, 0.0)
        return known[min(known, key=lambda other: abs(other - size))]

    def hidden_seconds(self, batch_size: int) -> float:
        """Return the part of the gap that drafts made on the device hide; 0 until both cases were measured."""
        size = batch_size.bit_length()
        plain, drafting = self._medians[False].get(size), self._medians[True].get(size)
        return 0.0 if plain is None or drafting is None else plain - drafting


@dataclass
class StepCostView:
    """Costs of the step to be planned, as functions of the number of draft tokens."""

    num_decoding: int  # sequences in decode
    rows: int  # rows of the step without drafts
    curve: Values[float]  # seconds by rows
    context_seconds: float = 0.0  # seconds of attention over all cached tokens
    row_context_seconds: float = 0.0  # seconds of attention of one further row
    host_gap: float = 0.0  # seconds added by any draft: a step with drafts cannot be sent before its tokens are known
    hidden_gap: float = 0.0  # part of the gap that a timed drafter hides, because the step is sent while it drafts
    padded_sizes: tuple[int, ...] = ()  # row counts to which the step of a single sequence is padded
    plain_seconds: float = field(init=False)  # seconds of the step without drafts
    plain_share: float = field(init=False)  # that divided by the decoding sequences
    _sequence_seconds: dict[int, float] = field(init=False, repr=False)  # cached, by draft tokens

    def __post_init__(self) -> None:
        self.plain_seconds = float(self.curve[self.rows]) + self.context_seconds
        self.plain_share = self.plain_seconds / max(1, self.num_decoding)
        self._sequence_seconds = {}

    def padded_nodes(self, nodes: int) -> int:
        """Return the nodes of a tree that fills the padded step of a single sequence, at least `nodes`."""
        return next((size - self.rows for size in self.padded_sizes if self.rows + nodes <= size), nodes)

    def free_rows(self, margin: float) -> int:
        """Return the further rows that lengthen the step by at most this share."""
        limit, rows = margin * self.plain_seconds, 0
        while self.rows + rows + 1 < len(self.curve) and self.extra_seconds(rows + 1) <= limit:
            rows += 1
        return rows

    def extra_seconds(self, rows: int) -> float:
        """Return the seconds that further rows add to the step."""
        at = min(self.rows + rows, len(self.curve) - 1)
        return float(self.curve[at]) - float(self.curve[self.rows]) + rows * self.row_context_seconds

    def speedup(self, expected_tokens: float, nodes: int, draft_seconds: float = 0.0) -> float:
        """Return the speedup of a sequence with `nodes` draft tokens, if all sequences draft as many."""
        return expected_tokens * self.plain_share / (self.sequence_seconds(nodes) + draft_seconds)

    def sequence_seconds(self, nodes: int) -> float:
        """Return a sequence's share of the step if all draft `nodes` tokens, drafting aside."""
        seconds = self._sequence_seconds.get(nodes)
        if seconds is None:
            at = min(self.rows + nodes * self.num_decoding, len(self.curve) - 1)
            extra = (self.curve[at] - self.curve[self.rows]) / self.num_decoding + nodes * self.row_context_seconds
            gap = self.host_gap / self.num_decoding if nodes else 0.0
            seconds = self._sequence_seconds[nodes] = self.plain_share + extra + gap
        return seconds

    def break_even(self, draft_seconds: float = 0.0) -> float:
        """Return the break-even acceptance of one draft token: the cost ratio of the step minus 1.

        This is `break_even_acceptance` for a length of 1 in closed form. It can exceed 1.
        """
        row = (self.extra_seconds(self.num_decoding) + self.host_gap) / self.num_decoding
        return (row + draft_seconds) / (self.plain_seconds / self.num_decoding)
