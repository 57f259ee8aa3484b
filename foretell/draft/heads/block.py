"""Heads that draft a block of tokens in one forward from the target's hidden states: DFlash and DSpark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder, extend_chains, fill_chains
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.graph_draft import (
    build_dynamic_tree,
    build_trees_from_graph,
    build_uniform_tree,
    fill_chains_from_graph,
    supports_single_graph,
)
from foretell.draft.heads.sampling import TreeInProgress
from foretell.draft.heads.tree import MAX_WIDTH
from foretell.models.draft_heads import BlockHead
from foretell.runner.heads.graph_draft import GraphBlockDraft
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.ops import (
    BlockForwardOp,
    BlockForwardOutput,
    BlockLevelOp,
    BlockOps,
    HeadLogits,
    flatten_pages,
)
from foretell.runner.model_runner import ModelRunner
from foretell.runner.native.head_draft import NativeBlock, native_for_head
from foretell.runner.native.head_prefill import PrefillRange
from foretell.types import Budget, Sequence


class BlockDrafter(HeadDrafter):
    """A block head. At position p each of its layers stores KV of p's hidden state, and of the tokens up to p if the
    head looks back."""

    head: BlockHead
    traits = replace(HeadDrafter.traits, prior_acceptance=0.65)

    def __init__(self, runner: ModelRunner, head: BlockHead, pages: HeadPages, *settings: Any) -> None:
        super().__init__(runner, head, pages, *settings)
        native = native_for_head(head) if head.config.layer.window is None and not self.is_split else None
        self._native = (
            None if native is None else NativeBlock(native, head, pages.keys, pages.values, runner.pool.count)
        )
        if self._native is not None:
            self.use_native_prefill(self._native, runner.hidden_layers)
        self._graph = GraphBlockDraft(head, pages.keys, pages.values, MAX_WIDTH) if self.traits.single_graph else None

    @property
    def is_native(self) -> bool:
        return super().is_native and not self.head.config.look_back  # torch computes the token hints

    def read_hidden_states(self, ranges: list[PrefillRange]) -> None:
        if self.head.config.look_back and not self.is_split:
            ranges = self._with_token_hints(ranges)
        super().read_hidden_states(ranges)

    def _with_token_hints(self, ranges: list[PrefillRange]) -> list[PrefillRange]:
        """Append the token hints to the hidden states, for all ranges in one transfer and without a wait."""
        firsts = [max(0, each.start + 1 - self.head.config.look_back) for each in ranges]
        runs = [each.seq.tokens[first : each.stop] for first, each in zip(firsts, ranges, strict=True)]
        tokens = torch.tensor([token for run in runs for token in run])
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        completed = []
        for each, run in zip(ranges, torch.split(tokens, [len(run) for run in runs]), strict=True):
            hints = self.head.token_hints(run)[each.start - each.stop :]
            states = [torch.cat([torch.cat(each.states), hints], -1)]
            completed.append(PrefillRange(each.seq, each.start, each.stop, states))
        return completed

    def _previous_tokens(self, prefill_range: PrefillRange) -> list[list[int]]:
        """Return the token of each position and those before it, as many as the head looks back; -1 is none."""
        tokens, count = prefill_range.seq.tokens, self.head.config.look_back
        positions = range(prefill_range.start, prefill_range.stop)
        return [
            [tokens[position - back] if position >= back else -1 for back in range(count)] for position in positions
        ]

    def prefill(self, ranges: list[PrefillRange], slots: Tensor, states: Tensor) -> None:
        if isinstance(self.ops, BlockOps):  # not split over ranks
            positions = [position for each in ranges for position in range(each.start, each.stop)]
            self.ops.store_kv(slots, positions, self.head.fuse(states))
        else:
            self.ops.store_hidden_states(slots, states)
            tokens = [token for each in ranges for some in self._previous_tokens(each) for token in some]
            self.ops.run(replace(self.prefill_op(ranges, None), tokens=tokens))

    def draft_chains(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains = self.new_chains(budgets)
        depth = min(self.max_depth, max(budget.depth for budget in budgets))
        if self._graph is not None and all(supports_single_graph(seq, self.draft_temperature) for seq in seqs):
            fill_chains_from_graph(chains, self._graph, self.pages, seqs, depth)
            return chains
        if self._native is not None and len(seqs) <= self._native.max_sequences and self.all_greedy(seqs):
            fill_chains(chains, self._native.draft(self.native_request(seqs, chains)))
            return chains
        level = self._forward_blocks(seqs, chains, depth)
        tokens, top_k = [seq.tokens[-1] for seq in seqs], int(self.all_greedy(seqs))
        for offset in range(depth):
            output = level(BlockLevelOp(offset, list(range(len(seqs))), tokens, top_k, self.head.config.confidence))
            draft_tokens = self.sample(seqs, offset, output.logits)
            confidence: list[float] | None = None if output.confidence is None else output.confidence.sigmoid().tolist()
            if not extend_chains(chains, draft_tokens, confidence):
                break
            tokens = draft_tokens.tokens
        return chains

    @property
    def max_depth(self) -> int:
        return self.head.config.drafts

    def tree_width(self, budget: Budget) -> int | None:
        """Return the width of a tree: without a Markov head all nodes of a level have the same children, and to expand
        them costs nothing."""
        return None if self.head.config.markov_rank else budget.nodes

    def draft_trees(self, growing: list[TreeInProgress]) -> None:
        if self._graph is not None:
            build = build_dynamic_tree if self._graph.depends_on_tokens else build_uniform_tree
            growing = build_trees_from_graph(growing, self._graph, self.pages, self.draft_temperature, build)
        if growing:
            self._expand_by_level(growing)

    def _expand_by_level(self, growing: list[TreeInProgress]) -> None:
        seqs = [each.seq for each in growing]
        # Pages are reserved for the depth of each tree, which may be less than the head's longest draft.
        depths = [len(each.tree.max_frontier) + 1 for each in growing]
        level = self._forward_blocks(seqs, self.new_chains([Budget(depth) for depth in depths]), max(depths))
        top_k = MAX_WIDTH if self.all_greedy(seqs) else 0
        while live := [(row, each) for row, each in enumerate(growing) if each.tree.is_open]:
            owners, rows = self._level_rows(live)
            depth, previous = live[0][1].tree.depth, [token for _, token in owners]
            op = BlockLevelOp(depth, [row for row, _ in owners], previous, top_k, wants_confidence=False)
            self.child_sampler.expand([each for _, each in live], level(op).logits, rows)

    def _level_rows(self, live: list[tuple[int, TreeInProgress]]) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """Return the rows of a level, as sequence and previous token, and the rows of each tree's frontier nodes.

        The logits of a Markov head depend on the previous token, so there each node has a row of its own.
        """
        if not self.head.config.markov_rank:
            rows = [[i] * len(each.tree.frontier) for i, (_, each) in enumerate(live)]
            return [(row, each.seq.tokens[-1]) for row, each in live], rows
        owners = [(row, each.token(node)) for row, each in live for node in each.tree.frontier]
        ends = list(accumulate(len(each.tree.frontier) for _, each in live))
        rows = [list(range(end - len(each.tree.frontier), end)) for (_, each), end in zip(live, ends, strict=True)]
        return owners, rows

    def _forward_blocks(
        self, seqs: list[Sequence], chains: list[ChainBuilder], depth: int
    ) -> Callable[[BlockLevelOp], HeadLogits]:
        """Run a block after each sequence and return a function that gives the logits of a level."""
        if self._native is not None and len(seqs) <= self._native.max_sequences:
            states, scores = self._native.states(self.native_request(seqs, chains))
            return BlockForwardOutput(self.head, self.head.draft_states(states)[:, :depth], scores).level
        last = [len(seq.tokens) - 1 for seq in seqs]
        tokens = [seq.tokens[-1] for seq in seqs]
        self.ops.run(BlockForwardOp(tokens, last, depth, *flatten_pages([seq.pages for seq in seqs])))
        return self.ops.run
