"""How likely a guess is to stand: counted as guesses are found out, whoever's turn it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from foretell.control.acceptance_model import (
    DEPTHS,
    DOUBTS,
    DRAFTER,
    HEATS,
    KIND,
    REQUEST,
    AcceptancePrior,
    AcceptanceRates,
    cell,
)
from foretell.types import Budget, Draft, Sequence, StepResult

HONEST, STEADY = 20.0, 0.995  # guesses it takes to doubt the rates, and how fast those are forgotten


@dataclass(slots=True)
class OpenDraft:
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

    def follow(self, tokens: list[int], rates: AcceptanceRates) -> bool:
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

    def _follow_plan(self, tokens: list[int], rates: AcceptanceRates, budget: Budget) -> bool:
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


class Calibration:
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
class RequestAcceptance:
    """What one request has taught: rates of each drafter, and the guesses still open.

    `looked_up` keeps rates between two lessons: a draft has many nodes and few cells.
    """

    kind: str
    rates: dict[str, AcceptanceRates] = field(default_factory=dict)
    open: list[OpenDraft] = field(default_factory=list)
    looked_up: dict[str, dict[int, float]] = field(default_factory=dict)


class Acceptance:
    """Rates of every drafter: of the request, over those of its kind of request, over all."""

    def __init__(self, beliefs: Mapping[str, AcceptancePrior] | None = None) -> None:
        """`beliefs`: what is believed of each drafter before it ever guessed."""
        self._beliefs = beliefs or {}
        self._honesty: dict[tuple[str, str], Calibration] = {}
        self._drafters: dict[tuple[str, str], AcceptanceRates] = {}  # by how freely tokens are drawn
        self._kinds: dict[tuple[str, str], AcceptanceRates] = {}
        self._ledgers: dict[int, RequestAcceptance] = {}

    def known(self, seq_id: int) -> RequestAcceptance | None:
        """A request's ledger, if it has one."""
        return self._ledgers.get(seq_id)

    def ledger(self, seq_id: int, kind: str) -> RequestAcceptance:
        if seq_id not in self._ledgers:
            self._ledgers[seq_id] = RequestAcceptance(kind)
        return self._ledgers[seq_id]

    def tried(self, ledger: RequestAcceptance, arm: str) -> float:
        """How many first guesses of a drafter were found out, in this kind of request."""
        above = self.rates(ledger, arm).above
        return 0.0 if above is None else above.tried[cell(None, 1)]

    def rates(self, ledger: RequestAcceptance, arm: str) -> AcceptanceRates:
        """A request's own rates for a drafter."""
        found = ledger.rates.get(arm)
        if found is None:
            kind = self._kinds.get((arm, ledger.kind))
            if kind is None:
                kind = self._kinds[arm, ledger.kind] = AcceptanceRates(self._whole(arm, heat_of(ledger.kind)), KIND)
            found = ledger.rates[arm] = AcceptanceRates(kind, REQUEST)
        return found

    def _whole(self, arm: str, heat: str) -> AcceptanceRates:
        """A drafter's record where tokens are drawn so freely; what stands where none is tells little of it."""
        if (arm, heat) not in self._drafters:
            self._drafters[arm, heat] = AcceptanceRates(None, DRAFTER, self._belief(arm, heat))
        return self._drafters[arm, heat]

    def _belief(self, arm: str, heat: str) -> AcceptancePrior:
        return replace(self._beliefs.get(arm, AcceptancePrior()), power=HEATS.get(heat, 1.0))

    def honesty(self, ledger: RequestAcceptance, arm: str) -> Calibration:
        """Of a drafter in this kind of request."""
        found = self._honesty.get((arm, ledger.kind))
        if found is None:
            found = self._honesty[arm, ledger.kind] = Calibration()
        return found

    def survival(self, ledger: RequestAcceptance, arm: str, draft: Draft) -> list[float]:
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
        self, ledger: RequestAcceptance, arm: str, depth: int, hopeful: bool = True, beside: float | None = None
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

    def bushy(self, ledger: RequestAcceptance, arm: str, depth: int, wide: float) -> list[float]:
        """For each level of a tree that is not drafted yet how likely any of its nodes is to stand, `wide` a level."""
        rates, whole = self.rates(ledger, arm), 1.0
        found: list[float] = []
        for at in range(1, depth + 1):
            if at <= DEPTHS:
                stands = rates.level(rates.hope(cell(None, at), DOUBTS), at, wide)
            whole *= stands
            found.append(whole)
        return found

    def note(self, ledger: RequestAcceptance, guess: OpenDraft) -> None:
        """A drafter has guessed how a text goes on."""
        ledger.open.append(guess)

    def learn(self, ledger: RequestAcceptance, tokens: list[int]) -> None:
        """The text has grown: find out the open guesses."""
        ledger.looked_up.clear()
        ledger.open = [guess for guess in ledger.open if not guess.follow(tokens, self.rates(ledger, guess.arm))]

    def first_rate(self, arm: str, kind: str) -> float:
        """How often a drafter's first guess stands, in all requests that draw as freely as this kind."""
        rates = self._drafters.get((arm, heat_of(kind)))
        return self._belief(arm, heat_of(kind)).first if rates is None else rates.rate(cell(None, 1))

    def forget(self, seq_id: int) -> None:
        ledger = self._ledgers.pop(seq_id, None)
        for rates in ledger.rates.values() if ledger else ():
            rates.tell()


