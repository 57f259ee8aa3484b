"""Base of drafters that predict from the target's hidden states: EAGLE, MTP, Medusa, DFlash and DSpark heads."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretell.draft.base import HiddenStateDrafter
from foretell.draft.draft_builder import ChainBuilder, DraftTokens
from foretell.draft.heads.graph_draft import graph_prefill
from foretell.draft.heads.hidden_states import (
    HiddenStateTracker,
    PendingHiddenStates,
    accepted_hidden_states,
    layer_columns,
    layer_offsets,
)
from foretell.draft.heads.sampling import (
    ChildSampler,
    DraftTemperature,
    TreeInProgress,
    needs_draft_probs,
    sample_draft_tokens,
)
from foretell.draft.heads.tree import EagleTree, FixedTree, RankAcceptance, Tree
from foretell.models.draft_heads import DraftHead
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.ops import PrefillOp, flatten_pages, make_head_ops
from foretell.runner.model_runner import ModelRunner
from foretell.runner.native.head_draft import DraftRequest, NativeHead
from foretell.runner.native.head_prefill import NativePrefill, PrefillRange
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Sequence, StepResult


def check_reserved(seq: Sequence, tokens: int, page_size: int) -> None:
    """Raise if the pages of a sequence hold fewer than `tokens` tokens: native code does not check its bounds."""
    if tokens > len(seq.pages) * page_size:
        slots = len(seq.pages) * page_size
        raise RuntimeError(f"a draft needs {tokens} slots and {slots} are reserved for sequence {seq.id}")


class HeadDrafter(HiddenStateDrafter):
    """A draft head whose KV is in the target's own pages, so a prefix cache hit needs no prefill by the head.

    Hidden states are read when a page is full or a draft is wanted: one batch of positions costs as much as one
    position.
    """

    traits = DrafterTraits(
        samples=True, gives_probability=True, makes_trees=True, relative_cost=0.1, prior_acceptance=0.6
    )

    def __init__(
        self,
        runner: ModelRunner,
        head: DraftHead[Any],
        pages: HeadPages,
        name: str,
        draft_temperature: DraftTemperature = "fixed",
        min_confidence: float = 0.0,
        single_graph: bool | None = None,
    ) -> None:
        """`runner` is the target's, which returns the hidden states that the head reads.

        `single_graph`: run a draft as one CUDA graph; by default on CUDA, and never for a head that is split.
        """
        self.head, self.pages, self.name = head, pages, name
        self.context, self.device, self.vocab = runner.context, runner.device, runner.model.config.vocab
        self.draft_temperature, self.min_confidence = draft_temperature, min_confidence
        self._runner = runner
        self.is_split = head.shard is not None  # over the ranks of a tensor-parallel group
        if single_graph is None:
            single_graph = runner.device.type == "cuda"
        self.traits = replace(
            self.traits,
            hidden_layers=head.config.hidden_layers,
            single_graph=single_graph and not self.is_split,
            weight_bytes=head.bytes,
        )
        if head.config.accuracy:  # measured in training; a head that was poor there may be better on these requests
            accuracy = tuple(max(0.1, rate) for rate in head.config.accuracy)
            self.traits = replace(self.traits, prior_acceptance=accuracy[0], acceptance_by_depth=accuracy)
        self.ops = runner.leader_head_ops(make_head_ops(head, pages)) if self.is_split else make_head_ops(head, pages)
        self._columns = layer_columns(runner.hidden_layers, head.config, runner.device, self.is_split)
        self._native_prefill: NativePrefill | None = None
        self._graph_prefill = graph_prefill(head, pages) if self.traits.single_graph else None
        self._pending = HiddenStateTracker(pages.page_size)
        self.child_sampler = ChildSampler(head.draft_ids, draft_temperature)
        self.rank_acceptance = RankAcceptance(head.config.accuracy)

    def replace_head(self, head: DraftHead[Any]) -> None:
        """Draft with another head of the same shape from now on."""
        settings = (self.name, self.draft_temperature, self.min_confidence, self.traits.single_graph)
        fresh = type(self)(self._runner, head, self.pages, *settings)
        fresh.traits = replace(fresh.traits, relative_cost=self.traits.relative_cost)
        vars(self).update(vars(fresh))

    @property
    def is_native(self) -> bool:
        """Return whether the native library runs prefill and chains. Then torch computes nothing, and entering
        inference mode would take longer than the rest of the call."""
        return self._native_prefill is not None and self._graph_prefill is None

    def update_kv(self, results: list[StepResult]) -> None:
        """Take over the hidden states of a step, and read those of pages that are full now."""
        try:
            if self.is_native:
                self._update_kv(results)
            else:
                with torch.inference_mode():
                    self._update_kv(results)
        except BaseException:
            self._pending.mark_unread(results)
            raise

    def _update_kv(self, results: list[StepResult]) -> None:
        full = []
        for result in results:
            seq = result.scheduled.seq
            pending = self._add_hidden_states(result)
            if seq.num_computed_tokens // self.pages.page_size * self.pages.page_size > pending.start:
                full.append(seq)  # its full pages enter the prefix cache after this
        if full:
            self.read_hidden_states([taken for seq in full if (taken := self._take_pending(seq)) is not None])
        for result in results:
            if result.scheduled.seq.finish_reason is not None:
                self._pending.pop(result.scheduled.seq.id, None)

    def _add_hidden_states(self, result: StepResult) -> PendingHiddenStates:
        """Append the hidden states of a step's accepted tokens to the pending ones of the sequence."""
        seq, start = result.scheduled.seq, result.scheduled.start
        pending = self._pending.continued(seq, start)
        if start > pending.stop:
            pending.has_gap = True
            pending.start, pending.rows = start, []
        self._pending.mark_rewritten(seq, start)
        known = self.num_known_positions(result) if pending.start == start else 0
        pending.start += known
        pending.rows += accepted_hidden_states(result, known, seq.num_computed_tokens - start)
        pending.stop = seq.num_computed_tokens
        return pending

    def num_known_positions(self, result: StepResult) -> int:
        """Return how many positions of a step already have the head's KV, exactly as a prefill would compute it."""
        return 0

    def _take_pending(self, seq: Sequence) -> PrefillRange | None:
        """Return the pending hidden states of a sequence and mark them as read."""
        pending = self._pending.get(seq.id)
        if pending is None or pending.start == pending.stop:
            return None
        return pending.take(seq, by_address=self.is_native)

    def read_hidden_states(self, ranges: list[PrefillRange]) -> None:
        """Compute the head's KV of these positions from the target's hidden states."""
        if not ranges:
            return
        if self._graph_prefill is not None and self._graph_prefill.prefill(ranges, self._columns):
            return
        if self._native_prefill is not None:
            self._native_prefill.prefill(ranges)
            return
        slots = [slot for each in ranges for slot in self.pages.slots(each.seq, each.start, each.stop)]
        parts = [part for each in ranges for part in each.states]
        states = parts[0] if len(parts) == 1 else torch.cat(parts)
        states = states if self._columns is None else states.index_select(1, self._columns)
        self.prefill(ranges, torch.tensor(slots, device=self.device), states)

    def prefill_op(self, ranges: list[PrefillRange], first: int | None) -> PrefillOp:
        """Return the prefill as plain integers, with the tokens of positions from `first` on; None: no tokens."""
        starts, stops = [each.start for each in ranges], [each.stop for each in ranges]
        begins = stops if first is None else [max(start, first) for start in starts]
        spans = zip(ranges, begins, stops, strict=True)
        tokens = [token for each, begin, stop in spans for token in each.seq.tokens[begin:stop]]
        return PrefillOp(starts, stops, tokens, *flatten_pages([each.seq.pages for each in ranges]))

    def catch_up(self, ranges: list[PrefillRange]) -> None:
        """Read these positions before, or together with, the drafts that are wanted now."""
        self.read_hidden_states(ranges)

    @abstractmethod
    def prefill(self, ranges: list[PrefillRange], slots: Tensor, states: Tensor) -> None:
        """Store the head's KV of these positions; `slots` and `states` cover all ranges, one after the other."""

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        if self.is_native and not any(budget.is_tree for budget in budgets):
            return self._propose(seqs, budgets)
        with torch.inference_mode():
            return self._propose(seqs, budgets)

    def _propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(seqs)
        for_chains, for_trees, ranges = list[int](), list[int](), list[PrefillRange]()
        for i, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            if self._can_draft(seq, budget):
                (for_trees if budget.is_tree else for_chains).append(i)
                if (taken := self._take_pending(seq)) is not None:
                    ranges.append(taken)
        self.catch_up(ranges)
        if for_chains:
            chains = self.draft_chains([seqs[i] for i in for_chains], [budgets[i] for i in for_chains])
            for i, chain in zip(for_chains, chains, strict=True):
                drafts[i] = self._chain_draft(seqs[i], chain)
        if not for_trees:
            return drafts
        growing = {i: TreeInProgress(seqs[i], self.new_tree(seqs[i], budgets[i])) for i in for_trees}
        self.draft_trees(list(growing.values()))
        for i, each in growing.items():
            drafts[i] = self._tree_draft(each.tree)
        return drafts

    def _can_draft(self, seq: Sequence, budget: Budget) -> bool:
        """Return whether the head has the KV of all positions but the last, and context for the draft."""
        known = (
            seq.pending == 1
            and len(seq.tokens) > 1
            and not self._pending.continued(seq, seq.num_computed_tokens).has_gap
        )
        return known and 0 < budget.depth <= self.context - len(seq.tokens)

    @abstractmethod
    def draft_chains(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        """Return a chain of at least one draft token for each sequence."""

    @abstractmethod
    def draft_trees(self, growing: list[TreeInProgress]) -> None:
        """Complete the tree of each sequence."""

    def new_tree(self, seq: Sequence, budget: Budget) -> Tree:
        """Return an empty tree; one for sampled tokens has a fixed shape."""
        min_confidence = max(budget.min_probability, self.min_confidence)
        if needs_draft_probs(seq):
            return FixedTree(self.rank_acceptance.best_shape(budget, self.max_depth, min_confidence))
        if budget.depth > self.max_depth:
            budget = replace(budget, max_depth=self.max_depth)
        return EagleTree(budget, min_confidence, self.tree_width(budget))

    def tree_width(self, budget: Budget) -> int | None:
        """Return how many nodes are expanded per level; None: as many as fit into the budget."""
        return None

    @property
    def max_depth(self) -> int:
        """Return the length of the longest chain that the head can draft."""
        return self.context

    def _tree_draft(self, tree: Tree) -> Draft:
        draft, probs = tree.draft(self.name), tree.sampled_probs()
        return draft if probs is None else replace(draft, probs=self._over_target_vocab(probs))

    def observe(self, results: list[StepResult]) -> None:
        for result in results:
            if result.draft.source == self.name and result.draft.origins is None:
                self.rank_acceptance.observe(result)

    def use_native_prefill(self, native: NativeHead, available: tuple[int, ...]) -> None:
        """Let the native library read hidden states; `available` are the layers that the target returns."""
        offsets = layer_offsets(available, self.head.config)
        self._native_prefill = NativePrefill(native, self.pages.hidden_state_cache, offsets)

    def new_chains(self, budgets: list[Budget]) -> list[ChainBuilder]:
        """Return empty chains for these budgets."""
        return [ChainBuilder(budget, max(budget.min_probability, self.min_confidence)) for budget in budgets]

    def native_request(self, seqs: list[Sequence], chains: list[ChainBuilder]) -> DraftRequest:
        """Return the arguments of a native call that drafts these chains."""
        request = DraftRequest([], [], [], [], [])
        for seq, chain in zip(seqs, chains, strict=True):
            last, depth = len(seq.tokens) - 1, chain.budget.depth
            check_reserved(seq, last + depth, self.pages.page_size)
            request.tokens.append(seq.tokens[last])
            request.positions.append(last)
            request.pages.append(seq.pages)
            request.depths.append(depth)
            request.min_probabilities.append(chain.min_confidence)
        return request

    def last_cached_slots(self, seqs: list[Sequence]) -> list[int]:
        """Return the slot of the position before the last of each sequence."""
        return [self.pages.slots(seq, len(seq.tokens) - 2, len(seq.tokens) - 1)[0] for seq in seqs]

    @staticmethod
    def all_greedy(seqs: list[Sequence]) -> bool:
        """Return whether no request samples."""
        return all(seq.request.params.temperature == 0 for seq in seqs)

    def sample(self, seqs: list[Sequence], offset: int, logits: Tensor) -> DraftTokens:
        """Return the argmax of logits [sequences, outputs], or a sample where any request samples."""
        if self.all_greedy(seqs):
            best, columns = logits.max(-1)
            confidence = (best - logits.logsumexp(-1)).exp()
            return DraftTokens(self.head.draft_ids[columns].tolist(), confidence.tolist())
        return sample_draft_tokens(logits, seqs, offset, self.draft_temperature, self.head.draft_ids)

    def _chain_draft(self, seq: Sequence, chain: ChainBuilder) -> Draft:
        # A token sampled with the target's own noise is verified by equality, as an argmax is.
        if not needs_draft_probs(seq):
            return chain.draft(self.name)
        return chain.draft(self.name, True, self._chain_probs(chain))

    def _chain_probs(self, chain: ChainBuilder) -> Tensor:
        """Return the distributions of a chain's tokens, [tokens, vocab]."""
        if chain.chain_probs is not None:
            return chain.chain_probs[: len(chain.tokens)]
        return self._over_target_vocab(torch.stack(chain.probs))

    def _over_target_vocab(self, probs: Tensor) -> Tensor:
        """Expand distributions over the head's outputs to the target's vocabulary."""
        full = torch.zeros(len(probs), self.vocab, device=self.device)
        return full.index_copy_(1, self.head.draft_ids, probs)

    def forget(self, seq: Sequence) -> None:
        self._pending.pop(seq.id, None)
