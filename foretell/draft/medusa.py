"""Guesses several places at once from the target's last state: Medusa heads, and blockwise parallel decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.models.heads import MedusaHead
from foretell.types import Budget, Sequence

from .heads import Chain, HeadDrafter, Reading, extend


class MedusaDrafter(HeadDrafter):
    """Keeps the state of each place; only that of the last one that was run is ever guessed from."""

    head: MedusaHead
    prior = 0.5

    def read(self, readings: list[Reading], slots: Tensor, states: Tensor) -> None:
        self.pages.put_features(slots, states)

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Chain]:
        chains = self.chains(budgets)
        depth = min(self.head.config.heads, max(budget.nodes for budget in budgets))
        slots = [self.pages.slots(seq, len(seq.tokens) - 2, len(seq.tokens) - 1)[0] for seq in seqs]
        features = self.pages.features(torch.tensor(slots, device=self.device))
        scores = self.head.logits(self.head(features, depth))
        for offset in range(depth):
            if not extend(chains, self.draw(seqs, offset, scores[:, offset])):
                break
        return chains
