"""Heads that draft one token after another from the target's hidden states: EAGLE, MTP and distilled drafts."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder, extend_chains, fill_chains
from foretell.draft.heads.base import HeadDrafter, check_reserved
from foretell.draft.heads.graph_draft import (
    build_dynamic_tree,
    build_trees_from_graph,
    fill_chains_from_graph,
    graph_draft,
    supports_single_graph,
)
from foretell.draft.heads.sampling import ChildSampler, TreeInProgress, needs_draft_probs, pack_draft_sampling
from foretell.draft.heads.tree import MAX_WIDTH, ROOT
from foretell.models.draft_heads import DistilledHead, EagleHead, MtpHead
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.ops import EagleOps, HeadOps, StepOp, flatten_pages
from foretell.runner.model_runner import ModelRunner
from foretell.runner.native.head_draft import (
    NO_OPTIONS,
    DraftOptions,
    DraftRequest,
    NativeChain,
    PrefillBuffers,
    native_for_head,
)
from foretell.runner.native.head_prefill import PrefillRange
from foretell.types import Budget, Sequence, StepResult


class TreeLayout:
    """Slots of the head's KV for the expanded nodes of one tree: after the sequence, valid for this draft only.

    Accepted nodes are read again from the target's hidden states, like all tokens of the sequence.
    """

    def __init__(self, growing: TreeInProgress) -> None:
        self.growing, self.tree, self.seq = growing, growing.tree, growing.seq
        self.length = len(growing.seq.tokens)
        self.offsets: dict[int, int] = {
            ROOT: -1
        }  # of each node's KV, from the end of the sequence; its last is the root
        self.rows: dict[int, int] = {}  # row of each frontier node in the last step

    def path_offsets(self, node: int) -> list[int]:
        """Return the offsets along the path from the root to a node, its own last."""
        path = [self.offsets[node]]
        while node != ROOT:
            node = self.tree.parents[node]
            path.append(self.offsets[node])
        return path[::-1]

    def assign_offsets(self, first: int) -> None:
        """Give the frontier's nodes consecutive offsets from `first` on."""
        self.offsets.update({node: first + i for i, node in enumerate(self.tree.frontier)})

    def assign_rows(self, first: int) -> list[int]:
        """Give the frontier's nodes consecutive rows of the step from `first` on."""
        self.rows = {node: first + i for i, node in enumerate(self.tree.frontier)}
        return list(self.rows.values())

    @property
    def parent_rows(self) -> list[int]:
        """Rows of the last step that belong to the parents of the frontier's nodes."""
        return [self.rows[self.tree.parents[node]] for node in self.tree.frontier]

    @property
    def tokens(self) -> list[int]:
        """Tokens of the frontier's nodes."""
        return [self.tree.tokens[node] for node in self.tree.frontier]


class TreeSteps(Protocol):
    """Runs the steps of a head for trees; each returns logits."""

    def root(self, layouts: list[TreeLayout]) -> Tensor:
        """Run the last token of each sequence."""

    def level(self, live: list[TreeLayout], parent_rows: list[int]) -> Tensor:
        """Run the frontiers of all trees, one after the other; `parent_rows` are the parents' rows of the last step."""


def expand_trees(growing: list[TreeInProgress], steps: TreeSteps, child_sampler: ChildSampler) -> None:
    """Expand all trees level by level until none is open."""
    layouts = [TreeLayout(each) for each in growing]
    logits = steps.root(layouts)
    child_sampler.expand(growing, logits, [each.assign_rows(row) for row, each in enumerate(layouts)])
    while live := [each for each in layouts if each.tree.is_open]:
        logits = steps.level(live, [row for each in live for row in each.parent_rows])
        rows: list[list[int]] = []
        for each in live:
            rows.append(each.assign_rows(sum(map(len, rows))))
        child_sampler.expand([each.growing for each in live], logits, rows)


