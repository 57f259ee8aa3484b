"""What each drafter could do for a text in the step to be planned."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from foretell.control.acceptance_model import FAMILIAR, WIDTHS, cell
from foretell.control.acceptance_tracker import AcceptanceObserver
from foretell.control.draft_latency import Drafting
from foretell.control.length_optimizer import DrafterOption, DraftPlan, StepCostView, TreeOptions, best_plan
from foretell.control.settings import ControllerSettings
from foretell.types import Draft, DrafterTraits, Sequence

UNTRIED = 4  # nodes of a drafter that has hardly been tried


class DrafterOptions:
    """Free drafters show what they have; of others it is foretold, as chains and, where they make them, as trees."""

    def __init__(
        self,
        arms: Mapping[str, DrafterTraits],
        settings: ControllerSettings,
        lessons: AcceptanceObserver,
        drafting: Drafting,
    ) -> None:
        self.arms, self.settings, self.lessons, self.drafting = arms, settings, lessons, drafting
        self.acceptance = lessons.acceptance

    def shown(self, seq: Sequence, offered: Mapping[str, Draft]) -> list[DrafterOption]:
        """What free drafters have for a text; others hear how sure they are."""
        cap, ledger, free = self.settings.cap(seq), self.lessons.ledger(seq), self.drafting.free
        found = [
            DrafterOption(arm, self.acceptance.survival(ledger, arm, offered[arm].truncate(cap)))
            for arm in seq.request.drafters
            if arm in free and arm in offered
        ]
        if not free.isdisjoint(seq.request.drafters):
            self.lessons.look(seq, max((each.survival[0] for each in found if each.survival), default=0.0))
        return found

    def asked(self, seq: Sequence) -> list[str]:
        """Drafters of a text that take time."""
        return [arm for arm in seq.request.drafters if arm not in self.drafting.free]

    def foretold(self, market: StepCostView, seq: Sequence, away: Container[str] = ()) -> list[DrafterOption]:
        """What those should have, but for who is away."""
        cap = self.settings.cap(seq)
        return [self._unseen(market, seq, arm, cap) for arm in self.asked(seq) if arm not in away]

    def _unseen(self, market: StepCostView, seq: Sequence, arm: str, cap: int) -> DrafterOption:
        ledger = self.lessons.ledger(seq)
        untried = self.acceptance.tried(ledger, arm) < UNTRIED
        longest = min(cap, UNTRIED) if untried else cap
        survival = self.lessons.foretold(seq, arm, longest)
        seconds = self.drafting.for_one(market, seq, arm, untried)
        if untried or not self.arms[arm].makes_trees:
            return DrafterOption(arm, survival, seconds)
        return DrafterOption(arm, survival, seconds, self._bushes(market, seq, arm, longest))

    def _bushes(self, market: StepCostView, seq: Sequence, arm: str, longest: int) -> TreeOptions | None:
        most, ledger = self.settings.tree_cap(seq, market.writers), self.lessons.ledger(seq)
        widths = tuple(nodes for nodes in WIDTHS if nodes <= most)
        if not widths:
            return None

        def levels(wide: float) -> list[float]:
            return self.acceptance.bushy(ledger, arm, longest, wide)

        return TreeOptions(widths, most, levels, self.drafting.for_one(market, seq, arm, False, tree=True))


LOOKS = 4  # at a text for which one thought does, once its drafters are known


@dataclass(slots=True)
class _Thought:
    """A plan, what it was made for, and the looks it is still good for."""

    plan: DraftPlan
    situation: tuple[int, int, bool]
    looks: int

    def does(self, situation: tuple[int, int, bool], most: int) -> bool:
        return self.looks > 0 and self.situation == situation and self.plan.depth <= most


class PlanCache:
    """The best plan for each text with drafters that are asked."""

    def __init__(self, prospects: DrafterOptions) -> None:
        self.prospects = prospects
        self._thoughts: dict[int, _Thought] = {}

    def plan(self, market: StepCostView, seq: Sequence) -> DraftPlan:
        """Thought over anew where there are more or fewer texts, a prompt wants the rows that would fill a step up,
        others are more or less sure, or the text's end is near."""
        situation = (market.writers, cell(self.prospects.lessons.beside(seq), 1), bool(market.sizes))
        thought = self._thoughts.get(seq.id)
        if thought is not None and thought.does(situation, self.prospects.settings.cap(seq)):
            thought.looks -= 1
            return thought.plan
        plan = best_plan(market, self.prospects.foretold(market, seq), self.prospects.settings.margin)
        self._thoughts[seq.id] = _Thought(plan, situation, LOOKS - 1 if self._knows_all(seq) else 0)
        return plan

    def _knows_all(self, seq: Sequence) -> bool:
        """What is new is thought over at every look: each lesson changes much."""
        acceptance, ledger = self.prospects.acceptance, self.prospects.lessons.ledger(seq)
        return all(acceptance.tried(ledger, arm) >= FAMILIAR for arm in self.prospects.asked(seq))

    def forget(self, seq_id: int) -> None:
        self._thoughts.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._thoughts)
