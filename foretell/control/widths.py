"""How much wider trees bring: where a drafter's first choice falls, how often another one of its tree stands."""

from __future__ import annotations

import math
from bisect import bisect_right

WIDTHS = (2, 4, 8, 16)  # nodes a level of trees that are weighed, about
# By depth, the first level, the second, and those behind. The best nodes of a whole tree lie near its root; and behind
# another choice a first one stands less often than behind its like, so that narrow trees bring nothing farther down.
# Counted with an EAGLE head over texts of all kinds, greedily; where tokens are drawn it is a little less.
RESCUES = ((0.5, 0.59, 0.66, 0.68), (0.08, 0.26, 0.4, 0.48), (-0.04, 0.0, 0.1, 0.14))
LEAST = -0.5  # however much less often a level stands than the first choices of a chain


def rescue(wide: float, depth: int) -> float:
    """Of the guesses at this depth that fall in a chain, the part that stands in a tree so many nodes wide."""
    by_width = RESCUES[min(depth, len(RESCUES)) - 1]
    above = bisect_right(WIDTHS, wide)
    if above == 0:
        return by_width[0] * max(0.0, wide - 1) / (WIDTHS[0] - 1)
    if above == len(WIDTHS):
        return by_width[-1]
    part = math.log2(wide / WIDTHS[above - 1])  # each is twice as wide as the one before
    return by_width[above - 1] + part * (by_width[above] - by_width[above - 1])


def about(wide: float) -> int:
    """Which of the WIDTHS is nearest."""
    return min(len(WIDTHS) - 1, max(0, round(math.log2(max(1.0, wide))) - 1))
