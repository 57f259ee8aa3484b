"""Student's t distribution for any positive degrees of freedom, without scipy."""

from __future__ import annotations

import math
from functools import lru_cache

TINY = 1e-300
PRECISION = 1e-14
TERMS = 500  # of the continued fraction, which needs about a dozen
BISECTIONS = 200


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
