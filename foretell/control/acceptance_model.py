"""How often guesses stood, by how deep, how sure and how wide they were: in a request, in its kind, in all."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache

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


LEVELS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)  # a drafter's own confidence, in steps; the lowest is "says nothing"
MIDDLES = (0.1, 0.3, 0.5, 0.7, 0.87, 0.97)  # of these steps
TRUST = 0.7  # how far a drafter's own confidence is believed before it was compared with the text
ALIKE = (
    0.2  # and how far others' confidence tells of one that has not guessed yet: what is easy for them is easy for it
)
# Where tokens are drawn, what is likeliest is not always taken: a chance of p is believed to be p to this power. Of a
# drafter that nobody has seen the mean of that is believed, over all it may be, which is more than the mean's power.
HEATS = {"greedy": 1.0, "cool": 1.5, "warm": 3.0}
DEPTHS = 3  # the first guess, the second, and those behind
UNSEEN = len(LEVELS)  # the row for guesses whose confidence is not known yet
FIRST = UNSEEN * DEPTHS  # the cell for first guesses
TREE = UNSEEN + 1  # the first of a row for each width of trees: what they bring beyond what is believed of them
CELLS = (TREE + len(WIDTHS)) * DEPTHS
PRIOR = 0.5  # of a drafter nobody has seen
DOUBTS = 16.0  # of trees: to hope for much at every level would be to begin with the deepest
FAMILIAR = 64.0  # guesses after which what a drafter has done is what it will do
FRESH, ENOUGH = 6.0, 4.0  # guesses in a request that is new, and in one that tells how far requests are apart
SPREAD, SETTLING = 0.02, 0.05  # how far they are believed to be, as a variance, and what each request changes of it

# (how fast old counts fade, how many counts of its own it takes to outweigh what is above)
REQUEST, KIND, DRAFTER = (0.97, 16.0), (0.998, 12.0), (0.999, 12.0)


def cell(confidence: float | None, depth: int) -> int:
    """The cell of a guess `depth` behind the text's end; 1 is the first."""
    row = UNSEEN if confidence is None else max(0, bisect_right(LEVELS, confidence) - 1)
    return row * DEPTHS + (depth if depth < DEPTHS else DEPTHS) - 1


def tree_cell(wide: float, depth: int) -> int:
    """The cell of a tree's level, `depth` behind the text's end: half is what is believed of trees so wide, more where
    their other choices stand more often. How often others stand in the first level is one question for all widths;
    what hangs on them farther down is another for each."""
    return TREE * DEPTHS if depth == 1 else (TREE + about(wide)) * DEPTHS + (depth if depth < DEPTHS else DEPTHS) - 1


@dataclass(frozen=True)
class AcceptancePrior:
    """What is believed of a drafter before anything was counted: how often a guess stands where nothing is drawn, how
    far confidence is trusted, and to which power of it a chance shrinks."""

    prior: float = PRIOR
    trust: float = TRUST
    power: float = 1.0

    @property
    def first(self) -> float:
        """How often a guess stands: the mean over all that drafters of this prior may be, for of one that may be good
        or bad a power of its chance is more than that power of the middle one."""
        return mean_power(self.prior, self.power)

    def at(self, row: int, known: float) -> float:
        """The same for a row of confidence; `known` is how often guesses stand."""
        return float(self.trust * MIDDLES[row] ** self.power + (1 - self.trust) * known)


@cache
def mean_power(mean: float, power: float) -> float:
    """Of a chance of which no more is known than its mean: as of a beta distribution, flat where it is a half."""
    if power == 1:
        return mean
    a = 2 * min(max(mean, 1e-3), 1 - 1e-3)
    return math.gamma(a + power) / math.gamma(a) / math.gamma(2 + power)


