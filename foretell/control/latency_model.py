"""Latency model: seconds of a target step and of a draft.

The time of a step is linear in its features: a piecewise linear curve over its rows (new tokens and draft tokens of all
sequences), the cached tokens, and the pairs of a further row and a cached token. The time of a draft is linear in its
depth, tokens and prefill. Recursive least squares with outlier clipping updates both, so they follow the machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretell.types import DrafterTraits, Sequence, StepResult

from .settings import ControllerTuning

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # rows at which the curve has a parameter
FEATURES = len(KNOTS) + 2  # the knots, cached tokens, and pairs of a further row and a cached token
INITIAL_STEPS = 3  # plain steps before the first draft, to know what a plain step costs
MAX_STEP_SECONDS = 3600.0  # upper bound of a plausible value in a saved file
# Key suffix of the costs of a drafter's trees, which may be drafted quite differently from its chains. Saved costs have
# it in their file format.
TREE_SUFFIX = ", trees"

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
        self.covariance -= gain[:, None] * projected
        mean = self.mean + gain * residual * expected
        # No cost is negative. What one of them must gain, those that were measured with it lose: to cut it off alone
        # would raise their sum with every update.
        for _ in range(len(mean)):
            least = int(mean.argmin())
            if mean[least] >= 0:
                break
            mean = mean - self.covariance[least] * (mean[least] / self.covariance[least, least])
            mean[least] = 0.0
        self.mean = np.maximum(mean, 0.0)

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
        self.token_seconds = 0.0  # of attention per cached token, further rows of a sequence aside
        self.pair_seconds = 0.0  # of a further row of a sequence per cached token of it
        self._fit: Fit | None = None
        self._initial: list[tuple[Vector, float]] = []  # features and seconds of the first steps
        self._curve: list[float] = []  # cached result of `curve`
        self._num_steps = 0  # steps that `should_observe` was asked about
        self._updated: dict[int, int] = {}  # by the bit length of rows: the last of them that was worth an update

    @property
    def is_known(self) -> bool:
        return self._fit is not None

    def seconds(self, rows: int, context: int = 0, pairs: int = 0) -> float:
        """Return the expected seconds of a step; 0 before the first one ran."""
        fit = self._fit  # another thread may update it meanwhile
        return 0.0 if fit is None else float(_features(self.padded_rows(rows), context, pairs) @ fit.mean)

    def curve(self, rows: int) -> list[float]:
        """Return the seconds of steps of 0 to at least `rows` rows with an empty KV cache. They never decrease."""
        if self._fit is None:
            return [0.0] * (rows + 1)
        if len(self._curve) <= rows:
            knots = list(accumulate(self._fit.mean[: len(KNOTS)].tolist(), max))
            self._curve = interpolate_knots(knots, self.padded_rows(max(rows, 64)))
            if self.sizes:
                self._curve = [self._curve[self.padded_rows(at)] for at in range(len(self._curve))]
        return self._curve

    def padded_rows(self, rows: int) -> int:
        """Return the rows that run after padding."""
        return next((size for size in self.sizes if rows <= size), rows) if rows else 0

    def should_observe(self, rows: int) -> bool:
        """Return whether a step of so many rows is worth an update. Call it once per step."""
        size, tuning = rows.bit_length(), self.tuning
        self._num_steps += 1
        is_due = (
            self.steps < tuning.warm_steps
            or self._num_steps - self._updated.get(size, -tuning.subsample) >= tuning.subsample
        )
        if is_due:
            self._updated[size] = self._num_steps
        return is_due

    def observe(self, rows: int, context: int, seconds: float, pairs: int = 0) -> None:
        """Update the model with a measured step."""
        if seconds <= 0:
            return
        features = _features(self.padded_rows(rows), context, pairs)
        if self._fit is None or 0 < len(self._initial) < INITIAL_STEPS:
            self._initial.append((features, seconds))
            self._fit = self._initial_fit()
        else:
            self._fit.observe(features, seconds)
        self.steps += 1
        self._refresh()

    def _refresh(self) -> None:
        means = [0.0] * FEATURES if self._fit is None else self._fit.mean.tolist()
        self._curve, self.single_row_seconds = [], means[0]  # the first knot is one row
        self.token_seconds, self.pair_seconds = means[-2:]

    def _initial_fit(self) -> Fit:
        """Return the fit of the first steps. Its prior has their median pace, so that one outlier cannot set it."""
        prior, tuning = self.prior, self.tuning
        tokens = [prior.token, prior.token * prior.pair]
        shape = np.array([1 + prior.row * max(0, knot - prior.free_rows) for knot in KNOTS] + tokens)
        shape *= median_low(seconds / float(features @ shape) for features, seconds in self._initial)
        # The prior covariance has three parts: the overall pace, the cost of a row, and a bend of the curve around that
        # line, which is correlated over three doublings of rows.
        doublings, bend = np.log2(KNOTS), np.eye(FEATURES)
        bend[:-2, :-2] = tuning.bend**2 * np.exp(-np.abs(doublings[:, None] - doublings) / 3)
        slope = tuning.slope * prior.row * shape[0] * np.array([*(knot - 1 for knot in KNOTS), 0, 0])
        fit = Fit(shape, np.outer(shape, shape) * (bend + tuning.pace**2) + np.outer(slope, slope), tuning)
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


class DraftPrices(NamedTuple):
    """Seconds of a draft, by what they depend on."""

    start: float = 0.0  # per draft
    level: float = 0.0  # per level of depth
    node: float = 0.0  # per draft token, over all sequences
    token: float = 0.0  # per token to prefill

    def seconds(self, depth: int, nodes: int, prefill: int = 0) -> float:
        """Return the expected seconds of a draft."""
        return (self.start if nodes else 0.0) + self.level * depth + self.node * nodes + self.token * prefill


class DraftCosts:
    """Learned prices of one drafter's chains or trees."""

    def __init__(
        self, cost_share: float, like: DraftCosts | None = None, tuning: ControllerTuning = ControllerTuning()
    ) -> None:
        """`cost_share` is the prior time of a one-token draft over a plain step. `like` has the prices to use until the
        first observation."""
        self.cost_share, self.tuning, self._like = cost_share, tuning, like
        self._fit: Fit | None = None
        self._prices: DraftPrices | None = None
        self._num_drafts = 0

    def prices(self, plain_seconds: float) -> DraftPrices:
        """Return the prices; before the first observation the prior, which is relative to a plain step."""
        if self._prices is not None:
            return self._prices
        if self._like is not None:
            return self._like.prices(plain_seconds)
        tuning, one_token = self.tuning, max(self.cost_share * plain_seconds, 1e-9)
        start, node = tuning.draft_start_share * one_token, tuning.draft_node_share * one_token
        return DraftPrices(start, one_token - start - node, node, node)

    def observe(self, depth: int, nodes: int, prefill: int, seconds: float, plain_seconds: float) -> None:
        """Update the prices with a measured draft."""
        tuning = self.tuning
        self._num_drafts += 1
        if self._num_drafts > tuning.warm_steps and not prefill and self._num_drafts % tuning.draft_subsample:
            return
        if self._fit is None:
            mean = np.array(self.prices(plain_seconds))
            deviation = np.maximum(mean, tuning.draft_node_share * mean.sum())  # a price of 0 may be wrong, too
            self._fit = Fit(mean, np.outer(mean, mean) * tuning.pace**2 + np.diag(deviation**2), tuning)
        self._fit.observe(np.array([1, depth, nodes, prefill], float), seconds)
        self._prices = DraftPrices(*self._fit.mean.tolist())

    def dump(self) -> dict[str, Any]:
        """Return the prices as plain values."""
        return {} if self._fit is None else self._fit.dump()

    def load(self, saved: dict[str, Any]) -> None:
        """Replace the prices with those of an earlier start, unless these have another format."""
        found = Fit.load(saved, len(DraftPrices._fields), self.tuning)
        if found is not None:
            self._fit, self._prices = found, DraftPrices(*found.mean.tolist())


