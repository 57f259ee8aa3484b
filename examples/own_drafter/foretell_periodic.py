"""A drafter for outputs that repeat with a fixed period, such as tables: drafts the tokens of one period earlier."""

from __future__ import annotations

from foretell.draft import DrafterParts
from foretell.draft.base import Drafter
from foretell.types import Budget, Draft, DrafterTraits, Sequence


class PeriodicDrafter(Drafter):
    """Drafts the tokens of one period earlier. It keeps no state."""

    traits = DrafterTraits(is_free=True)  # a draft costs next to nothing: the controller may see it before it decides

    def __init__(self, period: int) -> None:
        self.period, self.name = period, f"periodic:{period}"

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._draft(seq.tokens, budget.nodes) for seq, budget in zip(seqs, budgets, strict=True)]

    def _draft(self, tokens: list[int], nodes: int) -> Draft:
        if len(tokens) < self.period:
            return Draft()
        earlier = tokens[-self.period :]
        return Draft.chain([earlier[i % self.period] for i in range(nodes)], self.name)


def make(parts: DrafterParts, argument: str) -> Drafter:
    """Build the drafter of `--drafter periodic:12`; `parts` has the target's runner, its tokenizer and the config."""
    return PeriodicDrafter(int(argument))
