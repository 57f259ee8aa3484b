"""Guesses several places at once from the target's last state: Medusa heads, and blockwise parallel decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder, extend, hang
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.graph_draft import chain_whole, goes_whole, grow_alike, grow_whole
from foretell.draft.heads.sampling import TreeInProgress
from foretell.draft.heads.tree import MOST_WIDE, FixedTree
from foretell.models.draft_heads import MedusaHead
from foretell.runner.heads.graph_draft import GraphMedusaDraft
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.ops import MedusaForwardOp
from foretell.runner.model_runner import ModelRunner
from foretell.runner.native.head_draft import NativeMedusa, native_for_head
from foretell.runner.native.head_prefill import PrefillRange
from foretell.types import Budget, Sequence


class MedusaDrafter(HeadDrafter):
    """Keeps the state of each place; only that of the last one that was run is ever guessed from."""

    head: MedusaHead
    prior = 0.5

    def __init__(self, runner: ModelRunner, head: MedusaHead, pages: HeadPages, *settings: Any) -> None:
        super().__init__(runner, head, pages, *settings)
        native = None if self.is_split else native_for_head(head)
        self._native = None if native is None else NativeMedusa(native, head)
        assert pages.state_cache is not None, "this head keeps features"
        self._whole = GraphMedusaDraft(head, pages.state_cache, MOST_WIDE) if self.whole else None

    def read(self, readings: list[PrefillRange], slots: Tensor, states: Tensor) -> None:
        self.work.store_hidden_states(slots, states)

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains, depth = self.chains(budgets), min(self.deepest, max(budget.depth for budget in budgets))
        if self._whole is not None and all(goes_whole(seq, self.draft_temperature) for seq in seqs):
            chain_whole(chains, self._whole, self.pages, seqs, depth)
            return chains
        if self._native is not None and self.is_greedy(seqs):
            hang(chains, self._native.draft(self._features(seqs), depth))
            return chains
        scores = self._scores(seqs, depth, 1)
        for offset in range(depth):
            if not extend(chains, self.draw(seqs, offset, scores[offset])):
                break
        return chains

    @property
    def deepest(self) -> int:
        return self.head.config.heads

    def plant(self, seq: Sequence, budget: Budget) -> FixedTree:
        """Heads know nothing of each other's choices, so how often each stood tells more than how sure they are."""
        return FixedTree(self.ranks.shape(budget, self.deepest, max(budget.min_probability, self.min_confidence)))

    def grow(self, plots: list[TreeInProgress]) -> None:
        if self._whole is not None:
            plots = grow_whole(plots, self._whole, self.pages, self.draft_temperature, grow_alike)
        if plots:
            self._grow_by_levels(plots)

    def _grow_by_levels(self, plots: list[TreeInProgress]) -> None:
        scores = self._scores([plot.seq for plot in plots], self.deepest, MOST_WIDE)
        while live := [(row, plot) for row, plot in enumerate(plots) if plot.tree.goes_on]:
            rows = [[row] * len(plot.tree.level) for row, plot in live]
            self.chooser.grow([plot for _, plot in live], scores[live[0][1].tree.depth], rows)

    def _features(self, seqs: list[Sequence]) -> Tensor:
        """The target's last states, [texts, width]."""
        return self.pages.hidden_states(torch.tensor(self.slots_before(seqs), device=self.device))

    def _scores(self, seqs: list[Sequence], depth: int, top: int) -> Tensor:
        """[depth, texts, outputs]; where nothing is drawn, no more than `top` tokens of each are looked at."""
        if self._native is not None:
            return self._native.logits(self._features(seqs), depth)
        job = MedusaForwardOp(self.slots_before(seqs), depth, top if self.is_greedy(seqs) else 0)
        return self.work.run(job).logits.view(len(seqs), depth, -1).transpose(0, 1)
