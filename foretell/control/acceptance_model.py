"""Acceptance model: how likely draft tokens are to be accepted, by drafter, depth, confidence and tree width.

Beta posteriors with exponentially decayed counts are kept by drafter and request class. A request shifts the odds of
its class by what it saw itself (empirical Bayes). Drafters with few trials get an optimism bonus (UCB), because a
drafter that is never used is never measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from foretell.types import Budget, Draft, DrafterTraits, Sequence

from .settings import ControllerTuning

WIDTHS = (2, 4, 8, 16)  # tree widths, in nodes per level, that are considered; each is twice the one before
# Rescue rate: how often a level of a tree contains the right token where the first choice is wrong. By depth (first
# level, second, deeper) and by width. The best nodes of a tree lie near its root, and the first choice after another
# choice is accepted less often than after a first one, so narrow trees gain nothing at greater depths. Measured with an
# EAGLE head on prompts of all tasks at temperature 0; slightly lower at higher temperatures.
RESCUE_RATES = ((0.5, 0.59, 0.66, 0.68), (0.08, 0.26, 0.4, 0.48), (-0.04, 0.0, 0.1, 0.14))

CONFIDENCE_BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)  # lower ends of the bins of a drafter's own confidence
BIN_MIDDLES = (0.1, 0.3, 0.5, 0.7, 0.87, 0.97)  # confidence that a bin stands for
DEPTHS = 4  # depths that are counted apart; the last one stands for all deeper ones
FOLLOWED = DEPTHS + 2  # depth to which drafts are compared with the output
NO_CONFIDENCE = len(CONFIDENCE_BINS)  # row of the counts that ignore confidence
TREE = NO_CONFIDENCE + 1  # first of one row per tree width: deviation from RESCUE_RATES
CELLS = (TREE + len(WIDTHS)) * DEPTHS
FIRST_TOKEN = NO_CONFIDENCE * DEPTHS  # cell of first tokens whatever their confidence
MAX_RATE = 0.995  # no draft token is certain
LEAST_PROBABILITY = 0.02  # draft tokens that are less likely to be accepted are not considered

# At temperature > 0 the argmax is not always sampled: an acceptance probability p at temperature 0 becomes p to this
# power. A rule of thumb until something is counted.
TEMPERATURE_POWERS = {"greedy": 1.0, "low": 1.5, "high": 3.0}
LOW_TEMPERATURE = 0.8  # upper end of "low"


def request_class_of(seq: Sequence) -> str:
    """Return the class of requests that share acceptance rates, by temperature."""
    temperature = seq.request.params.temperature
    if temperature == 0:
        return "greedy"
    return "low" if temperature <= LOW_TEMPERATURE else "high"


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
    """Return the cell of a tree level. The first level has one cell for all widths, deeper levels have one each.

    A rate of 0.5 there means that RESCUE_RATES hold; more means that second choices are accepted more often.
    """
    if depth == 1:
        return TREE * DEPTHS
    nearest = min(len(WIDTHS) - 1, max(0, round(math.log2(max(1.0, width))) - 1))
    return (TREE + nearest) * DEPTHS + (depth if depth < DEPTHS else DEPTHS) - 1


def mean_power(mean: float, power: float) -> float:
    """Return E[p^power] for p ~ Beta(2 mean, 2 (1 - mean)), which is uniform for a mean of 0.5.

    A drafter with an unknown acceptance rate may be good or bad, so this exceeds mean^power (Jensen's inequality).
    """
    a = 2 * min(max(mean, 1e-3), 1 - 1e-3)
    return math.gamma(a + power) / math.gamma(a) / math.gamma(2 + power)


class ClassRates:
    """Beta posteriors of one drafter over the requests of a class, by cell.

    A token is counted only if all tokens before it on its branch were accepted.
    """

    def __init__(self, traits: DrafterTraits, power: float = 1.0, tuning: ControllerTuning = ControllerTuning()):
        """`power` is the exponent that the temperature puts on an acceptance probability."""
        self.tuning, self.power = tuning, power
        self.trust = tuning.confidence_trust if traits.is_free else tuning.cross_trust
        known = traits.acceptance_by_depth
        self.prior = mean_power(traits.prior_acceptance, power) if power != 1 else traits.prior_acceptance
        # By how much the rate of a depth exceeds that of the depth before: drafts that got this far are easier.
        self.growth = [1.0] + [(after / before) ** power for before, after in zip(known, known[1:DEPTHS], strict=False)]
        self.growth += [1.0] * (DEPTHS - len(self.growth))
        self.trials, self.accepted = [0.0] * CELLS, [0.0] * CELLS
        self.known_rates: dict[int, float] = {}  # cached while a few more counts hardly change them
        self._counts_left = 0  # until the cache is cleared
        self._decay = 1 - 1 / tuning.class_memory

    def rate(self, at: int) -> float:
        """Return the posterior mean of a cell."""
        found = self.known_rates.get(at)
        if found is None:
            weight = self.tuning.class_prior
            found = (weight * self._prior_rate(at) + self.accepted[at]) / (weight + self.trials[at])
            self.known_rates[at] = found = min(found, MAX_RATE)
        return found

    def _prior_rate(self, at: int) -> float:
        """Return the prior of a cell: the rate one depth earlier, weighed with the confidence."""
        row, depth = divmod(at, DEPTHS)
        if row >= TREE:  # if second choices are hardly ever right in the first level, they are not at greater depths
            return min(0.5, self.rate(TREE * DEPTHS)) if depth else 0.5
        if row < NO_CONFIDENCE:
            confidence = float(BIN_MIDDLES[row] ** self.power)
            return self.trust * confidence + (1 - self.trust) * self.rate(FIRST_TOKEN + depth)
        return min(MAX_RATE, self.rate(at - 1) * self.growth[depth]) if depth else self.prior

    @property
    def is_familiar(self) -> bool:
        """Return whether the rate of first tokens has enough trials to need no optimism."""
        return self.trials[FIRST_TOKEN] >= self.tuning.familiar

    def bonus(self, rate: float, depth: int) -> float:
        """Return the optimism bonus of a rate. It fades with the trials of its depth."""
        trials, familiar = self.trials[FIRST_TOKEN + min(depth, DEPTHS) - 1], self.tuning.familiar
        if trials >= familiar:
            return 0.0
        return self.tuning.optimism * (1 - trials / familiar) * math.sqrt(max(0.0, rate * (1 - rate)) / (1 + trials))

    def count(self, at: int, accepted: float, weight: float = 1.0) -> None:
        """Count a draft token, accepted or not."""
        self.trials[at] = self.trials[at] * self._decay + weight
        self.accepted[at] = self.accepted[at] * self._decay + accepted
        self._counts_left -= 1
        if self._counts_left <= 0:
            self.known_rates.clear()
            self._counts_left = min(16, int(self.trials[FIRST_TOKEN] / 8))

    def level_rate(self, first_rate: float, depth: int, width: float) -> float:
        """Return the probability that a tree level contains the right token.

        `first_rate` is the acceptance rate of its first choice; where that is wrong, other choices may be right.
        """
        rescued = rescue_rate(width, depth) + 2 * self.rate(tree_cell(width, depth)) - 1
        return max(0.0, first_rate + (1 - first_rate) * min(1.0, max(-0.5, rescued)))

    def count_level(self, depth: int, width: float, accepted: bool) -> None:
        """Count whether a tree level contained the right token.

        This is weighted least squares for the deviation from RESCUE_RATES. A level whose first choice is nearly always
        right says little about the other choices, so its weight is small.
        """
        first = self.rate(cell(None, depth))
        missed = 1 - first
        hit = 2 * missed * (accepted - first + missed * (1 - rescue_rate(width, depth)))
        self.count(tree_cell(width, depth), hit, 4 * missed * missed)


class RequestRates:
    """Acceptance of one drafter in one request: the rates of the class with shifted odds."""

    __slots__ = ("group", "odds", "_hits", "_misses", "_expected", "_decay", "_weight")

    def __init__(self, group: ClassRates) -> None:
        self.group, self.odds = group, 1.0  # factor on the odds of the class's rates
        self._hits = self._misses = self._expected = 0.0
        self._decay, self._weight = 1 - 1 / group.tuning.request_memory, group.tuning.request_prior

    def rate(self, at: int) -> float:
        """Return the acceptance rate of a cell in this request."""
        rate, odds = self.group.rate(at), self.odds
        return rate * odds / (1 - rate + rate * odds)

    def count(self, at: int, accepted: bool, confidence_cell: int = -1) -> None:
        """Count a draft token in its cell and, unless -1, in that of its confidence."""
        group, decay, weight = self.group, self._decay, self._weight
        expected = group.rate(at if confidence_cell < 0 else confidence_cell)
        self._hits = self._hits * decay + accepted
        self._misses = self._misses * decay + 1 - accepted
        self._expected = self._expected * decay + expected
        mean = min(max(self._expected / (self._hits + self._misses), 0.01), 0.99)  # what the class would have accepted
        self.odds = (weight * mean + self._hits) / (weight * (1 - mean) + self._misses) * (1 - mean) / mean
        group.count(at, accepted)
        if confidence_cell >= 0:
            group.count(confidence_cell, accepted)


@dataclass(slots=True)
class OpenDraft:
    """A draft that output tokens have neither confirmed to its end nor contradicted yet.

    Every token of a free draft is counted, with its confidence. A timed drafter has a `budget`: of its chains the first
    choices are counted, of its trees whether each level contains the output token.
    """

    rates: RequestRates
    draft: Draft
    position: int  # index of the token that decides next
    budget: Budget | None = None
    free_confidence: float | None = None  # acceptance probability of the best free draft in the same step
    node: int = -1  # last node that was confirmed
    depth: int = 1
    on_first_choices: bool = True  # all nodes confirmed so far are the first choices of their levels
    is_chain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_chain = self.draft.is_chain

    def follow(self, tokens: list[int]) -> bool:
        """Count the draft tokens that `tokens` decide. Return whether the draft is still open."""
        draft, budget = self.draft, self.budget
        drafted, parents = draft.tokens, draft.parents
        while self.position < len(tokens) and self.depth <= (FOLLOWED if budget is None else budget.depth):
            token, node = tokens[self.position], self.node
            if self.is_chain:
                children = [node + 1] if node + 1 < len(parents) else []
            else:
                children = [i for i in range(node + 1, len(parents)) if parents[i] == node]  # parents come first
            hit = next((child for child in children if drafted[child] == token), -1)
            if budget is None:
                self._count_free(children, hit)
            else:
                self._count_timed(children, hit, budget.nodes / budget.depth)
            if hit < 0:
                return False
            self.node, self.depth, self.position = hit, self.depth + 1, self.position + 1
        return self.position >= len(tokens)

    def _count_free(self, children: list[int], hit: int) -> None:
        confidence, depth = self.draft.confidence, self.depth
        at = cell(None, depth)
        for child in children:
            self.rates.count(at, child == hit, -1 if confidence is None else cell(confidence[child], depth))

    def _count_timed(self, children: list[int], hit: int, width: float) -> None:
        if self.on_first_choices and children:
            row = -1 if self.free_confidence is None else cell(self.free_confidence, self.depth)
            self.rates.count(cell(None, self.depth), hit == children[0], row)
        if width > 1:  # a branch that ends before its depth counts as a miss, too
            self.rates.group.count_level(self.depth, width, hit >= 0)
        self.on_first_choices &= bool(children) and hit == children[0]


@dataclass(slots=True)
class RequestAcceptance:
    """Acceptance of all drafters in one request, and its open drafts."""

    rates: dict[str, RequestRates]
    open: list[OpenDraft] = field(default_factory=list)
    free_confidence: float | None = None  # acceptance probability of the best free draft in this step; None: not asked

    def resolve(self, tokens: list[int]) -> None:
        """Count what `tokens` say about the open drafts."""
        if self.open:
            self.open = [draft for draft in self.open if draft.follow(tokens)]

    def add_free(self, seq: Sequence, drafts: Mapping[str, Draft]) -> None:
        """Follow free drafts, whether the step uses them or not: the output tokens decide about both."""
        self.open += [OpenDraft(self.rates[name], draft, len(seq.tokens)) for name, draft in drafts.items()]

    def free_probs(self, drafter: str, draft: Draft) -> list[float]:
        """Return the probability that each node of a draft is accepted, together with all before it."""
        rates, confidence = self.rates[drafter], draft.confidence
        group, odds = rates.group, rates.odds
        known, row = group.known_rates, FIRST_TOKEN
        probs: list[float] = []
        columns: list[int] = []  # depth - 1 of each node, at most that of the last cell
        for node, parent in enumerate(draft.parents):
            column = min(columns[parent] + 1, DEPTHS - 1) if parent >= 0 else 0
            columns.append(column)
            if confidence is not None:
                row = cell(confidence[node], 1)
            rate = known.get(row + column) or group.rate(row + column)
            probs.append((probs[parent] if parent >= 0 else 1.0) * rate * odds / (1 - rate + rate * odds))
        return probs

    def chain_probs(self, drafter: str, depth: int, optimistic: bool = True) -> list[float]:
        """Return the acceptance probability of each token of a chain that is not drafted yet.

        Tokens that are easy for one drafter are easy for another, so the confidence of free drafts counts.
        """
        rates, first, prob, rate = self.rates[drafter], cell(self.free_confidence, 1), 1.0, 0.0
        group, odds = rates.group, rates.odds
        known, optimistic = group.known_rates, optimistic and not group.is_familiar
        probs: list[float] = []
        for at in range(depth):
            if at < DEPTHS:
                rate = known.get(first + at) or group.rate(first + at)
                rate = rate * odds / (1 - rate + rate * odds)
                if optimistic:
                    rate = min(1.0, rate + group.bonus(rate, at + 1))
            prob *= rate
            probs.append(prob)
            if prob < LEAST_PROBABILITY:
                break
        return probs

    def level_probs(self, drafter: str, depth: int, width: float) -> list[float]:
        """Return the probability, per level of a tree that is not drafted yet, that one of its nodes is accepted."""
        rates, prob, rate = self.rates[drafter], 1.0, 0.0
        probs: list[float] = []
        for at in range(1, depth + 1):
            if at <= DEPTHS:
                rate = rates.group.level_rate(rates.rate(cell(None, at)), at, width)
            prob *= rate
            probs.append(prob)
        return probs


class AcceptanceModel:
    """Acceptance of every drafter, by request class."""

    def __init__(self, traits: Mapping[str, DrafterTraits], tuning: ControllerTuning = ControllerTuning()) -> None:
        self.traits, self.tuning = traits, tuning
        self._classes: dict[tuple[str, str], ClassRates] = {}  # by drafter and request class

    def class_rates(self, drafter: str, request_class: str) -> ClassRates:
        """Return the rates of a drafter in a request class, made on first use."""
        found = self._classes.get((drafter, request_class))
        if found is None:
            traits, power = self.traits.get(drafter, DrafterTraits()), TEMPERATURE_POWERS[request_class]
            found = self._classes[drafter, request_class] = ClassRates(traits, power, self.tuning)
        return found

    def request(self, request_class: str, drafters: Iterable[str]) -> RequestAcceptance:
        """Return the acceptance of a new request."""
        return RequestAcceptance({name: RequestRates(self.class_rates(name, request_class)) for name in drafters})
