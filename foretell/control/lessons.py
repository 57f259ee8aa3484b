"""What a step's guesses teach: the free ones whether they are used or not, the paid ones when they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from foretell.types import Draft, Outcome, Sequence

from .acceptance import Acceptance, Guess, Ledger
from .rates import cell


class Lessons:
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

    def ledger(self, seq: Sequence) -> Ledger:
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
            self.acceptance.note(self.ledger(seq), Guess(arm, draft, len(seq.tokens)))

    def likeliest(self, seq: Sequence, arms: list[str], offered: Mapping[str, Draft], nodes: int) -> str:
        """Of several drafters the one most of whose guesses should stand; nobody where all have nothing to show."""
        if len(seq.request.drafters) == 1:
            return arms[0] if arms else ""
        ledger, worth = self.ledger(seq), {"": 0.0}
        for arm in arms:
            if self.is_paid(arm):
                worth[arm] = sum(self.foretold(seq, arm, nodes, hopeful=False))
            elif arm in offered:
                worth[arm] = sum(self.acceptance.survival(ledger, arm, offered[arm].cut(nodes)))
        return max(worth, key=worth.__getitem__)

    def observe(self, outcome: Outcome) -> None:
        """What came of a text's step."""
        share, arm = outcome.share, outcome.share.budget.drafter
        expected = self._expected.pop(share.seq.id, None)
        ledger = self.acceptance.known(share.seq.id)
        if ledger is None:
            return
        if share.budget.nodes and outcome.draft.source in (arm, ""):
            if self.is_paid(arm):
                self._observe_paid(ledger, arm, outcome)
            elif expected is not None:
                hoped = sum(expected[: len(outcome.draft)])
                self.acceptance.honesty(ledger, arm).count(hoped, outcome.accepted)
        self.acceptance.learn(ledger, share.seq.tokens)

    def _observe_paid(self, ledger: Ledger, arm: str, outcome: Outcome) -> None:
        if not len(outcome.draft):  # paid for, and nothing came of it
            self.acceptance.rates(ledger, arm).count(cell(None, 1), False)
            return
        share, beside = outcome.share, self._beside.get(outcome.share.seq.id)
        guess = Guess(arm, outcome.draft, share.length, budget=share.budget, beside=beside)
        self.acceptance.note(ledger, guess)
        if outcome.accepted:
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
