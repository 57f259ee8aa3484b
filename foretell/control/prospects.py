"""What each drafter could do for a text in the step to be planned."""

from __future__ import annotations

from collections.abc import Container, Mapping

from foretell.types import Draft, Sequence

from .drafting import Drafting
from .lessons import Lessons
from .settings import ArmTraits, Settings
from .spending import Bushes, Candidate, Market
from .widths import WIDTHS

UNTRIED = 4  # nodes of a drafter that has hardly been tried


class Prospects:
    """Free drafters show what they have; of others it is foretold, as chains and, where they make them, as trees."""

    def __init__(self, arms: Mapping[str, ArmTraits], settings: Settings, lessons: Lessons, drafting: Drafting) -> None:
        self.arms, self.settings, self.lessons, self.drafting = arms, settings, lessons, drafting
        self.acceptance = lessons.acceptance

    def shown(self, seq: Sequence, offered: Mapping[str, Draft]) -> list[Candidate]:
        """What free drafters have for a text; others hear how sure they are."""
        cap, ledger, free = self.settings.cap(seq), self.lessons.ledger(seq), self.drafting.free
        found = [
            Candidate(arm, self.acceptance.survival(ledger, arm, offered[arm].cut(cap)))
            for arm in seq.request.drafters
            if arm in free and arm in offered
        ]
        if not free.isdisjoint(seq.request.drafters):
            self.lessons.look(seq, max((each.survival[0] for each in found if each.survival), default=0.0))
        return found

    def asked(self, seq: Sequence) -> list[str]:
        """Drafters of a text that take time."""
        return [arm for arm in seq.request.drafters if arm not in self.drafting.free]

    def foretold(self, market: Market, seq: Sequence, away: Container[str] = ()) -> list[Candidate]:
        """What those should have, but for who is away."""
        cap = self.settings.cap(seq)
        return [self._unseen(market, seq, arm, cap) for arm in self.asked(seq) if arm not in away]

    def _unseen(self, market: Market, seq: Sequence, arm: str, cap: int) -> Candidate:
        ledger = self.lessons.ledger(seq)
        untried = self.acceptance.tried(ledger, arm) < UNTRIED
        longest = min(cap, UNTRIED) if untried else cap
        survival = self.lessons.foretold(seq, arm, longest)
        seconds = self.drafting.for_one(market, seq, arm, untried)
        if untried or not self.arms[arm].grows:
            return Candidate(arm, survival, seconds)
        return Candidate(arm, survival, seconds, self._bushes(market, seq, arm, longest))

    def _bushes(self, market: Market, seq: Sequence, arm: str, longest: int) -> Bushes | None:
        most, ledger = self.settings.tree_cap(seq, market.writers), self.lessons.ledger(seq)
        widths = tuple(nodes for nodes in WIDTHS if nodes <= most)
        if not widths:
            return None

        def levels(wide: float) -> list[float]:
            return self.acceptance.bushy(ledger, arm, longest, wide)

        return Bushes(widths, most, levels, self.drafting.for_one(market, seq, arm, False, tree=True))
