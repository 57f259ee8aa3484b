"""Speedup ratios with t intervals that hold their level with few prompts and few rounds.

All intervals are Student t intervals of log ratios. What is random depends on the benchmark:
- prompts: a task's prompts are random samples of the task. One observation per prompt, its median over rounds.
- rounds: repeated measurements of the same prompts. One observation per round, its mean over prompts.
- tasks: they are fixed, so the interval of their mean is about other prompts of the same tasks. Variances of prompts
  add, and the degrees of freedom are Welch-Satterthwaite's. A round runs all tasks, so rounds are one source for all.
With one prompt per task there is no interval over prompts: one prompt does not show how the others differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, variance

TINY = 1e-300  # replaces 0 in a denominator
PRECISION = 1e-14  # relative, of the continued fraction
TERMS = 500  # of the continued fraction, which needs about a dozen
BISECTIONS = 200  # at most


@lru_cache(maxsize=4096)
def t_quantile(level: float, freedom: float) -> float:
    """Return x with P(T <= x) = level, for level in [0.5, 1)."""
    if not 0.5 <= level < 1 or not freedom > 0:
        raise ValueError(f"needs a level in [0.5, 1) and degrees of freedom above 0, not {level} and {freedom}")
    low, high = 0.0, 1.0
    while _t_cdf(high, freedom) < level:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_cdf(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _t_cdf(x: float, freedom: float) -> float:
    """Return P(T <= x) for x >= 0."""
    return 1 - _beta_cdf(freedom / (freedom + x * x), freedom / 2, 0.5) / 2


def _beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    front = math.exp(log_front)
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Evaluate the continued fraction of I_x(a, b) by Lentz's algorithm."""
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _not_zero(1 + term * d)
            c = _not_zero(1 + term / c)
            found *= c * d
        if abs(c * d - 1) < PRECISION:
            break
    return found


def _not_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY


Pairs = Sequence[Sequence[float]]  # for each prompt its ratios, one per round

LEVEL = 0.95


@dataclass(frozen=True)
class Variance:
    """The estimated variance of a mean, and its degrees of freedom."""

    value: float
    freedom: float


@dataclass(frozen=True)
class Estimate:
    """The mean of log ratios, and what makes it uncertain: prompts and rounds, or rounds alone."""

    mean: float
    sources: tuple[Variance, ...]

    def bounds(self, error: float) -> tuple[float, float]:
        """Return the lower and the upper bound, each wrong with a probability of at most `error`.

        Half-widths of independent sources add up as squares (Banerjee 1960), which errs on the wide side whatever
        their true variances are.
        """
        half = math.hypot(*(t_quantile(1 - error, each.freedom) * math.sqrt(each.value) for each in self.sources))
        return self.mean - half, self.mean + half


def ratio_of(pairs: Pairs) -> float:
    """Return the geometric mean over prompts of the median over rounds, which one slow round does not move."""
    return math.exp(fmean(_prompt_logs(pairs)))


def mean_ratio(estimate: Estimate | None, pairs: Pairs) -> float:
    """Return the ratio at the centre of an interval over rounds; the median of what there is without one."""
    return ratio_of(pairs) if estimate is None else math.exp(estimate.mean)


def over_prompts(pairs: Pairs) -> Estimate | None:
    """Estimate the ratio for other prompts and other rounds; None with fewer than two prompts.

    Rounds are a source of their own, for what a round does to all prompts alike does not show between them.
    """
    prompts, rounds = estimate_of(_prompt_logs(pairs)), over_rounds(pairs)
    if prompts is None or rounds is None:
        return prompts
    return Estimate(prompts.mean, prompts.sources + rounds.sources)


def over_rounds(pairs: Pairs) -> Estimate | None:
    """Estimate the ratio for these prompts; None with fewer than two complete rounds."""
    rounds = zip(*pairs, strict=False)  # a run that was stopped may have measured some prompts once more
    return estimate_of([fmean(map(math.log, ratios)) for ratios in rounds])


