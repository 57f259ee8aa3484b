"""Drafts of heads as one CUDA graph: draft tokens feed the next step on the device, and the host waits once.

`GraphDraft` is for autoregressive heads (EAGLE, MTP, distilled), `GraphForward` for heads that compute all positions in
one forward pass (block and Medusa heads).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from foretell.models.draft_heads import BlockHead, DistilledHead, EagleHead, MedusaHead, MtpHead
from foretell.models.draft_heads.layer import RopeRows
from foretell.runner.cuda.graphs import GraphCache
from foretell.runner.heads.kv import GraphAttention, GraphKV
from foretell.runner.heads.sampler import (
    DraftOutput,
    ExponentialRace,
    ProbsBuffer,
    TreeCandidates,
    TreeTopK,
    sample_tokens,
)
from foretell.runner.heads.tables import POSITION, PREVIOUS_SLOT, TOKEN, DraftRow, DraftShape, DraftTable, draft_shape


class ReadbackGraphCache(GraphCache[DraftShape, DraftOutput]):
    """Graph cache whose `readback` is on the host, valid until the next call. It waits for the work to finish."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buffers: dict[DraftShape, Tensor] = {}  # pinned

    def __call__(self, shape: DraftShape, run: Callable[[], DraftOutput], keep: bool = True) -> DraftOutput:
        if self.device.type != "cuda":
            return super().__call__(shape, run, keep)
        output = super().__call__(shape, lambda: self._copy_to_host(shape, run()), keep)
        torch.cuda.current_stream(self.device).synchronize()
        return output

    def _copy_to_host(self, shape: DraftShape, output: DraftOutput) -> DraftOutput:
        """Start the copy to the host. Work runs eagerly before a capture, so no capture allocates the buffer."""
        if shape not in self._buffers:
            self._buffers[shape] = torch.empty(output.readback.shape, dtype=output.readback.dtype, pin_memory=True)
        return replace(output, readback=self._buffers[shape].copy_(output.readback, non_blocking=True))


AutoregressiveHead = EagleHead | MtpHead | DistilledHead


