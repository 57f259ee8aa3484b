"""Drafts of EAGLE-3 heads by fused kernels: one launch between two matrix products. `GraphDraft` defines them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from foretell.kernels.quant import QuantFormat
from foretell.kernels.triton.draft_attention import DraftLevel, LayerKV, draft_attention
from foretell.kernels.triton.draft_sample import DraftSampling, sample_draft_tokens
from foretell.kernels.triton.eagle_inputs import NormedTable, eagle_inputs
from foretell.kernels.triton.norm import ResidualDelta, add_norm
from foretell.kernels.triton.rotary import QKNorms, rotate_and_store
from foretell.kernels.triton.swiglu import gated_activation
from foretell.kernels.triton.tree_topk import DraftNoise, TreeLevel, select_children, topk_children
from foretell.models.draft_heads import DraftHead, EagleHead
from foretell.models.draft_heads.layer import HeadAttention, HeadLayer
from foretell.models.layers import Linear
from foretell.models.quantize import CudaQuantizedLinear
from foretell.runner.cuda.linear_dispatch import LinearDispatch, Rows, format_of
from foretell.runner.heads.graph_draft import GraphDraft
from foretell.runner.heads.sampler import EXPANDED, DraftOutput
from foretell.runner.heads.tables import POSITION, PREVIOUS_SLOT, TOKEN, WIDTH, DraftShape, DraftTable


def is_fused(head: DraftHead[Any], keys: list[Tensor], hidden_state_cache: Tensor | None) -> TypeGuard[EagleHead]:
    """Return whether the kernels support this head: EAGLE-3, with KV and hidden states in its own dtype."""
    if hidden_state_cache is None:
        return False
    kinds = {head.like.dtype, hidden_state_cache.dtype, *(each.dtype for each in keys)}
    return isinstance(head, EagleHead) and head.is_fusible and len(kinds) == 1


@dataclass(frozen=True)
class Level:
    """Rows of one level of a draft."""

    positions: Tensor  # [sequences * rows]
    slots: Tensor  # [sequences * rows], in the KV of the draft


class Levels:
    """The state that all drafts of a shape share; created before any capture."""

    def __init__(self, table: DraftTable) -> None:
        depth, width = table.shape.depth, max(1, table.shape.width)
        self.offsets = torch.arange(depth, device=table.device)[:, None, None].expand(-1, 1, width).contiguous()
        firsts = torch.arange(table.shape.sequences, device=table.device)[:, None] * table.draft_rows
        within = torch.arange(table.draft_rows - 1, device=table.device).view(depth - 1, 1, width) + 1
        self.slots = [firsts.flatten(), *(firsts + within).flatten(1)]

    def place(self, positions: Tensor, last: int) -> list[Level]:
        """Return the levels after these positions; positions beyond `last` are not used and clamped."""
        by_offset = (positions[:, None] + self.offsets).clamp_max_(last)
        by_level = [by_offset[0, :, 0].contiguous(), *by_offset[1:].flatten(1)]
        return [Level(*each) for each in zip(by_level, self.slots, strict=True)]


class FusedDraft(GraphDraft):
    """Drafts with fused kernels. The KV of draft tokens is apart from the pages, so nothing is copied."""

    head: EagleHead

    def __init__(
        self, head: EagleHead, keys: list[Tensor], values: list[Tensor], hidden_state_cache: Tensor, max_children: int
    ) -> None:
        super().__init__(head, keys, values, hidden_state_cache, max_children)
        self.hidden_state_rows = hidden_state_cache.view(-1, hidden_state_cache.shape[-1])
        self.levels: dict[DraftShape, Levels] = {}

    def _table(self, shape: DraftShape) -> DraftTable:
        table = super()._table(shape)
        if shape not in self.levels:
            self.levels[shape] = Levels(table)
        return table

    def run_chain(self, shape: DraftShape, probs: Tensor | None) -> DraftOutput:
        table, head = self.tables[shape], self.head
        output = DraftOutput(torch.empty(2, shape.depth, shape.sequences, device=table.device), probs)
        layers = FusedLayers(self, table)
        temperatures = table.temperatures if shape.sampled else None
        tokens, hidden = table.field(TOKEN), LevelStates(self.hidden_state_rows, table.field(PREVIOUS_SLOT))
        for offset in range(shape.depth):
            level = layers(offset, tokens, hidden, None)
            draw = None
            if temperatures is not None and output.probs is not None:
                draw = DraftSampling(temperatures, table.noise_keys[:, offset], output.probs[offset])
            tokens = torch.empty(shape.sequences, dtype=torch.int64, device=table.device)
            sample_draft_tokens(level.logits, head.draft_ids, draw, tokens, output.readback[:, offset])
            hidden = LevelStates(level.carry)
        return output

    def run_tree(self, shape: DraftShape) -> DraftOutput:
        table = self.tables[shape]
        layers, temperatures = FusedLayers(self, table), table.temperatures if shape.sampled else None
        readback = torch.zeros(
            shape.depth, EXPANDED + 1, shape.sequences, shape.width, self.max_children, device=table.device
        )
        hidden, branches = LevelStates(self.hidden_state_rows, table.field(PREVIOUS_SLOT)), None
        tokens = table.field(TOKEN)
        for depth in range(shape.depth):
            level = layers(depth, tokens, hidden, branches)
            noise = None if temperatures is None else DraftNoise(temperatures, table.noise_keys[:, depth])
            topk_children(level.logits, self.head.draft_ids, noise, readback[depth, 0], readback[depth, 1])
            if depth + 1 < shape.depth:
                branches = select_children(
                    readback[depth], table.field(WIDTH), branches, 1 + depth * shape.width, table.draft_rows
                )
                tokens, hidden = branches.tokens, LevelStates(level.carry, branches.parent_rows)
        return DraftOutput(readback)


@dataclass(frozen=True)
class LevelStates:
    """Hidden states that a level starts from: these rows of a table, or all of it."""

    table: Tensor  # [rows, width]
    rows: Tensor | None = None


@dataclass(frozen=True)
class LevelOutput:
    """Logits and hidden states of a level."""

    logits: Tensor  # [sequences * rows, outputs], in the head's dtype
    carry: Tensor  # [sequences * rows, width]: hidden states


class FusedLayers:
    """Computes `EagleHead.step`, `logits` and `carry` for one draft."""

    def __init__(self, steps: FusedDraft, table: DraftTable) -> None:
        self.head, self.table = steps.head, table
        self.config, self.eps = self.head.config, self.head.config.layer.norm_eps
        self.linear = LinearDispatch(self.head.like.dtype)
        self.pages_kv = [LayerKV(*both) for both in zip(steps.keys, steps.values, strict=True)]
        kv_shape = (2, len(self.pages_kv), table.shape.sequences, table.draft_rows, *steps.keys[0].shape[2:])
        keys, values = torch.empty(kv_shape, dtype=self.head.like.dtype, device=table.device)
        self.draft_kv = [LayerKV(*both) for both in zip(keys, values, strict=True)]
        self.levels = steps.levels[table.shape].place(table.field(POSITION), len(self.head.rope_table) - 1)

    def __call__(self, depth: int, tokens: Tensor, hidden: LevelStates, branches: TreeLevel | None) -> LevelOutput:
        """Run a level of a tree with these branches, or the next tokens of chains."""
        head, width = self.head, max(1, self.table.shape.width)
        rows = 1 if branches is None else width
        first = 0 if depth == 0 else 1 + (depth - 1) * width
        ways = None if branches is None else branches.ancestors
        sight = DraftLevel(
            self.table.field(POSITION), self.table.pages, self.table.columns, rows, first, depth, width, ways
        )
        x: Rows
        change: ResidualDelta | None = None
        x, residual = self._inputs(tokens, hidden)
        for index, layer in enumerate(head.layers):
            assert isinstance(layer, HeadLayer), "a head consists of layers"
            if layer.attention_norm is not None:
                format = qkv_format(layer.attention)
                residual, x = add_norm(residual, change, layer.attention_norm.weight, self.eps, format=format)
            attended = self._attend(layer.attention, x, index, sight)
            residual, change = feed_forward(self.linear, layer, residual, attended)
        assert head.norm is not None, "is_fused has checked"
        states, normed = add_norm(residual, change, head.norm.weight, self.eps)
        assert isinstance(normed, Tensor), "no quantization was requested"
        return LevelOutput(linear_rows(self.linear, head.output, normed), normed if self.config.norm_output else states)

    def _inputs(self, tokens: Tensor, hidden: LevelStates) -> tuple[Tensor, Tensor]:
        head = self.head
        assert head.embed_norm is not None and head.feature_norm is not None, "is_fused has checked"
        embedded = NormedTable(head.embedding, tokens, head.embed_norm.weight)
        before = NormedTable(hidden.table, hidden.rows, head.feature_norm.weight)
        scale = self.config.embed_scale
        return eagle_inputs(embedded, before, scale, self.eps, self.config.norm_before_residual)

    def _attend(self, attention: HeadAttention, x: Rows, index: int, sight: DraftLevel) -> ResidualDelta:
        text, own, config = self.pages_kv[index], self.draft_kv[index], attention.config
        qkv, level = qkv_rows(self.linear, attention, x), self.levels[sight.depth]
        q = rotate_and_store(qkv, self.head.rope_table, level, own.keys, own.values, head_norms(attention))
        return linear_parts(
            self.linear, attention.out, draft_attention(q, text, own, sight, config.scale, config.window)
        )


def linear_rows(products: LinearDispatch, layer: Linear, x: Rows) -> Tensor:
    """Multiply with the library, unless quantized: draft tokens may depend on the batch."""
    return products(layer, x, prefill=not isinstance(layer, CudaQuantizedLinear))


def linear_parts(products: LinearDispatch, layer: Linear, x: Rows) -> ResidualDelta:
    """Multiply to partial sums, which the next kernel adds up."""
    return products.in_parts(layer, x, prefill=not isinstance(layer, CudaQuantizedLinear))


def qkv_rows(products: LinearDispatch, attention: HeadAttention, x: Rows) -> Tensor:
    """Return queries, keys and values, concatenated."""
    if attention.qkv is not None:
        return linear_rows(products, attention.qkv, x)
    return torch.cat([linear_rows(products, attention.q, x), linear_rows(products, attention.kv, x)], -1)


def qkv_format(attention: HeadAttention) -> QuantFormat | None:
    """Return the format in which `qkv_rows` takes its rows."""
    return None if attention.qkv is None else format_of(attention.qkv)


def feed_forward(
    products: LinearDispatch, layer: HeadLayer, residual: Tensor, attended: ResidualDelta
) -> tuple[Tensor, ResidualDelta]:
    """Run the feed-forward of a layer; return the residual, and the change that the next norm adds."""
    ffn = layer.ffn
    residual, x = add_norm(residual, attended, layer.ffn_norm.weight, layer.eps, format=format_of(ffn.gate_up))
    mixed = gated_activation(linear_rows(products, ffn.gate_up, x), ffn.gelu, format_of(ffn.down))
    return residual, linear_parts(products, ffn.down, mixed)


def head_norms(attention: HeadAttention) -> QKNorms | None:
    """Return the norms of queries and keys; None without such norms."""
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return QKNorms(attention.q_norm.weight, attention.k_norm.weight, attention.config.norm_eps)