class AcceptanceRates:
    """How often guesses stood whose forerunners stood, by cell; what is not known yet is taken from `above`."""

    __slots__ = ("above", "fade", "belief", "tried", "stood", "weight", "spread", "_believed", "_line")

    def __init__(
        self, above: AcceptanceRates | None, fading: tuple[float, float], belief: AcceptancePrior = AcceptancePrior()
    ) -> None:
        """`belief` is for where nothing is above."""
        self.above, (self.fade, self.weight), self.belief = above, fading, belief
        self.tried = [0.0] * CELLS
        self.stood = [0.0] * CELLS
        self.spread = SPREAD  # the variance of first guesses from one to another of those below
        self._believed: dict[int, float] = {}  # what untried cells are believed to be, until something is counted
        self._line: tuple[AcceptanceRates, ...] = (
            () if above is None else (*above._line, above)
        )  # all above, the top first

    def rate(self, at: int) -> float:
        """How likely a guess is to stand. From the top down, in one loop: it is asked for many times in a step."""
        line = self._line
        found, last = (line[0] if line else self)._alike(at), len(line)
        for below, rates in enumerate(line, 1):
            under = line[below] if below < last else self
            # What was counted below was counted here, too, and must not count twice.
            mine, right, weight = rates.tried[at] - under.tried[at], rates.stood[at] - under.stood[at], rates.weight
            mine, right = mine if mine > 0 else 0.0, right if right > 0 else 0.0
            found = (weight * found + (right if right < mine else mine)) / (weight + mine)
        mine, right, weight = self.tried[at], self.stood[at], self.weight
        return (weight * found + (right if right < mine else mine)) / (weight + mine)

    def hope(self, at: int, doubts: float = 1.0) -> float:
        """The rate it may well have, for all that was tried: little of it at first, or bad luck would be believed, and
        nothing of what was tried for long. The more `doubts`, the less of it is hoped for."""
        # How sure others are makes cells that are seldom met: a drafter that was often tried is no stranger in them.
        seen, rate = UNSEEN * DEPTHS + at % DEPTHS, self.rate(at)
        if self.above is not None and self.above.spread > 0 and seen == FIRST and self.tried[seen] < FRESH:
            # A new request may be one of the better ones: where they differ, what failed in others is tried in this.
            rate += min((1 - self.tried[seen] / FRESH) * math.sqrt(self.above.spread), (1 - rate) / 2)
        tried = self.tried[seen] if self.above is None else max(self.tried[seen], self.above.tried[seen])
        if tried >= FAMILIAR:
            return rate if rate < 1.0 else 1.0
        return min(1.0, rate + (1 - tried / FAMILIAR) * math.sqrt(rate * (1 - rate) / (doubts + tried)))

    def level(self, first: float, depth: int, wide: float) -> float:
        """How likely a level of a tree is to stand whose first choice does so often: where that one falls, others may
        stand."""
        at = tree_cell(wide, depth)
        tried = self.tried[at] if self.above is None else max(self.tried[at], self.above.tried[at])
        # What is counted is how much was learnt, so more is tried where first choices seldom fall; little hangs on it.
        hope = (1 - tried / FAMILIAR) / math.sqrt(DOUBTS + tried) if tried < FAMILIAR else 0.0
        rescued = rescue(wide, depth) + 2 * self.rate(at) - 1 + hope
        return max(0.0, first + (1 - first) * min(1.0, max(LEAST, rescued)))

    def tell(self) -> None:
        """Nothing more will be counted: how far this was from what was believed of it, chance aside."""
        above, tried = self.above, self.tried[FIRST]
        if above is not None and tried >= ENOUGH:
            rate = above.rate(FIRST)
            apart = (self.stood[FIRST] / tried - rate) ** 2 - rate * (1 - rate) / tried
            above.spread += SETTLING * (apart - above.spread)

    def _alike(self, at: int) -> float:
        """What a cell is believed to be before it was tried: as one guess earlier; mostly as sure as its drafter is."""
        row, depth = divmod(at, DEPTHS)
        if row >= TREE:  # where others hardly stand at all, they do not farther down, either
            return min(0.5, self.rate(TREE * DEPTHS)) if depth else 0.5
        like = UNSEEN * DEPTHS + depth if row < UNSEEN else at - 1 if depth else -1
        if like < 0:
            return self.belief.first
        found = self._believed.get(like)
        if found is None:
            found = self._believed[like] = self.rate(like)
        return found if row == UNSEEN else self.belief.at(row, found)

    def count(self, at: int, stood: bool, sure: int = -1) -> None:
        """Whether a guess stood, by its cell as one of whom nothing is known and, where given, by its confidence's."""
        rates: AcceptanceRates | None = self
        while rates is not None:
            fade, tried, right = rates.fade, rates.tried, rates.stood
            tried[at] = tried[at] * fade + 1
            right[at] = right[at] * fade + stood
            if sure >= 0:
                tried[sure] = tried[sure] * fade + 1
                right[sure] = right[sure] * fade + stood
            if rates._believed:
                rates._believed.clear()
            rates = rates.above

    def count_level(self, depth: int, wide: float, stood: bool) -> None:
        """Whether a level of a tree stood. What counts is how far that is from what its first choice and so many others
        should do, as in a line fitted to both: a first choice that hardly ever falls tells nothing of the others."""
        first = self.rate(cell(None, depth))
        falls, at = 1 - first, tree_cell(wide, depth)
        weight, right = 4 * falls * falls, 2 * falls * (stood - first + falls * (1 - rescue(wide, depth)))
        rates: AcceptanceRates | None = self
        while rates is not None:
            rates.tried[at] = rates.tried[at] * rates.fade + weight
            rates.stood[at] = rates.stood[at] * rates.fade + right
            rates = rates.above
