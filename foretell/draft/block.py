"""Guesses a block of tokens in one pass from the target's states: DFlash and DSpark heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretell.models.heads import BlockHead
from foretell.runner.native_head import NativeBlock, native_for_head
from foretell.runner.runner import ModelRunner
from foretell.types import Budget, Sequence

from .heads import Chain, HeadDrafter, Reading, extend, hang
from .heads_pages import HeadPages, Look


class BlockDrafter(HeadDrafter):
    """At place p it keeps keys and values of p's own feature, in each of its layers."""

    head: BlockHead
    prior = 0.65

    def __init__(self, runner: ModelRunner, head: BlockHead, pages: HeadPages, *settings: Any) -> None:
        super().__init__(runner, head, pages, *settings)
        native = native_for_head(head, pages.keys) if head.config.layer.window is None else None
        places = (pages.keys, pages.values, runner.pool.count)
        self._native = None if native is None else NativeBlock(native, head, *places)

    def read(self, readings: list[Reading], slots: Tensor, states: Tensor) -> None:
        places = [place for each in readings for place in range(each.start, each.stop)]
        turn = self.head.turn(torch.tensor(places, device=self.device))
        for layer, (keys, values) in enumerate(self.head.remember(self.head.fuse(states), turn)):
            self.pages.put(layer, slots, keys, values)

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Chain]:
        chains = self.chains(budgets)
        depth = min(self.head.config.drafts, max(budget.nodes for budget in budgets))
        native = self._native if self._native is not None and len(seqs) <= self._native.most else None
        if native is not None and self.is_greedy(seqs):
            hang(chains, native.guess(self.asked(seqs, chains)))
            return chains
        tokens = torch.tensor([seq.tokens[-1] for seq in seqs], device=self.device)
        if native is not None:
            states, scores = native.states(self.asked(seqs, chains))
            states = self.head.guessing(states)[:, :depth]
        else:
            states = self.head.guessing(self._pass(seqs, tokens))[:, :depth]
            scores = self.head.scores(states)
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