class TorchTreeSteps:
    """The reference implementation in torch: all sequences side by side, padded to equally many rows."""

    def __init__(
        self, ops: HeadOps, growing: list[TreeInProgress], slots: list[int], window: int | None, top_k: int
    ) -> None:
        """`slots` are of the position before the last of each sequence. `top_k`: tokens considered, 0: all."""
        self.ops, self.slots, self.window, self.top_k = ops, slots, window, top_k
        widest = [max(level) for level in zip_longest(*(each.tree.max_frontier for each in growing), fillvalue=0)]
        self.num_columns = max(len(each.seq.tokens) for each in growing) + sum(widest)
        self.layouts: list[TreeLayout] = []
        self.num_offsets = 0  # KV offsets after each sequence that are in use

    def root(self, layouts: list[TreeLayout]) -> Tensor:
        self.layouts = layouts
        tokens, last = [each.seq.tokens[-1] for each in layouts], [each.length - 1 for each in layouts]
        op = StepOp(
            *(tokens, last, self.slots, list(range(len(last))), last, [1] * len(last), [0], self.top_k),
            *(self.num_columns, *flatten_pages([each.seq.pages for each in layouts])),
        )
        return self.ops.run(op).logits

    def level(self, live: list[TreeLayout], parent_rows: list[int]) -> Tensor:
        width, depth = max(len(each.tree.frontier) for each in live), live[0].tree.depth
        count, live_ids = len(self.layouts), {id(each) for each in live}
        rows = [
            i * width + at
            for i, each in enumerate(self.layouts)
            if id(each) in live_ids
            for at in range(len(each.tree.frontier))
        ]
        tokens, sources = [0] * (count * width), [0] * (count * width)  # padding continues from an arbitrary row
        for row, token, source in zip(rows, (t for each in live for t in each.tokens), parent_rows, strict=True):
            tokens[row], sources[row] = token, source
        for each in live:
            each.assign_offsets(self.num_offsets)
        positions = [each.length - 1 + depth for each in self.layouts for _ in range(width)]
        visible: list[int] = self._visible(live_ids, width, depth).int().flatten().tolist()
        self.num_offsets += width
        lengths = [each.length for each in self.layouts]
        op = StepOp(tokens, positions, sources, rows, lengths, visible, [depth - 1] * width, self.top_k)
        return self.ops.run(op).logits

    def _visible(self, live_ids: set[int], width: int, depth: int) -> Tensor:
        """Return the tree attention mask, [sequences, rows, offsets]; a padded row attends to itself alone."""
        mask = torch.zeros(len(self.layouts), width, self.num_offsets + width, dtype=torch.bool)
        mask[:, :, self.num_offsets :] = torch.eye(width, dtype=torch.bool)
        first = 1 if self.window is None else max(1, depth + 1 - self.window)
        for i, each in enumerate(self.layouts):
            if id(each) in live_ids:
                for row, node in enumerate(each.tree.frontier):
                    mask[i, row, each.path_offsets(node)[first:]] = True
        return mask


class NativeTreeSteps:
    """The steps of the native library: one row per node, without padding."""

    def __init__(self, native: NativeChain, pages: HeadPages, features: Tensor, along: PrefillBuffers | None) -> None:
        """`features` [sequences, width] are hidden states of the position before the last; `along` is prefilled in the
        first step."""
        self.native, self.pages, self.features, self.along = native, pages, features, along

    def root(self, layouts: list[TreeLayout]) -> Tensor:
        for each in layouts:
            check_reserved(each.seq, each.length, self.pages.page_size)
        tokens, last = [each.seq.tokens[-1] for each in layouts], [each.length - 1 for each in layouts]
        return self.native.step(_step_request(tokens, last, layouts), self.features, DraftOptions(prefill=self.along))

    def level(self, live: list[TreeLayout], parent_rows: list[int]) -> Tensor:
        self.features = self.features[parent_rows]
        owners = [each for each in live for _ in each.tree.frontier]
        paths: list[list[int]] = []
        for each in live:
            each.assign_offsets(len(each.offsets) - 1)
            stop = each.length + len(each.offsets) - 1
            check_reserved(each.seq, stop, self.pages.page_size)
            slots = self.pages.slots(each.seq, each.length - 1, stop)
            paths += [[slots[offset + 1] for offset in each.path_offsets(node)] for node in each.tree.frontier]
        tokens = [token for each in live for token in each.tokens]
        positions = [each.length - 1 + each.tree.depth for each in owners]
        return self.native.step(_step_request(tokens, positions, owners), self.features, DraftOptions(paths))


