"""Plans with drafters that are asked before they guess: thought over every few looks, for little changes in between."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.types import Sequence

from .prospects import Prospects
from .rates import FAMILIAR, cell
from .spending import Market, Plan, best_plan

LOOKS = 4  # at a text for which one thought does, once its drafters are known


@dataclass(slots=True)
class _Thought:
    """A plan, what it was made for, and the looks it is still good for."""

    plan: Plan
    situation: tuple[int, int, bool]
    looks: int

    def does(self, situation: tuple[int, int, bool], most: int) -> bool:
        return self.looks > 0 and self.situation == situation and self.plan.depth <= most


class Foresight:
    """The best plan for each text with drafters that are asked."""

    def __init__(self, prospects: Prospects) -> None:
        self.prospects = prospects
        self._thoughts: dict[int, _Thought] = {}

    def plan(self, market: Market, seq: Sequence) -> Plan:
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