def estimate_of(logs: Sequence[float]) -> Estimate | None:
    """Estimate the mean of independent observations; None with fewer than two."""
    count = len(logs)
    return Estimate(fmean(logs), (Variance(variance(logs) / count, count - 1),)) if count > 1 else None


def mean_of(parts: Sequence[Estimate | None]) -> Estimate | None:
    """Estimate the mean of independent estimates; None where a part has none."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    kinds = max(len(part.sources) for part in known)
    alike = [[part.sources[kind] for part in known if len(part.sources) > kind] for kind in range(kinds)]
    return Estimate(fmean(part.mean for part in known), tuple(_mean_variance(each, len(known)) for each in alike))


def over_tasks(tasks: Sequence[Pairs]) -> Estimate | None:
    """Estimate the mean ratio of tasks for other prompts and other rounds; None where a task has one prompt."""
    prompts, rounds = mean_of([estimate_of(_prompt_logs(pairs)) for pairs in tasks]), rounds_over_tasks(tasks)
    if prompts is None or rounds is None:
        return prompts
    return Estimate(prompts.mean, prompts.sources + rounds.sources)


def rounds_over_tasks(tasks: Sequence[Pairs]) -> Estimate | None:
    """Estimate the mean ratio of tasks for these prompts: one observation per round, in which tasks count the same."""
    complete = min((len(rounds) for pairs in tasks for rounds in pairs), default=0)
    logs = [fmean(fmean(math.log(ratios[i]) for ratios in pairs) for pairs in tasks) for i in range(complete)]
    return estimate_of(logs)


def interval(estimate: Estimate | None, level: float = LEVEL) -> tuple[float, float] | None:
    """Return the two-sided interval as ratios; None where there is no estimate."""
    if estimate is None:
        return None
    low, high = estimate.bounds((1 - level) / 2)
    return math.exp(low), math.exp(high)


def half_width(estimate: Estimate | None, level: float = LEVEL) -> float | None:
    """Return half the width of the interval as a share of its centre: 0.02 is plus or minus two percent."""
    if estimate is None:
        return None
    low, high = estimate.bounds((1 - level) / 2)
    return math.tanh((high - low) / 2)


INTERVAL = "95% interval"  # name of a column
WIDE = "wide"  # shown for an interval of two prompts or so, which says nothing
WIDE_RATIO = 10.0  # upper over lower bound


def shown(ratio: float | None, between: tuple[float, float] | None, missing: str = "-") -> str:
    """Format a ratio with its interval, or `missing` where there is no ratio."""
    if ratio is None:
        return missing
    return f"{ratio:.2f} (no interval)" if between is None else f"{ratio:.2f} ({between[0]:.2f} to {between[1]:.2f})"


def compared(ratio: float | None, between: tuple[float, float] | None, missing: str = "-") -> tuple[str, str]:
    """Return the cells of a ratio and of its interval; the word faster or slower unless the interval includes 1."""
    if ratio is None:
        return missing, "-"
    low, high = between or (ratio, ratio)
    word = " faster" if low > 1 else " slower" if high < 1 else ""
    return f"{ratio:.2f}x{word}", bounds_label(between, "-") or "-"


def is_wide(between: tuple[float, float]) -> bool:
    """Return whether an interval is too wide to say anything."""
    low, high = between
    return high > WIDE_RATIO * low


def bounds_label(between: tuple[float, float] | None, to: str = " to ") -> str:
    """Format the bounds of an interval, or the word for a wide one; nothing where there is none."""
    if between is None:
        return ""
    return WIDE if is_wide(between) else f"{between[0]:.2f}{to}{between[1]:.2f}"


def _mean_variance(parts: Sequence[Variance], count: int) -> Variance:
    """Return the variance of the mean of `count` independent estimates, by Welch-Satterthwaite."""
    total = sum(part.value for part in parts)
    squares = sum(part.value**2 / part.freedom for part in parts)
    freedom = total**2 / squares if squares else sum(part.freedom for part in parts)
    return Variance(total / count**2, freedom)


def _prompt_logs(pairs: Pairs) -> list[float]:
    return [median(map(math.log, rounds)) for rounds in pairs]
