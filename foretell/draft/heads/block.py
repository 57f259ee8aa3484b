"""Guesses a block of tokens in one pass from the target's states: DFlash and DSpark heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder, extend, hang
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.graph_draft import chain_whole, goes_whole, grow_alike, grow_from, grow_whole
from foretell.draft.heads.sampling import TreeInProgress
from foretell.draft.heads.tree import MOST_WIDE, EagleTree, FixedTree
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
    """At place p it keeps keys and values of p's own feature, and of the tokens up to p where the head looks back, in
    each of its layers."""

    head: BlockHead
    prior = 0.65

    def __init__(self, runner: ModelRunner, head: BlockHead, pages: HeadPages, *settings: Any) -> None:
        super().__init__(runner, head, pages, *settings)
        native = native_for_head(head) if head.config.layer.window is None and not self.is_split else None
        places = (pages.keys, pages.values, runner.pool.count)
        self._native = None if native is None else NativeBlock(native, head, *places)
        if self._native is not None:
            self.read_natively(self._native, runner.hidden_layers)
        self._whole = GraphBlockDraft(head, pages.keys, pages.values, MOST_WIDE) if self.whole else None

    @property
    def by_library(self) -> bool:
        return super().by_library and not self.head.config.look_back  # what is known beside states is torch's to make

    def _read(self, readings: list[PrefillRange]) -> None:
        if self.head.config.look_back and not self.is_split:
            readings = self._completed(readings)
        super()._read(readings)

    def _completed(self, readings: list[PrefillRange]) -> list[PrefillRange]:
        """With what is known beside the target's states; of all of them at once, and without a wait."""
        firsts = [max(0, each.start + 1 - self.head.config.look_back) for each in readings]
        runs = [each.seq.tokens[first : each.stop] for first, each in zip(firsts, readings, strict=True)]
        tokens = torch.tensor([token for run in runs for token in run])
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        found = []
        for each, run in zip(readings, torch.split(tokens, [len(run) for run in runs]), strict=True):
            beside = self.head.token_hints(run)[each.start - each.stop :]
            found.append(
                PrefillRange(each.seq, each.start, each.stop, [torch.cat([torch.cat(each.states), beside], -1)])
            )
        return found

    def _tokens_back(self, reading: PrefillRange) -> list[list[int]]:
        """Of each place its token and those before it; -1 is none."""
        tokens, count = reading.seq.tokens, self.head.config.look_back
        places = range(reading.start, reading.stop)
        return [[tokens[place - back] if place >= back else -1 for back in range(count)] for place in places]

    def read(self, readings: list[PrefillRange], slots: Tensor, states: Tensor) -> None:
        if isinstance(self.work, BlockOps):  # it is whole
            places = [place for each in readings for place in range(each.start, each.stop)]
            self.work.store_kv(slots, places, self.head.fuse(states))
        else:
            self.work.store_hidden_states(slots, states)
            tokens = [token for each in readings for some in self._tokens_back(each) for token in some]
            self.work.run(replace(self.to_read(readings, None), tokens=tokens))

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains = self.chains(budgets)
        depth = min(self.deepest, max(budget.depth for budget in budgets))
        if self._whole is not None and all(goes_whole(seq, self.draft_temperature) for seq in seqs):
            chain_whole(chains, self._whole, self.pages, seqs, depth)
            return chains
        if self._native is not None and len(seqs) <= self._native.max_sequences and self.is_greedy(seqs):
            hang(chains, self._native.draft(self.asked(seqs, chains)))
            return chains
        level = self._passed(seqs, chains, depth)
        tokens, top = [seq.tokens[-1] for seq in seqs], int(self.is_greedy(seqs))
        for offset in range(depth):
            found = level(BlockLevelOp(offset, list(range(len(seqs))), tokens, top, self.head.config.confidence))
            guesses = self.draw(seqs, offset, found.logits)
            sure: list[float] | None = None if found.confidence is None else found.confidence.sigmoid().tolist()
            if not extend(chains, guesses, sure):
                break
            tokens = guesses.tokens.tolist()
        return chains

    @property
    def deepest(self) -> int:
        return self.head.config.drafts

    def plant(self, seq: Sequence, budget: Budget) -> EagleTree | FixedTree:
        """Without a Markov head all branches of a level go on alike, and to follow them costs nothing."""
        tree = super().plant(seq, budget)
        if isinstance(tree, EagleTree) and not self.head.config.markov_rank:
            tree.wide = budget.nodes
        return tree

    def grow(self, plots: list[TreeInProgress]) -> None:
        if self._whole is not None:
            grown_by = grow_from if self._whole.depends_on_tokens else grow_alike
            plots = grow_whole(plots, self._whole, self.pages, self.draft_temperature, grown_by)
        if plots:
            self._grow_by_levels(plots)

    def _grow_by_levels(self, plots: list[TreeInProgress]) -> None:
        seqs = [plot.seq for plot in plots]
        # Pages are reserved for each tree's own depth, which may be less than the head's longest draft.
        depths = [len(plot.tree.follows) + 1 for plot in plots]
        level = self._passed(seqs, self.chains([Budget(depth) for depth in depths]), max(depths))
        top = MOST_WIDE if self.is_greedy(seqs) else 0
        while live := [(row, plot) for row, plot in enumerate(plots) if plot.tree.goes_on]:
            owners, rows = self._level(live)
            before = [token for _, token in owners]
            job = BlockLevelOp(live[0][1].tree.depth, [row for row, _ in owners], before, top, wants_confidence=False)
            self.chooser.grow([plot for _, plot in live], level(job).logits, rows)

    def _level(self, live: list[tuple[int, TreeInProgress]]) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """Whose guesses a level has, each behind which token, and which of them each node has: what a Markov head adds
        hangs on the token before."""
        if not self.head.config.markov_rank:
            rows = [[at] * len(plot.tree.level) for at, (_, plot) in enumerate(live)]
            return [(row, plot.seq.tokens[-1]) for row, plot in live], rows
        owners = [(row, plot.before(node)) for row, plot in live for node in plot.tree.level]
        ends = list(accumulate(len(plot.tree.level) for _, plot in live))
        rows = [list(range(stop - len(plot.tree.level), stop)) for (_, plot), stop in zip(live, ends, strict=True)]
        return owners, rows

    def _passed(
        self, seqs: list[Sequence], chains: list[ChainBuilder], depth: int
    ) -> Callable[[BlockLevelOp], HeadLogits]:
        """Run a block behind each text; what it guesses is asked for level by level."""
        if self._native is not None and len(seqs) <= self._native.max_sequences:
            states, scores = self._native.states(self.asked(seqs, chains))
            return BlockForwardOutput(self.head, self.head.draft_states(states)[:, :depth], scores).level
        text = [len(seq.tokens) - 1 for seq in seqs]
        self.work.run(
            BlockForwardOp([seq.tokens[-1] for seq in seqs], text, depth, *flatten_pages([seq.pages for seq in seqs]))
        )
        return self.work.run
