"""How likely a guess is to stand: counted as guesses are found out, whoever's turn it was."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foretell.types import Budget, Draft

from .widths import LEAST, WIDTHS, about, rescue

LEVELS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)  # a drafter's own confidence, in steps; the lowest is "says nothing"
MIDDLES = (0.1, 0.3, 0.5, 0.7, 0.87, 0.97)  # of these steps
TRUST = 0.7  # how far a drafter's own confidence is believed before it was compared with the text
ALIKE = (
    0.2  # and how far others' confidence tells of one that has not guessed yet: what is easy for them is easy for it
)
# Where tokens are drawn, what is likeliest is not always taken: a chance of p is believed to be p to this power.
HEATS = {"greedy": 1.0, "cool": 1.5, "warm": 3.0}
DEPTHS = 3  # the first guess, the second, and those behind
UNSEEN = len(LEVELS)  # the row for guesses whose confidence is not known yet
TREE = UNSEEN + 1  # the first of a row for each width of trees: what they bring beyond what is believed of them
CELLS = (TREE + len(WIDTHS)) * DEPTHS
PRIOR = 0.5  # of a drafter nobody has seen
DOUBTS = 16.0  # of trees: to hope for much at every level would be to begin with the deepest
FAMILIAR = 64.0  # guesses after which what a drafter has done is what it will do
HONEST, STEADY = 20.0, 0.995  # guesses it takes to doubt the rates, and how fast those are forgotten

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
class Belief:
    """What is believed of a drafter before anything was counted: how often a guess stands where nothing is drawn, how
    far confidence is trusted, and to which power of it a chance shrinks."""

    prior: float = PRIOR
    trust: float = TRUST
    power: float = 1.0

    @property
    def first(self) -> float:
        """How often a guess stands."""
        return float(self.prior**self.power)

    def at(self, row: int, known: float) -> float:
        """The same for a row of confidence; `known` is how often guesses stand."""
        return float(self.trust * MIDDLES[row] ** self.power + (1 - self.trust) * known)


class Rates:
    """How often guesses stood whose forerunners stood, by cell; what is not known yet is taken from `above`."""

    __slots__ = ("above", "fade", "belief", "tried", "stood", "weight", "_believed", "_line")

    def __init__(self, above: Rates | None, fading: tuple[float, float], belief: Belief = Belief()) -> None:
        """`belief` is for where nothing is above."""
        self.above, (self.fade, self.weight), self.belief = above, fading, belief
        self.tried = [0.0] * CELLS
        self.stood = [0.0] * CELLS
        self._believed: dict[int, float] = {}  # what untried cells are believed to be, until something is counted
        self._line: tuple[Rates, ...] = () if above is None else (*above._line, above)  # all above, the top first

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
        rates: Rates | None = self
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
        rates: Rates | None = self
        while rates is not None:
            rates.tried[at] = rates.tried[at] * rates.fade + weight
            rates.stood[at] = rates.stood[at] * rates.fade + right
            rates = rates.above


@dataclass(slots=True)
class Guess:
    """A draft that is not found out yet: the node the text has followed it to, and where that was.

    Of a drafter that is asked before it guesses `budget` is what it was given: of that one's chains the first choices
    are counted, and of its trees whether a level stands at all. `beside` is how sure others were meanwhile.
    """

    arm: str
    draft: Draft
    at: int  # of the text's tokens, the one that decides next
    node: int = -1
    depth: int = 1
    budget: Budget | None = None
    first: bool = True  # whether it is the first choice of each level that has stood so far
    beside: float | None = None

    def follow(self, tokens: list[int], rates: Rates) -> bool:
        """Count what the text says by now; True when there is nothing left to learn."""
        if self.budget is not None:
            return self._follow_plan(tokens, rates, self.budget)
        draft = self.draft
        guessed, parents, sure = draft.tokens, draft.parents, draft.confidence
        node, depth, at, nodes = self.node, self.depth, self.at, len(parents)
        for token in tokens[at:] if at < len(tokens) else ():
            hit, whoever = -1, cell(None, depth)
            for child in range(node + 1, nodes):  # parents come first
                if parents[child] == node:
                    stood = guessed[child] == token
                    rates.count(whoever, stood, -1 if sure is None else cell(sure[child], depth))
                    hit = child if stood else hit
            if hit < 0:
                return True
            node, depth = hit, depth + 1
        self.node, self.depth, self.at = node, depth, len(tokens)
        return False

    def _follow_plan(self, tokens: list[int], rates: Rates, budget: Budget) -> bool:
        wide, draft = budget.nodes / budget.depth, self.draft
        while self.at < len(tokens) and self.depth <= budget.depth:
            children, token = draft.children(self.node), tokens[self.at]
            hit = next((child for child in children if draft.tokens[child] == token), -1)
            if self.first and children:
                beside = -1 if self.beside is None else cell(self.beside, self.depth)
                rates.count(cell(None, self.depth), hit == children[0], beside)
            if wide > 1:  # where a branch ends before its time, the level has fallen, too
                rates.count_level(self.depth, wide, hit >= 0)
            if hit < 0:
                return True
            self.first &= hit == children[0]
            self.node, self.depth, self.at = hit, self.depth + 1, self.at + 1
        return self.depth > budget.depth


class Honesty:
    """How many guesses stood of those that should have: where luck runs out when it is counted on, this falls."""

    def __init__(self) -> None:
        self.expected = self.stood = HONEST

    @property
    def factor(self) -> float:
        return min(1.0, self.stood / self.expected)

    def count(self, expected: float, stood: int) -> None:
        self.expected = HONEST + (self.expected - HONEST) * STEADY + expected
        self.stood = HONEST + (self.stood - HONEST) * STEADY + stood


@dataclass
class Ledger:
    """What one request has taught: rates of each drafter, and the guesses still open.

    `looked_up` keeps rates between two lessons: a draft has many nodes and few cells.
    """

    kind: str
    rates: dict[str, Rates] = field(default_factory=dict)
    open: list[Guess] = field(default_factory=list)
    looked_up: dict[str, dict[int, float]] = field(default_factory=dict)


class Acceptance:
    """Rates of every drafter: of the request, over those of its kind of request, over all."""

    def __init__(self, beliefs: Mapping[str, Belief] | None = None) -> None:
        """`beliefs`: what is believed of each drafter before it ever guessed."""
        self._beliefs = beliefs or {}
        self._honesty: dict[tuple[str, str], Honesty] = {}
        self._drafters: dict[tuple[str, str], Rates] = {}  # by how freely tokens are drawn
        self._kinds: dict[tuple[str, str], Rates] = {}
        self._ledgers: dict[int, Ledger] = {}

    def known(self, seq_id: int) -> Ledger | None:
        """A request's ledger, if it has one."""
        return self._ledgers.get(seq_id)

    def ledger(self, seq_id: int, kind: str) -> Ledger:
        if seq_id not in self._ledgers:
            self._ledgers[seq_id] = Ledger(kind)
        return self._ledgers[seq_id]

    def tried(self, ledger: Ledger, arm: str) -> float:
        """How many first guesses of a drafter were found out, in this kind of request."""
        above = self.rates(ledger, arm).above
        return 0.0 if above is None else above.tried[cell(None, 1)]

    def rates(self, ledger: Ledger, arm: str) -> Rates:
        """A request's own rates for a drafter."""
        found = ledger.rates.get(arm)
        if found is None:
            kind = self._kinds.get((arm, ledger.kind))
            if kind is None:
                kind = self._kinds[arm, ledger.kind] = Rates(self._whole(arm, heat_of(ledger.kind)), KIND)
            found = ledger.rates[arm] = Rates(kind, REQUEST)
        return found

    def _whole(self, arm: str, heat: str) -> Rates:
        """A drafter's record where tokens are drawn so freely; what stands where none is tells little of it."""
        if (arm, heat) not in self._drafters:
            self._drafters[arm, heat] = Rates(None, DRAFTER, self._belief(arm, heat))
        return self._drafters[arm, heat]

    def _belief(self, arm: str, heat: str) -> Belief:
        return replace(self._beliefs.get(arm, Belief()), power=HEATS.get(heat, 1.0))

    def honesty(self, ledger: Ledger, arm: str) -> Honesty:
        """Of a drafter in this kind of request."""
        found = self._honesty.get((arm, ledger.kind))
        if found is None:
            found = self._honesty[arm, ledger.kind] = Honesty()
        return found

    def survival(self, ledger: Ledger, arm: str, draft: Draft) -> list[float]:
        """For each node how likely it is to enter the text."""
        rates, sure = self.rates(ledger, arm), draft.confidence
        known = ledger.looked_up.get(arm)
        if known is None:
            known = ledger.looked_up[arm] = {}
        honest = self.honesty(ledger, arm).factor
        found: list[float] = []
        depths: list[int] = []
        for node, parent in enumerate(draft.parents):
            depth, before = (depths[parent] + 1, found[parent]) if parent >= 0 else (1, honest)
            depths.append(depth)
            at = cell(None if sure is None else sure[node], depth)
            stands = known.get(at)
            if stands is None:
                stands = known[at] = rates.rate(at)
            found.append(before * stands)
        return found

    def unseen(
        self, ledger: Ledger, arm: str, depth: int, hopeful: bool = True, beside: float | None = None
    ) -> list[float]:
        """The same for a chain that is not drafted yet; in hope, because it must be tried to be known.

        `beside`: how likely the best guess of others is to stand, 0 where they have none; None: there are no others.
        """
        rates, whole = self.rates(ledger, arm), 1.0
        found: list[float] = []
        for at in range(1, depth + 1):
            if at <= DEPTHS:
                here = cell(beside, at)
                stands = rates.hope(here) if hopeful else rates.rate(here)
            whole *= stands
            found.append(whole)
        return found

    def bushy(self, ledger: Ledger, arm: str, depth: int, wide: float) -> list[float]:
        """For each level of a tree that is not drafted yet how likely any of its nodes is to stand, `wide` a level."""
        rates, whole = self.rates(ledger, arm), 1.0
        found: list[float] = []
        for at in range(1, depth + 1):
            if at <= DEPTHS:
                stands = rates.level(rates.hope(cell(None, at), DOUBTS), at, wide)
            whole *= stands
            found.append(whole)
        return found

    def note(self, ledger: Ledger, guess: Guess) -> None:
        """A drafter has guessed how a text goes on."""
        ledger.open.append(guess)

    def learn(self, ledger: Ledger, tokens: list[int]) -> None:
        """The text has grown: find out the open guesses."""
        ledger.looked_up.clear()
        ledger.open = [guess for guess in ledger.open if not guess.follow(tokens, self.rates(ledger, guess.arm))]

    def first_rate(self, arm: str, kind: str) -> float:
        """How often a drafter's first guess stands, in all requests that draw as freely as this kind."""
        rates = self._drafters.get((arm, heat_of(kind)))
        return self._belief(arm, heat_of(kind)).first if rates is None else rates.rate(cell(None, 1))

    def forget(self, seq_id: int) -> None:
        self._ledgers.pop(seq_id, None)


def heat_of(kind: str) -> str:
    """How freely requests of a kind draw: one of HEATS."""
    return kind.partition(",")[0]
