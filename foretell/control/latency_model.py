"""What steps and drafts cost here: learnt from the steps themselves, and kept true while the machine changes."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FEATURES = len(KNOTS) + 2
NOISE = 0.08  # how far a step strays from what it should take, as a share, on a quiet machine
FIRST_NOISE = 0.15  # what is believed of that before steps were seen
OUTLIER = 3.0  # surprises are cut at so many of the usual ones
DRIFT = 0.002  # how far the machine's pace wanders from step to step, as a share
PACE, BEND = 0.5, 0.1  # how far off the first step's pace, and how bent the curve of rows, may be, as shares
ALIKE = 3.0  # doublings of rows over which it bends alike: a number of rows that is not run is told by its neighbours
LEAN_RATE, CHANGED = 0.1, 0.5
USUAL_RATE = 0.05  # how fast the usual surprise is learnt
FIRST = 3  # steps whose median sets the pace: any single one may have been an odd one
LOADED = 32  # lessons that what an earlier run learnt counts for
KNOWN_WELL = 64  # steps after which one of about as many rows as a late one teaches little:
THINNED = 32  # one of so many is learnt, and of those with guesses, which hang on it, as many as take
LESSON, LESSON_SHARE = 2e-4, 0.003  # no more than this share of the time, at so many seconds, a curve included

MOST_SECONDS = 3600.0  # of a step, in what an earlier run wrote

DRAFTS_THINNED = 8  # the same for drafts: each is a lesson at first, then one of so many

BEGINNING = 0.2  # of what a draft of one node costs, the part that any draft costs

Vector = NDArray[np.float64]


class Fit:
    """Recursive least squares with a prior: seconds as a sum of weighted features.

    One observation far off the mark moves it only as far as a usual surprise would; when they all point one way,
    the pace is learnt anew.
    """

    def __init__(self, mean: Vector, spread: NDArray[np.float64]) -> None:
        """`spread` is the covariance of the prior."""
        self.mean, self.spread = mean, spread
        self.usual, self.lean = FIRST_NOISE, 0.0  # the usual surprise, and whether they all point one way

    def value(self, features: Vector) -> float:
        return float(features @ self.mean)

    def observe(self, features: Vector, seconds: float) -> None:
        expected = max(self.value(features), 1e-9)
        surprise = seconds / expected - 1
        limit = OUTLIER * max(self.usual, NOISE)
        # The middle one of the surprises, not their mean: that would be made of the hiccups it is to tell apart.
        self.usual *= 1 + USUAL_RATE if abs(surprise) > self.usual else 1 - USUAL_RATE
        surprise = min(max(surprise, -limit), limit)
        self.lean += LEAN_RATE * (surprise / limit - self.lean)
        if abs(self.lean) > CHANGED:  # no chain of hiccups: the machine has another pace now
            self.spread = self.spread + PACE**2 * np.outer(self.mean, self.mean)
            self.usual, self.lean = FIRST_NOISE, 0.0
        # The pace of all wanders together: a slower machine makes every step dearer by the same share.
        self.spread = self.spread + (DRIFT**2 * self.mean)[:, None] * self.mean
        seen = self.spread @ features
        gain = seen / (float(features @ seen) + (max(self.usual, NOISE) * expected) ** 2)
        self.mean = np.maximum(self.mean + gain * surprise * expected, 0.0)
        self.spread -= gain[:, None] * seen

    def dump(self) -> dict[str, Any]:
        return {"mean": self.mean.tolist(), "spread": self.spread.tolist(), "usual": self.usual}

    @classmethod
    def load(cls, kept: dict[str, Any], size: int) -> Fit | None:
        """Return None where another version wrote it, or where it is damaged. The machine may have changed, so the
        pace is learnt again."""
        try:
            mean, spread = np.array(kept.get("mean", ()), float), np.array(kept.get("spread", ()), float)
            usual = float(kept.get("usual", NOISE))
        except (TypeError, ValueError):
            return None
        if mean.shape != (size,) or spread.shape != (size, size) or not plausible(mean, spread, usual):
            return None
        found = cls(mean, spread + 0.2**2 * np.outer(mean, mean))
        found.usual = usual
        return found


def plausible(mean: Vector, spread: NDArray[np.float64], usual: float) -> bool:
    """Return whether these can have been measured; a comparison with NaN is false."""
    seconds = bool((mean >= 0).all() and 0 < mean.max() <= MOST_SECONDS)
    return (
        seconds
        and bool((np.abs(spread) <= MOST_SECONDS**2).all() and (spread.diagonal() >= 0).all())
        and 0 < usual < 10
    )


@dataclass(frozen=True)
class CostPrior:
    """What is believed of a device before anything ran: shapes, not seconds; the first steps set the pace."""

    row: float = 0.03  # what a further row costs, as a share of a step with one
    token: float = 1e-4  # what a cached token costs, as a share of a step with one row
    pair: float = 0.1  # what it costs each further row of its text, as a share of that
    free_rows: int = 1  # rows that cost no more than one


class StepCosts:
    """Seconds of a step of the target by the rows it runs, the tokens cached for its texts, and the pairs of a further
    row and a cached token it looks at: in long texts it is those that make a draft dear."""

    def __init__(self, prior: CostPrior = CostPrior(), sizes: tuple[int, ...] = ()) -> None:
        """`sizes`: rows that steps are filled up to, where they are; one in between costs what the next one does."""
        self.prior, self.sizes = prior, sizes
        self.steps = 0
        self.single = 0.0  # seconds of a step of one row; 0 before the first step ran
        self._fit: Fit | None = None
        self._means: list[float] = []  # the fit's, as plain numbers: numpy is slow where there are few
        self._first: list[tuple[Vector, float]] = []  # the first steps
        self._prices: list[float] = []
        self._asked, self._taught = 0, dict[int, int]()  # steps, and the last one of about as many rows that taught
        self._last = 0  # the last one of any rows that did

    @property
    def known(self) -> bool:
        return self._fit is not None

    def seconds(self, rows: int, context: int = 0, pairs: int = 0) -> float:
        """What a step of `rows` rows should take; 0 before the first one ran."""
        means = self._means  # another thread may learn meanwhile
        if not means:
            return 0.0
        knots = _knots(self.filled(rows))
        return sum(means[knot] * share for knot, share in knots) + means[-2] * context + means[-1] * pairs

    @property
    def pair(self) -> float:
        """Seconds a further row of a text takes for each token cached of it."""
        return self._means[-1] if self._means else 0.0

    def looking(self, context: int) -> float:
        """Seconds a step takes to look at so many cached tokens, its further rows aside."""
        return self._means[-2] * context if self._means else 0.0

    def curve(self, rows: int) -> Vector:
        """Seconds of steps of 0..`rows` rows with nothing cached; never falling, because rows are not rewarded."""
        return np.array(self.prices(rows))

    def prices(self, rows: int) -> list[float]:
        """The curve as a list, which is sooner made than an array."""
        if self._fit is None:
            return [0.0] * (rows + 1)
        if len(self._prices) <= rows:
            spreads = self._fit.spread.diagonal()[: len(KNOTS)].tolist()
            smooth = never_falling(self._means[: len(KNOTS)], spreads)
            self._prices = in_steps(between_knots(smooth, self.filled(max(rows, 64))), self.sizes)
        return self._prices[: rows + 1]

    def filled(self, rows: int) -> int:
        """Rows that are run where so many are wanted."""
        return next((size for size in self.sizes if rows <= size), rows) if rows else 0

    def wants(self, rows: int, guessed: bool = False) -> bool:
        """Whether a step of so many rows is worth learning from; to be asked once a step."""
        self._asked += 1
        about = rows.bit_length()
        if self.steps >= KNOWN_WELL:
            known = self._asked - self._taught.get(about, -THINNED) < THINNED
            if known and not (guessed and (self._asked - self._last) * LESSON_SHARE * self.single >= LESSON):
                return False
        self._taught[about] = self._last = self._asked
        return True

    def observe(self, rows: int, context: int, seconds: float, pairs: int = 0) -> None:
        """A step of the target ran."""
        if seconds <= 0:
            return
        features = _features(self.filled(rows), context, pairs)
        if len(self._first) < FIRST and self.steps == len(self._first):
            self._first.append((features, seconds))
            self._fit = self._start()
        else:
            assert self._fit is not None, "the first steps started it"
            self._fit.observe(features, seconds)
        self.steps += 1
        self._take_over()

    def _take_over(self) -> None:
        self._prices = []
        self._means = [] if self._fit is None else self._fit.mean.tolist()
        self.single = 0.0 if self._fit is None else float(self._fit.mean[0])  # the first knot is one row

    def _start(self) -> Fit:
        """What the first steps say, by the pace of the middle one."""
        prior = self.prior
        tokens = [prior.token, prior.token * prior.pair]
        shape = np.array([1 + prior.row * max(0, knot - prior.free_rows) for knot in KNOTS] + tokens)
        shape *= median_low(seconds / float(features @ shape) for features, seconds in self._first)
        # All may err by the pace of the first steps and by what a row costs; around that line the curve may bend a
        # little, near neighbours alike.
        place = np.log2(np.array(KNOTS, float))
        more = np.append(np.array(KNOTS, float) - 1, [0.0, 0.0])
        bend = np.diag(np.ones(len(shape)))
        bend[: len(KNOTS), : len(KNOTS)] = BEND**2 * np.exp(-np.abs(place[:, None] - place[None, :]) / ALIKE)
        slope = 3 * prior.row * shape[0] * more
        fit = Fit(shape, np.outer(shape, shape) * (bend + PACE**2) + np.outer(slope, slope))
        for features, seconds in self._first:
            fit.observe(features, seconds)
        return fit

    def dump(self) -> dict[str, Any]:
        """What was learnt, as plain values."""
        return {} if self._fit is None else self._fit.dump()

    def load(self, kept: dict[str, Any]) -> None:
        """Go on from what an earlier run learnt; the machine may have changed, so the pace is open again."""
        self._fit = Fit.load(kept, FEATURES)
        self.steps = LOADED if self.known else 0
        self._take_over()


def never_falling(values: list[float], spreads: list[float]) -> list[float]:
    """The values nearest to these that never fall; where some must give way, it is those known less well."""
    runs: list[tuple[float, float, int]] = []  # value, weight, how many
    for value, spread in zip(values, spreads, strict=True):
        weight, count = 1 / max(spread, 1e-30), 1
        while runs and runs[-1][0] > value:
            before, heavy, many = runs.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, count = heavy + weight, many + count
        runs.append((value, weight, count))
    return [value for value, _, count in runs for _ in range(count)]


def between_knots(values: list[float], rows: int) -> list[float]:
    """Of 0..`rows` rows, by straight lines between the knots' values; the last line goes on for ever."""
    found = [values[0]]
    for low, high, value, after in zip(KNOTS, KNOTS[1:], values, values[1:], strict=False):
        slope = (after - value) / (high - low)
        found += [slope * more + value for more in range(min(high, rows + 1) - low)]
    if rows >= KNOTS[-1]:
        slope = (values[-1] - values[-2]) / (KNOTS[-1] - KNOTS[-2])
        found += [values[-1] + slope * more for more in range(rows + 1 - KNOTS[-1])]
    return found


