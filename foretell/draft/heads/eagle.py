"""Guesses one token after another from the target's states: EAGLE heads, and multi-token prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder, extend, hang
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.eagle_trees import NativeSteps, TorchSteps, grow_trees
from foretell.draft.heads.graph_draft import chain_whole, goes_whole, grow_from, grow_whole, whole_steps
from foretell.draft.heads.sampling import TreeInProgress, draws_of, must_draw
from foretell.draft.heads.tree import MOST_WIDE
from foretell.models.draft_heads import DistilledHead, EagleHead, MtpHead
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.ops import EagleOps, StepOp, flatten_pages
from foretell.runner.model_runner import ModelRunner
from foretell.runner.native.head_draft import NO_OPTIONS, DraftOptions, NativeChain, PrefillBuffers, native_for_head
from foretell.runner.native.head_prefill import PrefillRange
from foretell.types import Budget, Sequence


class EagleDrafter(HeadDrafter):
    """At place p it keeps the pair of p's token and the feature of p-1: that depends on nothing behind p."""

    head: EagleHead | MtpHead | DistilledHead
    prior = 0.65

    def __init__(
        self, runner: ModelRunner, head: EagleHead | MtpHead | DistilledHead, pages: HeadPages, *settings: Any
    ) -> None:
        super().__init__(runner, head, pages, *settings)
        native = None if self.is_split else native_for_head(head)
        self._native = None if native is None else NativeChain(native, head, pages.keys, pages.values)
        if self._native is not None:
            self.read_natively(self._native, runner.hidden_layers)
        self._whole = whole_steps(head, pages) if self.whole else None

    def read(self, readings: list[PrefillRange], slots: Tensor, states: Tensor) -> None:
        self.work.store_hidden_states(slots, states)
        if any(each.stop > 1 for each in readings):  # nothing is remembered at the first place of a text
            self.work.run(self.to_read(readings, 1))

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains = self.chains(budgets)
        if self._whole is not None and all(goes_whole(seq, self.draft_temperature) for seq in seqs):
            depth = max(budget.depth for budget in budgets)
            chain_whole(chains, self._whole, self.pages, seqs, depth)
            return chains
        if self._native is None:
            self._step_by_step(seqs, chains)
        elif self.draft_temperature == "fixed" or self.is_greedy(seqs):
            self._guess_natively(self._native, seqs, chains)
        else:
            self._draw_natively(self._native, seqs, chains, self.features_before(seqs))
        return chains

    def _guess_natively(self, native: NativeChain, seqs: list[Sequence], chains: list[ChainBuilder]) -> None:
        """All in one call."""
        draws, tells = draws_of(seqs, max(chain.budget.depth for chain in chains)), any(map(must_draw, seqs))
        features = None if self.pages.state_cache is None else self.features_before(seqs)
        beside = DraftOptions(draws=draws, returns_probs=tells, prefill=self.along())
        hang(chains, native.draft(self.asked(seqs, chains), features, beside))

    def along(self) -> PrefillBuffers | None:
        """What the library is to read with the first guess that it makes now."""
        return None

    def features_before(self, seqs: list[Sequence]) -> Tensor:
        """Of the places before the last, [texts, width]."""
        assert isinstance(self.work, EagleOps), "the library has whole heads alone"
        if self.pages.state_cache is None:
            return self.work.hidden_states(torch.tensor(self.slots_before(seqs)))
        return self.pages.hidden_states_cpu(self.slots_before(seqs))

    def grow(self, plots: list[TreeInProgress]) -> None:
        if self._whole is not None:
            plots = grow_whole(plots, self._whole, self.pages, self.draft_temperature, grow_from)
        if plots:
            self._grow_by_levels(plots)

    def _grow_by_levels(self, plots: list[TreeInProgress]) -> None:
        seqs = [plot.seq for plot in plots]
        wide = MOST_WIDE if self.is_greedy(seqs) else 0
        steps: NativeSteps | TorchSteps
        if self._native is not None:
            steps = NativeSteps(self._native, self.pages, self.features_before(seqs), self.along())
        else:
            steps = TorchSteps(self.work, plots, self.slots_before(seqs), self.head.config.layer.window, wide)
        grow_trees(plots, steps, self.chooser)

    def _step_by_step(self, seqs: list[Sequence], chains: list[ChainBuilder]) -> None:
        """The definition."""
        depth, last = max(chain.budget.depth for chain in chains), [len(seq.tokens) - 1 for seq in seqs]
        rows, tokens = list(range(len(seqs))), [seq.tokens[-1] for seq in seqs]
        job = StepOp(
            *(tokens, last, self.slots_before(seqs), rows, last, [1] * len(seqs), [0]),
            *(int(self.is_greedy(seqs)), max(last) + depth, *flatten_pages([seq.pages for seq in seqs])),
        )
        for offset in range(depth):
            guesses = self.draw(seqs, offset, self.work.run(job).logits)
            if not extend(chains, guesses):
                break
            places = [place + offset + 1 for place in last]
            job = StepOp(guesses.tokens.tolist(), places, rows, rows, places, job.draft_mask, job.depths, job.top_k)

    def _draw_natively(
        self, native: NativeChain, seqs: list[Sequence], chains: list[ChainBuilder], feature: Tensor
    ) -> None:
        """Of each step the logits; a chain that ended is left out, for it has no pages farther on."""
        beside = DraftOptions(prefill=self.along())
        for offset in range(max(chain.budget.depth for chain in chains)):
            live = [i for i, chain in enumerate(chains) if chain.goes_on]
            if not live:
                break
            if len(live) < len(chains):
                feature = feature[live]
                seqs, chains = [seqs[i] for i in live], [chains[i] for i in live]
            asked = self.asked(seqs, chains)
            if offset:
                tokens = [chain.tokens[-1] for chain in chains]
                asked = replace(asked, tokens=tokens, positions=[place + offset for place in asked.positions])
            extend(chains, self.draw(seqs, offset, native.step(asked, feature, beside)))
            beside = NO_OPTIONS
