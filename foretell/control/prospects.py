"""What each drafter could do for a text in the step to be planned."""

from __future__ import annotations

from collections.abc import Mapping

from foretell.types import Draft, Sequence

from .acceptance import WIDTHS
from .drafting import Drafting
from .lessons import Lessons
from .settings import ArmTraits, Settings
from .spending import Candidate, Market

UNTRIED = 4  # nodes of a drafter that has hardly been tried


class Prospects:
    """Free drafters show what they have; of others it is foretold, as chains and, where they make them, as trees."""

    def __init__(self, arms: Mapping[str, ArmTraits], settings: Settings, lessons: Lessons, drafting: Drafting) -> None:
        self.arms, self.settings, self.lessons, self.drafting = arms, settings, lessons, drafting
        self.acceptance = lessons.acceptance

    def of(self, market: Market, seq: Sequence, offered: Mapping[str, Draft]) -> list[Candidate]:
        found, cap, ledger = [], self.settings.cap(seq), self.lessons.ledger(seq)
        for arm in seq.request.drafters:
            if arm not in self.drafting.free:
                found.append(self._unseen(market, seq, arm, cap))
            elif arm in offered:
                found.append(Candidate(arm, self.acceptance.survival(ledger, arm, offered[arm].cut(cap))))
        return found

    def _unseen(self, market: Market, seq: Sequence, arm: str, cap: int) -> Candidate:
        ledger = self.lessons.ledger(seq)
        untried = self.acceptance.tried(ledger, arm) < UNTRIED
        longest = min(cap, UNTRIED) if untried else cap
        survival = self.acceptance.unseen(ledger, arm, longest)
        seconds = self.drafting.for_one(market, seq, arm, untried)
        most = self.settings.tree_cap(seq, market.writers) if self.arms[arm].grows and not untried else 0
        wide = [(i, nodes) for i, nodes in enumerate(WIDTHS) if nodes <= most]
        bushes = {nodes: self.acceptance.bushy(ledger, arm, min(longest, most // nodes), i) for i, nodes in wide}
        return Candidate(arm, survival, seconds, bushes)
