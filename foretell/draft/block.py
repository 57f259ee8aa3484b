"""Guesses a block of tokens in one pass from the target's states: DFlash and DSpark heads."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foretell.models.heads import BlockHead
from foretell.runner.cuda_blocks import WholeBlock
from foretell.runner.native_head import NativeBlock, native_for_head
from foretell.runner.native_reading import Reading
from foretell.runner.runner import ModelRunner
from foretell.types import Budget, Sequence

from .chains import Chain, extend, hang
from .choosing import Plot
from .heads import HeadDrafter
from .heads_pages import HeadPages, Look
from .heads_whole import goes_whole, grow_alike, grow_from, grow_whole, hang_whole, text_of
from .tree import MOST_WIDE, LevelTree, ShapedTree


class BlockDrafter(HeadDrafter):
    """At place p it keeps keys and values of p's own feature, in each of its layers."""

    head: BlockHead
    prior = 0.65

    def __init__(self, runner: ModelRunner, head: BlockHead, pages: HeadPages, *settings: Any) -> None:
        super().__init__(runner, head, pages, *settings)
        native = native_for_head(head) if head.config.layer.window is None else None
        places = (pages.keys, pages.values, runner.pool.count)
        self._native = None if native is None else NativeBlock(native, head, *places)
        if self._native is not None:
            self.read_natively(self._native, runner.taps)
        self._whole = WholeBlock(head, pages.keys, pages.values, MOST_WIDE) if self.whole else None

    def read(self, readings: list[Reading], slots: Tensor, states: Tensor) -> None:
        places = [place for each in readings for place in range(each.start, each.stop)]
        turn = self.head.turn(torch.tensor(places, device=self.device))
        for layer, (keys, values) in enumerate(self.head.remember(self.head.fuse(states), turn)):
            self.pages.put(layer, slots, keys, values)

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Chain]:
        chains = self.chains(budgets)
        depth = min(self.deepest, max(budget.depth for budget in budgets))
        if self._whole is not None and all(goes_whole(seq, self.draft_temperature) for seq in seqs):
            hang_whole(chains, self._whole.chain([text_of(self.pages, seq, depth) for seq in seqs], depth))
            return chains
        if self._native is not None and len(seqs) <= self._native.most and self.is_greedy(seqs):
            hang(chains, self._native.guess(self.asked(seqs, chains)))
            return chains
        states, scores = self._states(seqs, chains, depth)
        tokens = torch.tensor([seq.tokens[-1] for seq in seqs], device=self.device)
        for offset in range(depth):
            logits = scores[:, offset]
            if self.head.config.markov_rank:
                logits = logits + self.head.nudge(tokens)
            guesses = self.draw(seqs, offset, logits)
            goes_on = extend(chains, guesses, self._sure(states[:, offset], tokens))
            if not goes_on:
                break
            tokens = guesses.tokens
        return chains

    @property
    def deepest(self) -> int:
        return self.head.config.drafts

    def plant(self, seq: Sequence, budget: Budget) -> LevelTree | ShapedTree:
        """Without a Markov head all branches of a level go on alike, and to follow them costs nothing."""
        tree = super().plant(seq, budget)
        if isinstance(tree, LevelTree) and not self.head.config.markov_rank:
            tree.wide = budget.nodes
        return tree

    def grow(self, plots: list[Plot]) -> None:
        if self._whole is not None:
            grown_by = grow_from if self._whole.is_told_tokens else grow_alike
            plots = grow_whole(plots, self._whole, self.pages, self.draft_temperature, grown_by)
        if plots:
            self._grow_by_levels(plots)

    def _grow_by_levels(self, plots: list[Plot]) -> None:
        seqs = [plot.seq for plot in plots]
        chains = self.chains([Budget(self.deepest)] * len(seqs))
        _, scores = self._states(seqs, chains, self.deepest)
        while live := [(row, plot) for row, plot in enumerate(plots) if plot.tree.goes_on]:
            logits, rows = self._level(live, scores[:, live[0][1].tree.depth])
            self.chooser.grow([plot for _, plot in live], logits, rows)

    def _level(self, live: list[tuple[int, Plot]], scores: Tensor) -> tuple[Tensor, list[list[int]]]:
        """Logits of a level, and which of them each node has; what a Markov head adds hangs on the token before."""
        if not self.head.config.markov_rank:
            return scores, [[row] * len(plot.tree.level) for row, plot in live]
        owners = [(row, plot.before(node)) for row, plot in live for node in plot.tree.level]
        table = torch.tensor(owners, device=self.device).T
        ends = list(accumulate(len(plot.tree.level) for _, plot in live))
        rows = [list(range(stop - len(plot.tree.level), stop)) for (_, plot), stop in zip(live, ends, strict=True)]
        return scores[table[0]] + self.head.nudge(table[1]), rows

    def _states(self, seqs: list[Sequence], chains: list[Chain], depth: int) -> tuple[Tensor, Tensor]:
        """States that guess [texts, depth, width], and their logits without what a Markov head adds."""
        if self._native is not None and len(seqs) <= self._native.most:
            states, scores = self._native.states(self.asked(seqs, chains))
            return self.head.guessing(states)[:, :depth], scores
        tokens = torch.tensor([seq.tokens[-1] for seq in seqs], device=self.device)
        states = self.head.guessing(self._pass(seqs, tokens))[:, :depth]
        return states, self.head.scores(states)

    def _pass(self, seqs: list[Sequence], anchors: Tensor) -> Tensor:
        """Normed states of each text's block, [texts, block, width]."""
        block = self.head.config.block
        text = [len(seq.tokens) - 1 for seq in seqs]
        memory = self.pages.memory(seqs, max(text) + block)
        seen = torch.ones(block, block, dtype=torch.bool)
        seen = seen.tril() if self.head.config.causal_in_block else seen
        look = Look(memory, self.head.config.layer, text, seen, reach=(-1,) * block)  # a window is the anchor's
        places = torch.tensor(text, device=self.device)[:, None] + torch.arange(block, device=self.device)
        states = self.head.run(self.head.enter(anchors).flatten(0, 1), self.head.turn(places.flatten()), look)
        return states.view(len(seqs), block, -1)

    def _sure(self, states: Tensor, before: Tensor) -> list[float] | None:
        """How likely the guesses are to stand, where the head says so itself."""
        if not self.head.config.confidence:
            return None
        sure: list[float] = self.head.sure(states, before).sigmoid().tolist()
        return sure
