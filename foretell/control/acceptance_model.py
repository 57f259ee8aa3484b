"""Acceptance model: how likely draft tokens are to be accepted, by drafter, depth, confidence and tree width.

Counts are kept per request, per request class and per drafter. A rate combines the three by hierarchical shrinkage: the
rate of the level above is the prior mean of the level below. Drafters with few trials get an optimism bonus in the
manner of UCB, because a drafter that is never used is never measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from foretell.types import Draft, Sequence

from .settings import AcceptanceTuning, CountDecay

# Tree widths, in nodes per level, that the length optimizer considers. Each is twice the one before.
WIDTHS = (2, 4, 8, 16)
# Rescue rate: how often a level of a tree contains the right token where the first choice is wrong. By depth (first
# level, second, deeper) and by width. The best nodes of a tree lie near its root, and the first choice after another
# choice is accepted less often than after a first one, so narrow trees gain nothing at greater depths. Measured with an
# EAGLE head on prompts of all tasks at temperature 0; slightly lower at higher temperatures.
RESCUE_RATES = ((0.5, 0.59, 0.66, 0.68), (0.08, 0.26, 0.4, 0.48), (-0.04, 0.0, 0.1, 0.14))

CONFIDENCE_BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)  # lower ends of the bins of a drafter's own confidence
BIN_MIDDLES = (0.1, 0.3, 0.5, 0.7, 0.87, 0.97)  # confidence that a bin stands for
DEPTHS = 3  # depths that are counted apart: first token, second, deeper
NO_CONFIDENCE = len(CONFIDENCE_BINS)  # row of the counts that ignore confidence
FIRST_TOKEN = NO_CONFIDENCE * DEPTHS  # cell of first tokens whatever their confidence
TREE = NO_CONFIDENCE + 1  # first of one row per tree width: deviation from RESCUE_RATES
CELLS = (TREE + len(WIDTHS)) * DEPTHS

# At temperature > 0 the argmax is not always sampled: an acceptance probability p at temperature 0 becomes p to this
# power.
TEMPERATURE_POWERS = {"greedy": 1.0, "low": 1.5, "high": 3.0}
LOW_TEMPERATURE = 0.8  # upper end of "low"


def rescue_rate(width: float, depth: int) -> float:
    """Return the share of tokens missed by a chain at this depth that a tree of this width finds."""
    by_width = RESCUE_RATES[min(depth, len(RESCUE_RATES)) - 1]
    above = bisect_right(WIDTHS, width)
    if above == 0:
        return by_width[0] * max(0.0, width - 1) / (WIDTHS[0] - 1)
    if above == len(WIDTHS):
        return by_width[-1]
    part = math.log2(width / WIDTHS[above - 1])
    return by_width[above - 1] + part * (by_width[above] - by_width[above - 1])


def cell(confidence: float | None, depth: int) -> int:
    """Return the cell of a draft token at `depth`, where 1 is the first token of the draft."""
    row = NO_CONFIDENCE if confidence is None else max(0, bisect_right(CONFIDENCE_BINS, confidence) - 1)
    return row * DEPTHS + (depth if depth < DEPTHS else DEPTHS) - 1


def tree_cell(width: float, depth: int) -> int:
    """Return the cell of a tree level.

    A rate of 0.5 there means that RESCUE_RATES hold; more means that second choices are accepted more often. The first
    level has one cell for all widths, deeper levels have one each.
    """
    if depth == 1:
        return TREE * DEPTHS
    return (TREE + _nearest_width(width)) * DEPTHS + (depth if depth < DEPTHS else DEPTHS) - 1


def _nearest_width(width: float) -> int:
    """Return the index of the nearest of the WIDTHS, on a logarithmic scale."""
    return min(len(WIDTHS) - 1, max(0, round(math.log2(max(1.0, width))) - 1))


@dataclass(frozen=True)
class AcceptancePrior:
    """Acceptance of a drafter before anything was counted."""

    prior: float = AcceptanceTuning.default_prior  # acceptance rate at temperature 0
    trust: float = AcceptanceTuning.confidence_trust  # weight of the confidence in a confidence bin
    power: float = 1.0  # exponent that the temperature puts on an acceptance probability

    @property
    def mean(self) -> float:
        """Return the expected acceptance rate at this temperature."""
        return mean_power(self.prior, self.power)

    def in_bin(self, row: int, rate: float) -> float:
        """Return the prior of a confidence bin, given the acceptance rate over all bins."""
        return float(self.trust * BIN_MIDDLES[row] ** self.power + (1 - self.trust) * rate)


@cache
def mean_power(mean: float, power: float) -> float:
    """Return E[p^power] for p ~ Beta(2 mean, 2 (1 - mean)), which is uniform for a mean of 0.5.

    A drafter with an unknown acceptance rate may be good or bad, so this exceeds mean^power (Jensen's inequality).
    """
    if power == 1:
        return mean
    a = 2 * min(max(mean, 1e-3), 1 - 1e-3)
    return math.gamma(a + power) / math.gamma(a) / math.gamma(2 + power)


class AcceptanceRates:
    """Exponentially decayed counts of tried and accepted draft tokens, by cell, at one level of the hierarchy.

    A token is counted only if all tokens before it on its branch were accepted.
    """

    __slots__ = (
        "parent",
        "decay",
        "prior_weight",
        "prior",
        "tuning",
        "trials",
        "accepted",
        "variance",
        "_prior_rates",
        "_ancestors",
    )

    def __init__(
        self,
        parent: AcceptanceRates | None,
        decay: CountDecay,
        prior: AcceptancePrior = AcceptancePrior(),
        tuning: AcceptanceTuning = AcceptanceTuning(),
    ) -> None:
        """`prior` applies at the top of the hierarchy, where `parent` is None."""
        self.parent = parent
        self.decay, self.prior_weight = decay
        self.prior = prior
        self.tuning = tuning
        self.trials = [0.0] * CELLS
        self.accepted = [0.0] * CELLS
        self.variance = tuning.initial_variance  # of the first-token rate between the children of this level
        self._prior_rates: dict[int, float] = {}  # cached rates that priors are made of, until the next count
        # All levels above this one, top first.
        self._ancestors: tuple[AcceptanceRates, ...] = () if parent is None else (*parent._ancestors, parent)

    def rate(self, at: int) -> float:
        """Return the acceptance rate of a cell, by shrinkage from the top level down to this one.

        It is one loop and not a recursion because a step asks for many rates.
        """
        line = self._ancestors
        found, last = (line[0] if line else self)._prior_rate(at), len(line)
        for below, rates in enumerate(line, 1):
            child = line[below] if below < last else self
            # Counts of the child are contained in those of its parent and must not count twice.
            trials, weight = rates.trials[at] - child.trials[at], rates.prior_weight
            accepted = rates.accepted[at] - child.accepted[at]
            trials, accepted = trials if trials > 0 else 0.0, accepted if accepted > 0 else 0.0
            found = (weight * found + (accepted if accepted < trials else trials)) / (weight + trials)
        trials, accepted, weight = self.trials[at], self.accepted[at], self.prior_weight
        return (weight * found + (accepted if accepted < trials else trials)) / (weight + trials)

    def optimistic_rate(self, at: int, doubt: float = 1.0) -> float:
        """Return the rate of a cell plus an optimism bonus that fades with the number of trials.

        `doubt` is added to the trials: the larger, the smaller the bonus.
        """
        # Cells by confidence are rarely met. Their bonus goes by the trials of the drafter at that depth.
        tuning = self.tuning
        seen, rate = FIRST_TOKEN + at % DEPTHS, self.rate(at)
        parent = self.parent
        if (
            parent is not None
            and parent.variance > 0
            and seen == FIRST_TOKEN
            and self.trials[seen] < tuning.new_request
        ):
            # A new request may be better than the average one, as far as requests differ.
            bonus = (1 - self.trials[seen] / tuning.new_request) * math.sqrt(parent.variance)
            rate += min(bonus, (1 - rate) / 2)
        trials = self.trials[seen] if parent is None else max(self.trials[seen], parent.trials[seen])
        if trials >= tuning.familiar:
            return rate if rate < 1.0 else 1.0
        return min(1.0, rate + (1 - trials / tuning.familiar) * math.sqrt(rate * (1 - rate) / (doubt + trials)))

    def level_rate(self, first_rate: float, depth: int, width: float) -> float:
        """Return the probability that a tree level contains the right token, optimism bonus included.

        `first_rate` is the acceptance rate of its first choice; where that is wrong, other choices may be right.
        """
        at, tuning = tree_cell(width, depth), self.tuning
        trials = self.trials[at] if self.parent is None else max(self.trials[at], self.parent.trials[at])
        # `count_level` weighs trials by what they tell, so the bonus lasts longer where first choices are mostly right
        # and the rescue rate matters little.
        bonus = (
            (1 - trials / tuning.familiar) / math.sqrt(tuning.tree_doubt + trials) if trials < tuning.familiar else 0.0
        )
        rescued = rescue_rate(width, depth) + 2 * self.rate(at) - 1 + bonus
        return max(0.0, first_rate + (1 - first_rate) * min(1.0, max(tuning.min_rescue, rescued)))

    def update_parent_variance(self) -> None:
        """Update the parent's variance between children with this finished one, sampling noise subtracted."""
        parent, trials = self.parent, self.trials[FIRST_TOKEN]
        if parent is not None and trials >= self.tuning.enough_for_variance:
            rate = parent.rate(FIRST_TOKEN)
            squared = (self.accepted[FIRST_TOKEN] / trials - rate) ** 2 - rate * (1 - rate) / trials
            parent.variance += self.tuning.variance_ema * (squared - parent.variance)

    def _prior_rate(self, at: int) -> float:
        """Return the prior of a cell without trials: the rate one depth earlier, weighed with the confidence."""
        row, depth = divmod(at, DEPTHS)
        if row >= TREE:  # if second choices are hardly ever right in the first level, they are not at greater depths
            return min(0.5, self.rate(TREE * DEPTHS)) if depth else 0.5
        if row < NO_CONFIDENCE:
            like = FIRST_TOKEN + depth
        elif depth:
            like = at - 1
        else:
            return self.prior.mean
        found = self._prior_rates.get(like)
        if found is None:
            found = self._prior_rates[like] = self.rate(like)
        return found if row == NO_CONFIDENCE else self.prior.in_bin(row, found)

    def count(self, at: int, accepted: bool, confidence_cell: int = -1) -> None:
        """Count a draft token at this level and all above: in its cell and, unless -1, in that of its confidence."""
        rates: AcceptanceRates | None = self
        while rates is not None:
            decay, trials, hits = rates.decay, rates.trials, rates.accepted
            trials[at] = trials[at] * decay + 1
            hits[at] = hits[at] * decay + accepted
            if confidence_cell >= 0:
                trials[confidence_cell] = trials[confidence_cell] * decay + 1
                hits[confidence_cell] = hits[confidence_cell] * decay + accepted
            if rates._prior_rates:
                rates._prior_rates.clear()
            rates = rates.parent

    def count_level(self, depth: int, width: float, accepted: bool) -> None:
        """Count whether a tree level contained the right token.

        This is weighted least squares for the deviation from RESCUE_RATES. A level whose first choice is nearly always
        right says little about the other choices, so its weight is small.
        """
        first = self.rate(cell(None, depth))
        missed, at = 1 - first, tree_cell(width, depth)
        weight, hit = 4 * missed * missed, 2 * missed * (accepted - first + missed * (1 - rescue_rate(width, depth)))
        rates: AcceptanceRates | None = self
        while rates is not None:
            rates.trials[at] = rates.trials[at] * rates.decay + weight
            rates.accepted[at] = rates.accepted[at] * rates.decay + hit
            rates = rates.parent


class AcceptanceCalibration:
    """Ratio of accepted to expected draft tokens. Below 1 the model is too optimistic about the drafts it selects."""

    def __init__(self, tuning: AcceptanceTuning = AcceptanceTuning()) -> None:
        self.tuning = tuning
        self.expected = self.accepted = tuning.calibration_prior

    @property
    def factor(self) -> float:
        return min(1.0, self.accepted / self.expected)

    def count(self, expected: float, accepted: int) -> None:
        """Add the expected and accepted tokens of one draft."""
        prior, decay = self.tuning.calibration_prior, self.tuning.calibration_decay
        self.expected = prior + (self.expected - prior) * decay + expected
        self.accepted = prior + (self.accepted - prior) * decay + accepted


@dataclass
class RequestAcceptance:
    """Acceptance rates of one request, by drafter."""

    request_class: str
    rates: dict[str, AcceptanceRates] = field(default_factory=dict)
    cached_rates: dict[str, dict[int, float]] = field(default_factory=dict)  # by drafter and cell, until the next count


class AcceptanceModel:
    """Acceptance probabilities of every drafter: request over request class over all requests at its temperature."""

    def __init__(
        self, priors: Mapping[str, AcceptancePrior] | None = None, tuning: AcceptanceTuning = AcceptanceTuning()
    ) -> None:
        self.tuning = tuning
        self._priors = priors or {}
        self._calibrations: dict[tuple[str, str], AcceptanceCalibration] = {}  # by drafter and request class
        self._drafters: dict[tuple[str, str], AcceptanceRates] = {}  # by drafter and temperature class
        self._classes: dict[tuple[str, str], AcceptanceRates] = {}  # by drafter and request class
        self._requests: dict[int, RequestAcceptance] = {}

    def find(self, seq_id: int) -> RequestAcceptance | None:
        """Return the rates of a request, or None if it has none yet."""
        return self._requests.get(seq_id)

    def request(self, seq_id: int, request_class: str) -> RequestAcceptance:
        """Return the rates of a request, made on first use."""
        if seq_id not in self._requests:
            self._requests[seq_id] = RequestAcceptance(request_class)
        return self._requests[seq_id]

    def trials(self, request: RequestAcceptance, drafter: str) -> float:
        """Return the decayed number of a drafter's first tokens in this request class."""
        parent = self.rates(request, drafter).parent
        return 0.0 if parent is None else parent.trials[FIRST_TOKEN]

    def rates(self, request: RequestAcceptance, drafter: str) -> AcceptanceRates:
        """Return the rates of a drafter in one request, made on first use."""
        found = request.rates.get(drafter)
        if found is None:
            key = (drafter, request.request_class)
            parent = self._classes.get(key)
            if parent is None:
                top = self._drafter_rates(drafter, temperature_class(request.request_class))
                parent = self._classes[key] = AcceptanceRates(top, self.tuning.request_class, tuning=self.tuning)
            found = request.rates[drafter] = AcceptanceRates(parent, self.tuning.request, tuning=self.tuning)
        return found

    def _drafter_rates(self, drafter: str, temperature: str) -> AcceptanceRates:
        """Return a drafter's rates over all requests of a temperature class. Other temperatures tell little of them."""
        key = (drafter, temperature)
        if key not in self._drafters:
            prior = self._prior(drafter, temperature)
            self._drafters[key] = AcceptanceRates(None, self.tuning.drafter, prior, self.tuning)
        return self._drafters[key]

    def _prior(self, drafter: str, temperature: str) -> AcceptancePrior:
        return replace(self._priors.get(drafter, AcceptancePrior()), power=TEMPERATURE_POWERS.get(temperature, 1.0))

    def calibration(self, request: RequestAcceptance, drafter: str) -> AcceptanceCalibration:
        """Return the calibration of a drafter in this request class, made on first use."""
        key = (drafter, request.request_class)
        found = self._calibrations.get(key)
        if found is None:
            found = self._calibrations[key] = AcceptanceCalibration(self.tuning)
        return found

    def accept_probs(self, request: RequestAcceptance, drafter: str, draft: Draft) -> list[float]:
        """Return the probability that each node of a draft is accepted, together with all before it."""
        rates, confidence = self.rates(request, drafter), draft.confidence
        known = request.cached_rates.get(drafter)
        if known is None:
            known = request.cached_rates[drafter] = {}
        factor = self.calibration(request, drafter).factor
        probs: list[float] = []
        depths: list[int] = []
        for node, parent in enumerate(draft.parents):
            depth, before = (depths[parent] + 1, probs[parent]) if parent >= 0 else (1, factor)
            depths.append(depth)
            at = cell(None if confidence is None else confidence[node], depth)
            rate = known.get(at)
            if rate is None:
                rate = known[at] = rates.rate(at)
            probs.append(before * rate)
        return probs

    def expected_accept_probs(
        self,
        request: RequestAcceptance,
        drafter: str,
        depth: int,
        optimistic: bool = True,
        free_confidence: float | None = None,
    ) -> list[float]:
        """Return the acceptance probability of each token of a chain that is not drafted yet.

        `free_confidence` is the acceptance probability of the best free draft in this step: 0 without a draft, None
        without free drafters. Tokens that are easy for one drafter are easy for another.
        """
        rates, prob = self.rates(request, drafter), 1.0
        probs: list[float] = []
        for at in range(1, depth + 1):
            if at <= DEPTHS:
                here = cell(free_confidence, at)
                rate = rates.optimistic_rate(here) if optimistic else rates.rate(here)
            prob *= rate
            probs.append(prob)
        return probs

    def tree_level_probs(self, request: RequestAcceptance, drafter: str, depth: int, width: float) -> list[float]:
        """Return the probability, per level of a tree that is not drafted yet, that one of its nodes is accepted."""
        rates, doubt, prob = self.rates(request, drafter), self.tuning.tree_doubt, 1.0
        probs: list[float] = []
        for at in range(1, depth + 1):
            if at <= DEPTHS:
                rate = rates.level_rate(rates.optimistic_rate(cell(None, at), doubt), at, width)
            prob *= rate
            probs.append(prob)
        return probs

    def first_rate(self, drafter: str, request_class: str) -> float:
        """Return the acceptance rate of a drafter's first tokens over all requests at this class's temperature."""
        temperature = temperature_class(request_class)
        rates = self._drafters.get((drafter, temperature))
        return self._prior(drafter, temperature).mean if rates is None else rates.rate(FIRST_TOKEN)

    def forget(self, seq_id: int) -> None:
        """Drop a finished request, after it has updated the variance between requests."""
        request = self._requests.pop(seq_id, None)
        for rates in request.rates.values() if request else ():
            rates.update_parent_variance()


def request_class_of(seq: Sequence) -> str:
    """Return the class of requests that share acceptance rates: by temperature, and whether a grammar applies."""
    params = seq.request.params
    sampled = "low" if params.temperature <= LOW_TEMPERATURE else "high"
    temperature = "greedy" if params.temperature == 0 else sampled
    return f"{temperature}, grammar" if params.structured_outputs is not None else temperature


def temperature_class(request_class: str) -> str:
    """Return the temperature part of a request class: one of TEMPERATURE_POWERS."""
    return request_class.partition(",")[0]