class GraphDraft:
    """Drafts with autoregressive heads, in plain torch over memory of fixed size; on a CUDA device as a CUDA graph."""

    def __init__(
        self,
        head: AutoregressiveHead,
        keys: list[Tensor],
        values: list[Tensor],
        hidden_state_cache: Tensor | None,
        max_children: int,
    ) -> None:
        """`hidden_state_cache` [pages, page_size, 1, width] is None if the head conditions on tokens only."""
        self.head, self.keys, self.values, self.device = head, keys, values, keys[0].device
        self.hidden_state_cache = (
            None if hidden_state_cache is None else hidden_state_cache.view(-1, hidden_state_cache.shape[-1])
        )
        self.max_children = min(max_children, head.config.outputs)
        self.page_size = keys[0].shape[1]
        self.tables: dict[DraftShape, DraftTable] = {}
        self.probs_buffer = ProbsBuffer(head.config.outputs, self.device)
        self.graphs: GraphCache[DraftShape, DraftOutput] = ReadbackGraphCache(self.device)

    def chain(self, rows: list[DraftRow], depth: int) -> DraftOutput:
        """Draft a chain for each sequence, argmax or sampled."""
        shape = self.graphs.select(draft_shape(rows, depth))
        self._table(shape).upload(rows)
        probs = self.probs_buffer(shape)
        return self.graphs(shape, lambda: self.run_chain(shape, probs), shape.is_small).unpadded(len(rows))

    def tree(self, rows: list[DraftRow], depth: int) -> TreeCandidates:
        """Draft trees of the most likely branches, as wide as each sequence wants."""
        shape = self.graphs.select(draft_shape(rows, depth, self.max_children))
        self._table(shape).upload(rows)
        return TreeCandidates.from_readback(self.graphs(shape, lambda: self.run_tree(shape), shape.is_small).readback)

    def _table(self, shape: DraftShape) -> DraftTable:
        if shape not in self.tables:
            draft_rows = 1 + (shape.depth - 1) * max(1, shape.width)
            self.tables[shape] = DraftTable(shape, draft_rows, self.page_size, self.device)
        return self.tables[shape]

    def run_chain(self, shape: DraftShape, probs: Tensor | None) -> DraftOutput:
        """Draft chains; the distributions of sampled tokens go to `probs`."""
        table = self.tables[shape]
        kv, race = self._gather_kv(table), ExponentialRace(table, self.head.draft_ids)
        bias = kv.mask_bias(self._chain_mask(kv, table))
        tokens, hidden = table.field(TOKEN), self._previous_hidden_states(table)
        output = DraftOutput(torch.empty(2, shape.depth, shape.sequences, device=table.device), probs)
        for offset in range(shape.depth):
            attention = GraphAttention(kv, bias[:, offset : offset + 1], table.columns + offset)
            states = self.head.step(tokens, hidden, self._rope(table, offset), attention)
            tokens = sample_tokens(self.head.logits(states), race, output, offset)
            hidden = self.head.carry(states)
        return output

    def run_tree(self, shape: DraftShape) -> DraftOutput:
        table, width = self.tables[shape], shape.width
        top_k = TreeTopK(table, self.head.draft_ids, self.max_children)
        tree = TreeMask(self._gather_kv(table), table)
        states = self.head.step(
            table.field(TOKEN), self._previous_hidden_states(table), self._rope(table, 0), tree.attention()
        )
        top_k.add_level(self.head.logits(states))
        for depth in range(1, shape.depth):
            hidden = self.head.carry(states)
            tokens, parents = top_k.expand()
            previous = parents + torch.arange(shape.sequences, device=parents.device)[:, None] * tree.rows
            tree.expand(parents)
            rope = self._rope(table, depth, width)
            states = self.head.step(tokens, hidden.index_select(0, previous.flatten()), rope, tree.attention())
            top_k.add_level(self.head.logits(states))
        return DraftOutput(top_k.output)

    def _previous_hidden_states(self, table: DraftTable) -> Tensor:
        """Return the hidden states of the positions before the last, [sequences, width]."""
        if self.hidden_state_cache is None:
            return self.head.like.new_zeros(table.shape.sequences, self.head.config.layer.width)
        return self.hidden_state_cache.index_select(0, table.field(PREVIOUS_SLOT))

    def _gather_kv(self, table: DraftTable) -> GraphKV:
        return GraphKV(self.keys, self.values, self.head.config.layer, table.pages)

    def _rope(self, table: DraftTable, offset: int, rows: int = 1) -> RopeRows:
        """Return the RoPE rows at `offset` after the last position, `rows` times per sequence."""
        positions = table.field(POSITION) + offset
        return self.head.rope_rows_clamped(positions[:, None].expand(-1, rows).flatten())

    def _chain_mask(self, kv: GraphKV, table: DraftTable) -> Tensor:
        """Return the attention mask of all steps, [sequences, depth, columns]."""
        depths = torch.arange(table.shape.depth, device=self.device)
        context = kv.context_mask(table.field(POSITION), table.columns, depths, first_position=1)
        own = kv.window_mask(depths, torch.arange(kv.columns - table.columns, device=depths.device))
        return torch.cat([context, own.expand(len(context), -1, -1)], -1)