def _step_request(tokens: list[int], positions: list[int], owners: list[TreeLayout]) -> DraftRequest:
    pages = [each.seq.pages for each in owners]
    return DraftRequest(tokens, positions, pages, [1] * len(tokens), [0.0] * len(tokens))


class EagleDrafter(HeadDrafter):
    """An autoregressive head. Its KV at position p is of p's token and the hidden state of p - 1, so it depends on no
    later token."""

    head: EagleHead | MtpHead | DistilledHead
    traits = replace(HeadDrafter.traits, prior_acceptance=0.65)

    def __init__(
        self, runner: ModelRunner, head: EagleHead | MtpHead | DistilledHead, pages: HeadPages, *settings: Any
    ) -> None:
        super().__init__(runner, head, pages, *settings)
        native = None if self.is_split else native_for_head(head)
        self._native = None if native is None else NativeChain(native, head, pages.keys, pages.values)
        if self._native is not None:
            self.use_native_prefill(self._native, runner.hidden_layers)
        self._graph = graph_draft(head, pages) if self.traits.single_graph else None

    def prefill(self, ranges: list[PrefillRange], slots: Tensor, states: Tensor) -> None:
        self.ops.store_hidden_states(slots, states)
        if any(each.stop > 1 for each in ranges):  # the first position has no hidden state before it, and no KV
            self.ops.run(self.prefill_op(ranges, 1))

    def draft_chains(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains = self.new_chains(budgets)
        if self._graph is not None and all(supports_single_graph(seq, self.draft_temperature) for seq in seqs):
            depth = max(budget.depth for budget in budgets)
            fill_chains_from_graph(chains, self._graph, self.pages, seqs, depth)
            return chains
        if self._native is None:
            self._draft_in_torch(seqs, chains)
        elif self.draft_temperature == "fixed" or self.all_greedy(seqs):
            self._draft_natively(self._native, seqs, chains)
        else:
            self._step_natively(self._native, seqs, chains, self.last_features(seqs))
        return chains

    def _draft_natively(self, native: NativeChain, seqs: list[Sequence], chains: list[ChainBuilder]) -> None:
        """Draft whole chains in one native call."""
        sampling = pack_draft_sampling(seqs, max(chain.budget.depth for chain in chains))
        wants_probs = any(map(needs_draft_probs, seqs))
        features = None if self.pages.hidden_state_cache is None else self.last_features(seqs)
        options = DraftOptions(draws=sampling, returns_probs=wants_probs, prefill=self.prefill_along())
        fill_chains(chains, native.draft(self.native_request(seqs, chains), features, options))

    def prefill_along(self) -> PrefillBuffers | None:
        """Return positions for the native library to prefill together with the next draft step."""
        return None

    def last_features(self, seqs: list[Sequence]) -> Tensor:
        """Return the head's hidden states of the position before the last, [sequences, width]."""
        assert isinstance(self.ops, EagleOps), "the native library has no split heads"
        if self.pages.hidden_state_cache is None:
            return self.ops.hidden_states(torch.tensor(self.last_cached_slots(seqs)))
        return self.pages.hidden_states_cpu(self.last_cached_slots(seqs))

    def draft_trees(self, growing: list[TreeInProgress]) -> None:
        if self._graph is not None:
            growing = build_trees_from_graph(
                growing, self._graph, self.pages, self.draft_temperature, build_dynamic_tree
            )
        if growing:
            self._expand_by_level(growing)

    def _expand_by_level(self, growing: list[TreeInProgress]) -> None:
        seqs = [each.seq for each in growing]
        top_k = MAX_WIDTH if self.all_greedy(seqs) else 0
        steps: NativeTreeSteps | TorchTreeSteps
        if self._native is not None:
            steps = NativeTreeSteps(self._native, self.pages, self.last_features(seqs), self.prefill_along())
        else:
            window = self.head.config.layer.window
            steps = TorchTreeSteps(self.ops, growing, self.last_cached_slots(seqs), window, top_k)
        expand_trees(growing, steps, self.child_sampler)

    def _draft_in_torch(self, seqs: list[Sequence], chains: list[ChainBuilder]) -> None:
        """Draft step by step in torch: the reference implementation."""
        depth, last = max(chain.budget.depth for chain in chains), [len(seq.tokens) - 1 for seq in seqs]
        rows, tokens = list(range(len(seqs))), [seq.tokens[-1] for seq in seqs]
        op = StepOp(
            *(tokens, last, self.last_cached_slots(seqs), rows, last, [1] * len(seqs), [0]),
            *(int(self.all_greedy(seqs)), max(last) + depth, *flatten_pages([seq.pages for seq in seqs])),
        )
        for offset in range(depth):
            draft_tokens = self.sample(seqs, offset, self.ops.run(op).logits)
            if not extend_chains(chains, draft_tokens):
                break
            positions = [position + offset + 1 for position in last]
            op = StepOp(draft_tokens.tokens, positions, rows, rows, positions, op.draft_mask, op.depths, op.top_k)

    def _step_natively(
        self, native: NativeChain, seqs: list[Sequence], chains: list[ChainBuilder], features: Tensor
    ) -> None:
        """Run native steps and sample here; a chain that has ended is left out, because it has no pages further on."""
        options = DraftOptions(prefill=self.prefill_along())
        for offset in range(max(chain.budget.depth for chain in chains)):
            live = [i for i, chain in enumerate(chains) if chain.is_open]
            if not live:
                break
            if len(live) < len(chains):
                features = features[live]
                seqs, chains = [seqs[i] for i in live], [chains[i] for i in live]
            request = self.native_request(seqs, chains)
            if offset:
                tokens = [chain.tokens[-1] for chain in chains]
                request = replace(
                    request, tokens=tokens, positions=[position + offset for position in request.positions]
                )
            extend_chains(chains, self.sample(seqs, offset, native.step(request, features, options)))
            options = NO_OPTIONS


class DistilledDrafter(EagleDrafter):
    """A small model distilled from the target that conditions on tokens only.

    With the native library it prefills new tokens together with its first draft step and reuses the KV of accepted
    draft tokens: the KV of a position depends on the tokens alone, bit for bit.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._unread: list[PrefillRange] = []
        self._drafted: dict[int, list[int]] = {}  # by sequence id, the chains of the current step

    def catch_up(self, ranges: list[PrefillRange]) -> None:
        self._drafted = {}
        if self._native is None or self._native_prefill is None:
            super().catch_up(ranges)
        else:
            self._unread = ranges

    def prefill_along(self) -> PrefillBuffers | None:
        ranges, self._unread = self._unread, []
        return self._native_prefill.pack(ranges) if self._native_prefill is not None and ranges else None

    def draft_chains(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains = super().draft_chains(seqs, budgets)
        if self._native is not None:
            self._drafted = {seq.id: chain.tokens for seq, chain in zip(seqs, chains, strict=True)}
        return chains

    def update_kv(self, results: list[StepResult]) -> None:
        super().update_kv(results)
        self._drafted = {}

    def num_known_positions(self, result: StepResult) -> int:
        draft, drafted = result.draft, self._drafted.get(result.scheduled.seq.id, [])
        if draft.source != self.name or list(draft.tokens) != drafted[: len(draft)]:
            return 0
        # The head ran the sequence's last token and all draft tokens but the last.
        return min(len(drafted), result.scheduled.seq.num_computed_tokens - result.scheduled.start)