def in_steps(prices: list[float], sizes: tuple[int, ...]) -> list[float]:
    """The same where any number of rows costs what the next of these sizes does."""
    found = prices[:1]
    for size in sizes:
        if size < len(prices):
            found += [prices[size]] * (size + 1 - len(found))
    return found + prices[len(found) :]


def _knots(rows: int) -> tuple[tuple[int, float], ...]:
    """The knots beside `rows`, by their places, and what each counts for."""
    above = bisect_left(KNOTS, rows)
    if above == len(KNOTS):
        return ((above - 1, rows / KNOTS[-1]),)
    if above == 0 or KNOTS[above] == rows:
        return ((above, 1.0),)
    low, high = KNOTS[above - 1], KNOTS[above]
    share = (rows - low) / (high - low)
    return ((above - 1, 1 - share), (above, share))


def _features(rows: int, context: int, pairs: int) -> Vector:
    """Weights of the knots beside `rows`, the cached tokens, and the pairs."""
    found = np.zeros(FEATURES)
    found[-2], found[-1] = context, pairs
    for knot, share in _knots(rows):
        found[knot] = share
    return found


class DraftPrices(NamedTuple):
    """Seconds: to begin a draft, of a level of depth, of a node, of a token read."""

    start: float
    level: float
    node: float
    token: float