class TreeMask:
    """Attention mask of a tree level: each row sees its path. Draft columns follow the context, the root first."""

    def __init__(self, kv: GraphKV, table: DraftTable) -> None:
        self.kv, self.table = kv, table
        self.depth, self.rows, self.first = 0, 1, 0
        self.draft_column = torch.arange(kv.columns - table.columns, device=table.device)
        self.column_depth = (self.draft_column + table.shape.width - 1) // table.shape.width
        self.mask = (self.draft_column == 0).expand(table.shape.sequences, 1, -1)  # [sequences, rows, draft columns]

    def attention(self) -> GraphAttention:
        """Return the attention of the level's rows."""
        depths = torch.full((self.rows,), self.depth, device=self.draft_column.device)
        context = self.kv.context_mask(self.table.field(POSITION), self.table.columns, depths, first_position=1)
        mask = torch.cat([context, self.mask & self.kv.window_mask(depths, self.column_depth)], -1)
        return GraphAttention(self.kv, self.kv.mask_bias(mask), self.table.columns + self.first)

    def expand(self, parents: Tensor) -> None:
        """Go to the next level, whose rows have these parents in the last one, [sequences, width]."""
        width = parents.shape[1]
        self.depth, self.rows, self.first = self.depth + 1, width, 1 + self.depth * width
        paths = self.mask.gather(1, parents[..., None].expand(-1, -1, self.mask.shape[-1]))
        self.mask = paths | (self.draft_column == self.first + torch.arange(width, device=parents.device)[:, None])


ParallelHead = TypeVar("ParallelHead", BlockHead, MedusaHead)


class GraphForward(ABC, Generic[ParallelHead]):
    """Drafts with heads that compute the logits of all positions before the first token is chosen."""

    draft_rows = 0  # rows of a forward pass after the context

    def __init__(self, head: ParallelHead, page_size: int, device: torch.device, max_children: int) -> None:
        self.head: ParallelHead = head
        self.page_size, self.device = page_size, device
        self.max_children = min(max_children, head.config.outputs)
        self.tables: dict[DraftShape, DraftTable] = {}
        self.probs_buffer = ProbsBuffer(head.config.outputs, device)
        self.graphs: GraphCache[DraftShape, DraftOutput] = ReadbackGraphCache(device)

    def chain(self, rows: list[DraftRow], depth: int) -> DraftOutput:
        """Draft a chain for each sequence, argmax or sampled."""
        shape = self._upload(rows, draft_shape(rows, depth))
        probs = self.probs_buffer(shape)
        return self.graphs(shape, lambda: self.run_chain(shape, probs), shape.is_small).unpadded(len(rows))

    def tree(self, rows: list[DraftRow], depth: int) -> TreeCandidates:
        """Draft the top-k children of each position; with a Markov head, of each expanded node."""
        shape = self._upload(rows, draft_shape(rows, depth, self.max_children if self.depends_on_tokens else 1))
        return TreeCandidates.from_readback(self.graphs(shape, lambda: self.run_tree(shape), shape.is_small).readback)

    @property
    def depends_on_tokens(self) -> bool:
        """Return whether the logits of a position depend on the token before it."""
        return False

    def _upload(self, rows: list[DraftRow], requested: DraftShape) -> DraftShape:
        shape = self.graphs.select(requested)
        if shape not in self.tables:
            self.tables[shape] = DraftTable(shape, self.draft_rows, self.page_size, self.device)
        self.tables[shape].upload(rows)
        return shape

    def run_chain(self, shape: DraftShape, probs: Tensor | None) -> DraftOutput:
        """Draft chains; the distributions of sampled tokens go to `probs`."""
        table = self.tables[shape]
        states, logits = self.forward(table)
        race, tokens = ExponentialRace(table, self.head.draft_ids), table.field(TOKEN)
        output = DraftOutput(torch.empty(2, shape.depth, shape.sequences, device=table.device), probs)
        for offset in range(shape.depth):
            previous, level = tokens, self.add_markov_bias(logits[:, offset], tokens)
            tokens = sample_tokens(level, race, output, offset)
            self.write_confidence(states[:, offset], previous, output.readback[1, offset])
        return output

    def run_tree(self, shape: DraftShape) -> DraftOutput:
        table = self.tables[shape]
        _, logits = self.forward(table)
        top_k, tokens, rows = TreeTopK(table, self.head.draft_ids, self.max_children), table.field(TOKEN), 1
        for depth in range(shape.depth):
            if depth and self.depends_on_tokens:
                (tokens, _), rows = top_k.expand(), shape.width
            elif depth:
                top_k.depth += 1
            level = logits[:, depth, None].expand(-1, rows, -1).flatten(0, 1)
            top_k.add_level(self.add_markov_bias(level, tokens))
        return DraftOutput(top_k.output)

    @abstractmethod
    def forward(self, table: DraftTable) -> tuple[Tensor, Tensor]:
        """Return the states [sequences, depth, width] and their logits."""

    def add_markov_bias(self, logits: Tensor, previous: Tensor) -> Tensor:
        """Return the logits given the previous tokens."""
        return logits

    def write_confidence(self, states: Tensor, previous: Tensor, confidence: Tensor) -> None:
        """Overwrite the confidence if the head computes its own."""


