"""Heads that draft several positions at once from one hidden state: Medusa, and blockwise parallel decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder, extend_chains, fill_chains
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.graph_draft import (
    build_trees_from_graph,
    build_uniform_tree,
    fill_chains_from_graph,
    supports_single_graph,
)
from foretell.draft.heads.sampling import TreeInProgress
from foretell.draft.heads.tree import MAX_WIDTH, FixedTree
from foretell.models.draft_heads import MedusaHead
from foretell.runner.heads.graph_draft import GraphMedusaDraft
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.ops import MedusaForwardOp
from foretell.runner.model_runner import ModelRunner
from foretell.runner.native.head_draft import NativeMedusa, native_for_head
from foretell.runner.native.head_prefill import PrefillRange
from foretell.types import Budget, Sequence


class MedusaDrafter(HeadDrafter):
    """A head for each draft position. It stores the hidden state of every position and drafts from the last one."""

    head: MedusaHead
    traits = replace(HeadDrafter.traits, prior_acceptance=0.5)

    def __init__(self, runner: ModelRunner, head: MedusaHead, pages: HeadPages, *settings: Any) -> None:
        super().__init__(runner, head, pages, *settings)
        native = None if self.is_split else native_for_head(head)
        self._native = None if native is None else NativeMedusa(native, head)
        assert pages.hidden_state_cache is not None, "Medusa heads store hidden states"
        self._graph = GraphMedusaDraft(head, pages.hidden_state_cache, MAX_WIDTH) if self.traits.single_graph else None

    def prefill(self, ranges: list[PrefillRange], slots: Tensor, states: Tensor) -> None:
        self.ops.store_hidden_states(slots, states)

    def draft_chains(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains = self.new_chains(budgets)
        depth = min(self.max_depth, max(budget.depth for budget in budgets))
        if self._graph is not None and all(supports_single_graph(seq, self.draft_temperature) for seq in seqs):
            fill_chains_from_graph(chains, self._graph, self.pages, seqs, depth)
            return chains
        if self._native is not None and self.all_greedy(seqs):
            fill_chains(chains, self._native.draft(self._last_hidden_states(seqs), depth))
            return chains
        logits = self._logits(seqs, depth, 1)
        for offset in range(depth):
            if not extend_chains(chains, self.sample(seqs, offset, logits[offset])):
                break
        return chains

    @property
    def max_depth(self) -> int:
        return self.head.config.heads

    def new_tree(self, seq: Sequence, budget: Budget) -> FixedTree:
        """Return a tree of fixed shape: the heads are independent of each other's tokens, so acceptance rates by rank
        say more than their confidence."""
        min_confidence = max(budget.min_probability, self.min_confidence)
        return FixedTree(self.rank_acceptance.best_shape(budget, self.max_depth, min_confidence))

    def draft_trees(self, growing: list[TreeInProgress]) -> None:
        if self._graph is not None:
            growing = build_trees_from_graph(
                growing, self._graph, self.pages, self.draft_temperature, build_uniform_tree
            )
        if growing:
            self._expand_by_level(growing)

    def _expand_by_level(self, growing: list[TreeInProgress]) -> None:
        logits = self._logits([each.seq for each in growing], self.max_depth, MAX_WIDTH)
        while live := [(row, each) for row, each in enumerate(growing) if each.tree.is_open]:
            rows = [[row] * len(each.tree.frontier) for row, each in live]
            self.child_sampler.expand([each for _, each in live], logits[live[0][1].tree.depth], rows)

    def _last_hidden_states(self, seqs: list[Sequence]) -> Tensor:
        """Return the target's hidden state of the position before the last, [sequences, width]."""
        return self.pages.hidden_states(torch.tensor(self.last_cached_slots(seqs), device=self.device))

    def _logits(self, seqs: list[Sequence], depth: int, top_k: int) -> Tensor:
        """Return logits [depth, sequences, outputs]; if all requests are greedy, only the `top_k` are needed."""
        if self._native is not None:
            return self._native.logits(self._last_hidden_states(seqs), depth)
        op = MedusaForwardOp(self.last_cached_slots(seqs), depth, top_k if self.all_greedy(seqs) else 0)
        return self.ops.run(op).logits.view(len(seqs), depth, -1).transpose(0, 1)