class DraftCosts:
    """Seconds of a draft: to begin at all, by its depth, its nodes in all sequences, and the tokens read before."""

    def __init__(self, share: float, node: float = 0.2, like: DraftCosts | None = None) -> None:
        """`share` is what one node of one sequence is believed to cost, of a plain step, and `node` of that what it
        would cost beside others of its level. `like`: drafts whose prices are believed in until these were seen."""
        self.share, self.node, self._like = share, node, like
        self._fit: Fit | None = None
        self._prices: DraftPrices | None = None
        self._seen = 0  # drafts

    def prices(self, plain: float) -> DraftPrices:
        """Of `plain`, a plain step, while nothing is known."""
        if self._prices is None:
            if self._like is not None:
                return self._like.prices(plain)
            whole = max(self.share * plain, 1e-9)
            return DraftPrices(BEGINNING * whole, (1 - BEGINNING - self.node) * whole, self.node * whole, 0.05 * whole)
        return self._prices

    def seconds(self, depth: int, nodes: int, read: int, plain: float) -> float:
        start, level, node, token = self.prices(plain)
        return (start if nodes else 0.0) + level * depth + node * nodes + token * read

    def observe(self, depth: int, nodes: int, read: int, seconds: float, plain: float) -> None:
        self._seen += 1
        if self._seen > KNOWN_WELL and not read and self._seen % DRAFTS_THINNED:
            return
        if self._fit is None:
            mean = np.array(self.prices(plain))
            self._fit = Fit(mean, np.outer(mean, mean) * PACE**2 + np.diag(mean**2))
        self._fit.observe(np.array([1, depth, nodes, read], float), seconds)
        self._take_over()

    def _take_over(self) -> None:
        assert self._fit is not None, "something was observed"
        self._prices = DraftPrices(*self._fit.mean.tolist())

    def dump(self) -> dict[str, Any]:
        """What was learnt, as plain values."""
        return {} if self._fit is None else self._fit.dump()

    def load(self, kept: dict[str, Any]) -> None:
        """Go on from what an earlier run learnt."""
        found = Fit.load(kept, len(DraftPrices._fields))
        if found is not None:
            self._fit = found
            self._take_over()