class GraphBlockDraft(GraphForward[BlockHead]):
    """Drafts with block heads. The KV of a block stays in the copy of the pages made for its forward pass."""

    def __init__(self, head: BlockHead, keys: list[Tensor], values: list[Tensor], max_children: int) -> None:
        super().__init__(head, keys[0].shape[1], keys[0].device, max_children)
        self.keys, self.values, self.draft_rows = keys, values, head.config.block
        self.mask_embeddings = head.mask_embeddings.clone()  # copied here: it depends on a number on the host

    @property
    def depends_on_tokens(self) -> bool:
        return self.head.config.markov_rank > 0

    def forward(self, table: DraftTable) -> tuple[Tensor, Tensor]:
        config, head = self.head.config, self.head
        kv = GraphKV(self.keys, self.values, config.layer, table.pages)
        anchors, block = table.field(TOKEN), config.block
        x = head.block_inputs_with(anchors, self.mask_embeddings).flatten(0, 1)
        rows = torch.arange(block, device=self.device)
        rope = head.rope_rows((table.field(POSITION)[:, None] + rows).flatten())
        attention = GraphAttention(kv, kv.mask_bias(self._mask(kv, table, rows)), table.columns)
        states = head.run_layers(x, rope, attention).view(len(anchors), block, -1)
        states = head.draft_states(states)[:, : table.shape.depth]
        return states, head.output_logits(states)

    def _mask(self, kv: GraphKV, table: DraftTable, rows: Tensor) -> Tensor:
        """Return the attention mask [sequences, block, columns]; the window of all rows is the anchor's."""
        context = kv.context_mask(table.field(POSITION), table.columns, torch.full_like(rows, -1), first_position=0)
        column = torch.arange(kv.columns - table.columns, device=self.device)
        limit = rows[:, None] if self.head.config.causal_in_block else len(rows) - 1
        own = (column <= limit).expand(len(rows), -1)
        return torch.cat([context, own.expand(len(context), -1, -1)], -1)

    def add_markov_bias(self, logits: Tensor, previous: Tensor) -> Tensor:
        return logits + self.head.markov_logits(previous) if self.head.config.markov_rank else logits

    def write_confidence(self, states: Tensor, previous: Tensor, confidence: Tensor) -> None:
        if self.head.config.confidence:
            confidence.copy_(self.head.confidence_logits(states, previous).sigmoid())


class GraphMedusaDraft(GraphForward[MedusaHead]):
    """Drafts with Medusa heads, from the last hidden states only."""

    def __init__(self, head: MedusaHead, hidden_state_cache: Tensor, max_children: int) -> None:
        """`hidden_state_cache` [pages, page_size, 1, width]."""
        super().__init__(head, hidden_state_cache.shape[1], hidden_state_cache.device, max_children)
        self.hidden_state_cache = hidden_state_cache.view(-1, hidden_state_cache.shape[-1])

    def forward(self, table: DraftTable) -> tuple[Tensor, Tensor]:
        states = self.head(self.hidden_state_cache.index_select(0, table.field(PREVIOUS_SLOT)), table.shape.depth)
        return states, self.head.logits(states)