class DraftLatency:
    """Prices of all drafters."""

    def __init__(self, traits: Mapping[str, DrafterTraits], tuning: ControllerTuning = ControllerTuning()) -> None:
        self.traits = traits
        self.free = frozenset(name for name, each in traits.items() if each.is_free)
        self.costs = {name: DraftCosts(each.relative_cost, tuning=tuning) for name, each in traits.items()}
        for name, each in traits.items():
            if each.makes_trees and not each.is_free:
                self.costs[name + TREE_SUFFIX] = DraftCosts(each.relative_cost, self.costs[name], tuning)

    def costs_of(self, drafter: str, tree: bool) -> DraftCosts:
        """Return the costs of a drafter's trees or of its chains."""
        return self.costs.get(drafter + TREE_SUFFIX, self.costs[drafter]) if tree else self.costs[drafter]

    def observe(self, results: list[StepResult], prefill: int, seconds: float, plain_seconds: float) -> None:
        """Update the costs with the drafts of one step, before which drafters prefilled so many tokens.

        Steps with several drafters, or with both trees and chains, are skipped: their times cannot be separated.
        """
        timed = self.costs.keys() - self.free
        made = [each for each in results if len(each.draft) and each.scheduled.budget.drafter in timed]
        shapes = {(each.scheduled.budget.drafter, each.scheduled.budget.is_tree) for each in made}
        if len(shapes) == 1:
            ((drafter, tree),) = shapes
            depth = max([self._drafted_levels(each, drafter) for each in made])
            nodes = sum([len(each.draft) for each in made])
            self.costs_of(drafter, tree).observe(depth, nodes, prefill, seconds, plain_seconds)

    def _drafted_levels(self, result: StepResult, drafter: str) -> int:
        """Return the levels that were drafted, those that were cut off afterwards included."""
        scheduled, draft = result.scheduled, result.draft
        if self.is_single_graph(drafter, scheduled.seq):
            return scheduled.budget.depth
        return max(draft.depths()) if scheduled.budget.is_tree else len(draft)

    def is_single_graph(self, drafter: str, seq: Sequence) -> bool:
        """Return whether a drafter runs all levels of a draft at once, before the host sees any of them."""
        traits = self.traits[drafter]
        sampled = seq.request.params.temperature > 0 and seq.request.rule != "match"
        return traits.single_graph and (traits.samples_single_graph or not sampled)


def interpolate_knots(values: list[float], rows: int) -> list[float]:
    """Return the values at 0 to `rows` rows: linear between the knots, the last segment extended beyond them."""
    found = np.interp(np.arange(rows + 1), KNOTS, values)
    if rows > KNOTS[-1]:
        slope = (values[-1] - values[-2]) / (KNOTS[-1] - KNOTS[-2])
        found[KNOTS[-1] :] += slope * np.arange(rows + 1 - KNOTS[-1])
    return list(found.tolist())


def _features(rows: int, context: int, pairs: int) -> Vector:
    """Return the weights of the knots around `rows` in the interpolation, cached tokens and pairs."""
    found = np.array([*np.zeros(len(KNOTS)), context, pairs])
    above = min(bisect_left(KNOTS, rows), len(KNOTS) - 1)
    low, high = KNOTS[max(0, above - 1)], KNOTS[above]
    if low < rows < high:
        found[above - 1 : above + 1] = (high - rows) / (high - low), (rows - low) / (high - low)
    else:  # beyond the last knot a step costs in proportion to its rows
        found[above] = max(1.0, rows / high)
    return found
