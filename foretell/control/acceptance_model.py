"""Acceptance model: how likely draft tokens are to be accepted, by drafter, depth, confidence and tree width.

Beta posteriors with exponentially decayed counts are kept by drafter and class of temperature.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from foretell.types import Budget, Draft, DrafterTraits

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
NO_CONFIDENCE = len(CONFIDENCE_BINS)  # row of the counts that ignore confidence
TREE = NO_CONFIDENCE + 1  # first of one row per tree width: deviation from RESCUE_RATES
CELLS = (TREE + len(WIDTHS)) * DEPTHS
FIRST_TOKEN = NO_CONFIDENCE * DEPTHS  # cell of first tokens whatever their confidence
MAX_RATE = 0.995  # no draft token is certain
MOST_TOKENS = 256  # of a chain
LEAST_PROBABILITY = 0.02  # draft tokens that are less likely to be accepted are not considered


def temperature_power(temperature: float) -> float:
    """Return the power by which sampling lowers an acceptance probability: the argmax is not always sampled.

    A rule of thumb until something is counted. Requests of the same power share their rates.
    """
    if temperature == 0:
        return 1.0
    return 1.4 if temperature <= 0.8 else 2.5


def rescue_rate(width: float, depth: int) -> float:
    """Return the prior share of tokens missed by a chain at this depth that a tree of this width finds."""
    by_width = (0.0, *RESCUE_RATES[min(depth, len(RESCUE_RATES)) - 1])
    index = min(max(math.log2(width), 0.0), float(len(WIDTHS)))  # between two widths
    below = min(int(index), len(WIDTHS) - 1)
    return by_width[below] + (index - below) * (by_width[below + 1] - by_width[below])


def cell(confidence: float | None, depth: int) -> int:
    """Return the cell of a draft token at `depth`, where 1 is the first token of the draft."""
    row = NO_CONFIDENCE if confidence is None else max(0, bisect_right(CONFIDENCE_BINS, confidence) - 1)
    return row * DEPTHS + (depth if depth < DEPTHS else DEPTHS) - 1


def tree_cell(width: float, depth: int) -> int:
    """Return the cell of a tree level. The first level has one cell for all widths, deeper levels have one each.

    A rate of 0.5 there means that RESCUE_RATES hold; more means that second choices are accepted more often.
    """
    nearest = 0 if depth == 1 else min(len(WIDTHS) - 1, max(0, round(math.log2(max(1.0, width))) - 1))
    return (TREE + nearest) * DEPTHS + (depth if depth < DEPTHS else DEPTHS) - 1


class AcceptanceRates:
    """Beta posteriors of one drafter over requests of about the same temperature, by cell.

    A token is counted only if all tokens before it on its branch were accepted.
    """

    def __init__(self, traits: DrafterTraits, power: float = 1.0, tuning: ControllerTuning = ControllerTuning()):
        """`power` is the exponent that the temperature puts on an acceptance probability."""
        self.tuning, self.power, self.is_free = tuning, power, traits.is_free
        known, self.prior = traits.acceptance_by_depth, traits.prior_acceptance
        if not (known or traits.is_free):
            self.prior = max(self.prior, tuning.optimistic_prior)
        self.prior **= power
        # By how much the rate of a depth exceeds that of the depth before: drafts that got this far are easier.
        self.growth = [1.0] + [(after / before) ** power for before, after in zip(known, known[1:DEPTHS], strict=False)]
        self.growth += [1.0] * (DEPTHS - len(self.growth))
        self.trials, self.accepted = [0.0] * CELLS, [0.0] * CELLS
        self._prior_weight = (
            tuning.prior_weight
        )  # of first tokens: it decays, too, or a useless drafter would never be given up
        # Cached while a few more counts hardly change them.
        self._rates: dict[int, float] = {}
        self._chain: list[float] = []
        self._counts_left = 0

    def rate(self, at: int) -> float:
        """Return the posterior mean of a cell."""
        found = self._rates.get(at)
        if found is None:
            weight = self._prior_weight if at == FIRST_TOKEN else self.tuning.prior_weight
            found = (weight * self._prior_rate(at) + self.accepted[at]) / (weight + self.trials[at])
            self._rates[at] = found = min(found, MAX_RATE)
        return found

    def _prior_rate(self, at: int) -> float:
        """Return the prior of a cell: the rate one depth earlier, weighed with the confidence."""
        row, depth = divmod(at, DEPTHS)
        if row >= TREE:  # if second choices are hardly ever right in the first level, they are not at greater depths
            return min(0.5, self.rate(TREE * DEPTHS)) if depth else 0.5
        if row < NO_CONFIDENCE:
            trust, confidence = self.tuning.confidence_trust, float(BIN_MIDDLES[row] ** self.power)
            return trust * confidence + (1 - trust) * self.rate(FIRST_TOKEN + depth)
        return min(MAX_RATE, self.rate(at - 1) * self.growth[depth]) if depth else self.prior

    @property
    def is_known(self) -> bool:
        """Return whether first tokens were counted often enough to outweigh the prior."""
        return self.trials[FIRST_TOKEN] >= self.tuning.prior_weight

    def count(self, at: int, accepted: float, weight: float = 1.0) -> None:
        """Count a draft token, accepted or not."""
        decay = 1 - 1 / self.tuning.memory
        self.trials[at] = self.trials[at] * decay + weight
        self.accepted[at] = self.accepted[at] * decay + accepted
        if at == FIRST_TOKEN:
            self._prior_weight *= decay
        self._counts_left -= 1
        if self._counts_left <= 0:
            self._rates.clear()
            self._chain = []
            self._counts_left = min(8, int(self.trials[FIRST_TOKEN] / 8))

    def chain_probs(self, depth: int) -> list[float]:
        """Return the probability that each token of a chain is accepted, together with all before it."""
        if not self._chain:
            prob = 1.0
            for at in range(MOST_TOKENS):
                prob *= self.rate(FIRST_TOKEN + min(at, DEPTHS - 1))
                self._chain.append(prob)
                if prob < LEAST_PROBABILITY:
                    break
        return self._chain[:depth]

    def draft_probs(self, draft: Draft, most: int) -> list[float]:
        """Return that probability for the first nodes of a draft that a free drafter has made, by its confidence."""
        known, row, confidence = self._rates, FIRST_TOKEN, draft.confidence
        probs: list[float] = []
        columns: list[int] = []  # depth - 1 of each node, at most that of the last cell
        for node, parent in enumerate(draft.parents[:most]):
            column = min(columns[parent] + 1, DEPTHS - 1) if parent >= 0 else 0
            columns.append(column)
            if confidence is not None:
                row = cell(confidence[node], 1)
            rate = known.get(row + column) or self.rate(row + column)
            probs.append((probs[parent] if parent >= 0 else 1.0) * rate)
        return probs

    def level_rate(self, depth: int, width: float) -> float:
        """Return the probability that a tree level contains the right token, if the one before did.

        Its first choice is as likely to be right as the token of a chain; where it is wrong, another one may be.
        """
        first = self.rate(cell(None, depth))
        rescued = rescue_rate(width, depth) + 2 * self.rate(tree_cell(width, depth)) - 1
        return max(0.0, first + (1 - first) * min(1.0, max(-0.5, rescued)))

    def count_level(self, depth: int, width: float, accepted: bool) -> None:
        """Count whether a tree level contained the right token.

        This is weighted least squares for the deviation from RESCUE_RATES. A level whose first choice is nearly always
        right says little about the other choices, so its weight is small.
        """
        first = self.rate(cell(None, depth))
        missed = 1 - first
        hit = 2 * missed * (accepted - first + missed * (1 - rescue_rate(width, depth)))
        self.count(tree_cell(width, depth), hit, 4 * missed * missed)

    def level_probs(self, depth: int, width: float) -> list[float]:
        """Return the probability, per level of a tree, that one of its nodes is accepted."""
        prob, probs = 1.0, list[float]()
        rates = [self.level_rate(at, width) for at in range(1, min(depth, DEPTHS) + 1)]
        for at in range(depth):
            prob *= rates[min(at, DEPTHS - 1)]
            probs.append(prob)
        return probs


@dataclass(slots=True)
class OpenDraft:
    """A draft that output tokens have neither confirmed to its end nor contradicted yet.

    Every token of a free draft is counted, with its confidence. A timed drafter has a `budget`: of its chains the first
    choices are counted, of its trees whether each level contains the output token.
    """

    rates: AcceptanceRates
    draft: Draft
    position: int  # index of the token that decides next
    budget: Budget | None = None
    node: int = -1  # last node that was confirmed
    depth: int = 1
    on_first_choices: bool = True  # all nodes confirmed so far are the first choices of their levels

    def follow(self, tokens: list[int]) -> bool:
        """Count the draft tokens that `tokens` decide. Return whether the draft is still open."""
        draft = self.draft
        most = DEPTHS + 2 if self.budget is None else self.budget.depth
        while self.position < len(tokens) and self.depth <= most:
            children = draft.children(self.node)
            hit = next((child for child in children if draft.tokens[child] == tokens[self.position]), -1)
            if self.budget is None:
                self._count_free(children, hit)
            else:
                self._count_timed(children, hit, self.budget.nodes / self.budget.depth)
            if hit < 0:
                return False
            self.node, self.depth, self.position = hit, self.depth + 1, self.position + 1
        return self.position >= len(tokens)

    def _count_free(self, children: list[int], hit: int) -> None:
        confidence, depth = self.draft.confidence, self.depth
        for child in children:
            self.rates.count(cell(None, depth), child == hit)
            if confidence is not None:
                self.rates.count(cell(confidence[child], depth), child == hit)

    def _count_timed(self, children: list[int], hit: int, width: float) -> None:
        is_first = bool(children) and hit == children[0]
        if self.on_first_choices and children:
            self.rates.count(cell(None, self.depth), is_first)
        if width > 1:  # a branch that ends before its depth counts as a miss, too
            self.rates.count_level(self.depth, width, hit >= 0)
        self.on_first_choices &= is_first


class AcceptanceModel:
    """Acceptance of every drafter, by class of temperature."""

    def __init__(self, traits: Mapping[str, DrafterTraits], tuning: ControllerTuning = ControllerTuning()) -> None:
        self.traits, self.tuning = traits, tuning
        self._rates: dict[tuple[str, float], AcceptanceRates] = {}

    def rates(self, drafter: str, temperature: float) -> AcceptanceRates:
        """Return the rates of a drafter at a temperature, made on first use."""
        key = drafter, temperature_power(temperature)
        if key not in self._rates:
            self._rates[key] = AcceptanceRates(self.traits.get(drafter, DrafterTraits()), key[1], self.tuning)
        return self._rates[key]