def heat_of(kind: str) -> str:
    """How freely requests of a kind draw: one of HEATS."""
    return kind.partition(",")[0]


class AcceptanceObserver:
    """Keeps the records of acceptance; `is_paid` tells drafters that take time, `stood` hears of a guess that did."""

    def __init__(
        self, acceptance: Acceptance, is_paid: Callable[[str], bool], stood: Callable[[str], None] = lambda arm: None
    ) -> None:
        self.acceptance, self.is_paid, self.stood = acceptance, is_paid, stood
        self._expected: dict[int, tuple[float, ...]] = {}  # by sequence: how likely the nodes of this step are to stand
        self._beside: dict[int, float] = {}  # by sequence: how sure free drafters are in this step

    def begin(self) -> None:
        """A step begins."""
        self._expected.clear()
        self._beside.clear()

    def look(self, seq: Sequence, likeliest: float) -> None:
        """Free drafters have shown what they would guess: so likely is the best of them to stand, 0 where none is."""
        self._beside[seq.id] = likeliest

    def beside(self, seq: Sequence) -> float | None:
        """What `look` was told in this step; None where a text has no free drafters."""
        return self._beside.get(seq.id)

    def foretold(self, seq: Sequence, arm: str, depth: int, hopeful: bool = True) -> list[float]:
        """How likely the nodes of a chain are to stand that a drafter has not made yet."""
        return self.acceptance.unseen(self.ledger(seq), arm, depth, hopeful, self._beside.get(seq.id))

    def ledger(self, seq: Sequence) -> RequestAcceptance:
        return self.acceptance.known(seq.id) or self.acceptance.ledger(seq.id, kind_of(seq))

    def find_out(self, seq: Sequence) -> None:
        """What the text says of guesses that were open when it was last looked at."""
        ledger = self.acceptance.known(seq.id)
        if ledger is not None and ledger.open:
            self.acceptance.learn(ledger, seq.tokens)

    def expect(self, seq: Sequence, survival: tuple[float, ...]) -> None:
        """So likely are the nodes to stand that are to be drafted; nothing is expected of a trial."""
        self._expected[seq.id] = survival

    def note_offers(self, seq: Sequence, offered: Mapping[str, Draft]) -> None:
        """Free guesses are found out by the text whether they are used or not."""
        for arm, draft in offered.items():
            self.acceptance.note(self.ledger(seq), OpenDraft(arm, draft, len(seq.tokens)))

    def likeliest(self, seq: Sequence, arms: list[str], offered: Mapping[str, Draft], nodes: int) -> str:
        """Of several drafters the one most of whose guesses should stand; nobody where all have nothing to show."""
        if len(seq.request.drafters) == 1:
            return arms[0] if arms else ""
        ledger, worth = self.ledger(seq), {"": 0.0}
        for arm in arms:
            if self.is_paid(arm):
                worth[arm] = sum(self.foretold(seq, arm, nodes, hopeful=False))
            elif arm in offered:
                worth[arm] = sum(self.acceptance.survival(ledger, arm, offered[arm].truncate(nodes)))
        return max(worth, key=worth.__getitem__)

    def observe(self, outcome: StepResult) -> None:
        """What came of a text's step."""
        share, arm = outcome.scheduled, outcome.scheduled.budget.drafter
        expected = self._expected.pop(share.seq.id, None)
        ledger = self.acceptance.known(share.seq.id)
        if ledger is None:
            return
        if share.budget.nodes and outcome.draft.source in (arm, ""):
            if self.is_paid(arm):
                self._observe_paid(ledger, arm, outcome)
            elif expected is not None:
                hoped = sum(expected[: len(outcome.draft)])
                self.acceptance.honesty(ledger, arm).count(hoped, outcome.num_accepted)
        self.acceptance.learn(ledger, share.seq.tokens)

    def _observe_paid(self, ledger: RequestAcceptance, arm: str, outcome: StepResult) -> None:
        if not len(outcome.draft):  # paid for, and nothing came of it
            self.acceptance.rates(ledger, arm).count(cell(None, 1), False)
            return
        share, beside = outcome.scheduled, self._beside.get(outcome.scheduled.seq.id)
        guess = OpenDraft(arm, outcome.draft, share.length, budget=share.budget, beside=beside)
        self.acceptance.note(ledger, guess)
        if outcome.num_accepted:
            self.stood(arm)

    def forget(self, seq: Sequence) -> None:
        self.find_out(seq)
        self.acceptance.forget(seq.id)
        self._expected.pop(seq.id, None)
        self._beside.pop(seq.id, None)


def kind_of(seq: Sequence) -> str:
    """Requests of one kind share what was learnt: how freely they sample, and whether a grammar binds them."""
    params = seq.request.params
    heat = "greedy" if params.temperature == 0 else "cool" if params.temperature <= 0.8 else "warm"
    return f"{heat}, grammar" if params.structured_outputs is not None else heat
