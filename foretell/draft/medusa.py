"""Guesses several places at once from the target's last state: Medusa heads, and blockwise parallel decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretell.models.heads import MedusaHead
from foretell.runner.native_head import native_for_head
from foretell.runner.native_medusa import NativeMedusa
from foretell.runner.native_reading import Reading
from foretell.runner.runner import ModelRunner
from foretell.types import Budget, Sequence

from .heads import Chain, HeadDrafter, extend, hang
from .heads_pages import HeadPages


class MedusaDrafter(HeadDrafter):
    """Keeps the state of each place; only that of the last one that was run is ever guessed from."""

    head: MedusaHead
    prior = 0.5

    def __init__(self, runner: ModelRunner, head: MedusaHead, pages: HeadPages, *settings: Any) -> None:
        super().__init__(runner, head, pages, *settings)
        native = native_for_head(head)
        self._native = None if native is None else NativeMedusa(native, head)

    def read(self, readings: list[Reading], slots: Tensor, states: Tensor) -> None:
        self.pages.put_features(slots, states)

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Chain]:
        chains = self.chains(budgets)
        depth = min(self.head.config.heads, max(budget.nodes for budget in budgets))
        slots = [self.pages.slots(seq, len(seq.tokens) - 2, len(seq.tokens) - 1)[0] for seq in seqs]
        features = self.pages.features(torch.tensor(slots, device=self.device))
        if self._native is not None and self.is_greedy(seqs):
            hang(chains, self._native.guess(features, depth))
            return chains
        if self._native is not None:
            scores = self._native.logits(features, depth)
        else:
            scores = self.head.logits(self.head(features, depth)).transpose(0, 1)
        for offset in range(depth):
            if not extend(chains, self.draw(seqs, offset, scores[offset])):
                break
        return chains