SEEN = 9  # waits of late, whose middle one is what is usual
KNOWN = 3  # of them after which it is known: one that was odd is not the middle one
SOON, SELDOM = 16, 256  # steps that begin early until one does not, so that a wait is seen: at first, and later
HOPE = 0.25  # how fast it is learnt what guesses are worth in steps of late


class HostGap:
    """Seconds by how many texts are written, in doublings, for the host looks at each of them; and what guesses have
    been worth of late, which a step that begins before its tokens are known does without."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bool], deque[float]] = {}
        self._usual: dict[bool, dict[int, float]] = {False: {}, True: {}}
        self._hope, self._early = 0.0, 0

    def observe(self, texts: int, seconds: float, guessing: bool = False) -> None:
        """A device waited so long before a step of so many texts, or, `guessing`, before guesses that it makes itself:
        their check is sent meanwhile, so it waits for less."""
        size = texts.bit_length()
        seen = self._seen.setdefault((size, guessing), deque(maxlen=SEEN))
        seen.append(seconds)
        self._usual[guessing][size] = median_low(seen)

    def hope(self, seconds: float) -> None:
        """A step was decided in which guesses should save so much."""
        self._hope += HOPE * (seconds - self._hope)

    def outweigh_guesses(self, texts: int) -> bool:
        """Whether a step should begin early: it saves what the device would wait. Asked once a step; what is never seen
        again would be believed for ever, so now and then one does not."""
        if self._hope >= self.seconds(texts):
            return False
        self._early += 1
        known = len(self._seen.get((texts.bit_length(), False), ())) >= KNOWN
        if self._early < (SELDOM if known else SOON):
            return True
        self._early = 0
        return False

    def seconds(self, texts: int) -> float:
        """What is usual, or what is known of the nearest number of texts, or of other steps; 0 where nobody waited."""
        size, known = texts.bit_length(), self._usual[False] or self._usual[True]
        if size in known or not known:
            return known.get(size, 0.0)
        return known[min(known, key=lambda other: abs(other - size))]

    def hidden(self, texts: int) -> float:
        """What of that guesses do not wait for that a device makes itself; 0 until both were seen with as many."""
        size = texts.bit_length()
        plain, guessed = self._usual[False].get(size), self._usual[True].get(size)
        return 0.0 if plain is None or guessed is None else plain - guessed
