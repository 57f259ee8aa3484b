"""Prefill of EAGLE-3 heads by fused kernels: one launch between two matrix products. `GraphPrefill` defines it."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretell.kernels.triton.draft_attention import DraftLevel, LayerKV, draft_attention
from foretell.kernels.triton.eagle_inputs import NewHiddenStates, NormedTable, eagle_inputs, store_eagle_inputs
from foretell.kernels.triton.norm import ResidualDelta, add_norm, norm_parts
from foretell.kernels.triton.rotary import rotate_and_store
from foretell.models.draft_heads import EagleHead
from foretell.models.draft_heads.layer import HeadLayer
from foretell.models.layers import Norm
from foretell.runner.cuda.linear_dispatch import LinearDispatch, Rows, format_of
from foretell.runner.heads.fused_draft import (
    Level,
    feed_forward,
    head_norms,
    linear_parts,
    linear_rows,
    qkv_format,
    qkv_rows,
)
from foretell.runner.heads.prefill import GRID_INDEX, POSITION, PREVIOUS_SLOT, SLOT, TOKEN, GraphPrefill, PrefillTable


@dataclass(frozen=True)
class PartNorm:
    """A norm of each part of a row."""

    weights: Tensor  # [parts, width]
    eps: float


class FusedPrefill(GraphPrefill):
    """Prefills a head that `is_fused`. Of the last layer only keys and values are computed."""

    skips_padding = True
    head: EagleHead

    def __init__(
        self,
        head: EagleHead,
        keys: Several[Tensor],
        values: Several[Tensor],
        hidden_state_cache: Tensor,
        page_size: int,
    ) -> None:
        super().__init__(head, keys, values, hidden_state_cache, page_size)
        self.hidden_state_rows = hidden_state_cache.view(-1, hidden_state_cache.shape[-1])
        self.linear, self.norms = LinearDispatch(head.like.dtype), _input_norms(head)

    def run(self, table: PrefillTable) -> None:
        *others, last = self.head.layers
        assert isinstance(last, HeadLayer), "a head consists of layers"
        x: Rows = self._first_inputs(table)
        if others:
            x = self._run_layers(others, last, table)
        kv = linear_rows(self.linear, last.attention.kv, x)  # the last layer needs no queries
        rows, norms = Level(table.field(POSITION), table.field(SLOT)), head_norms(last.attention)
        rotate_and_store(kv, self.head.rope_table, rows, self.keys[-1], self.values[-1], norms)

    def _first_inputs(self, table: PrefillTable) -> Tensor:
        """Store the hidden states and return the inputs of the first layer."""
        head, embedded = self.head, self._embedded(table)
        assert head.feature_norm is not None, "is_fused has checked"
        states = table.inputs
        for norm in self.norms:
            states = norm_parts(states, norm.weights, norm.eps)
        projected = linear_rows(self.linear, head.fc, states)
        stored = NewHiddenStates(projected, self.hidden_state_rows, table.field(SLOT), table.field(PREVIOUS_SLOT))
        scale, eps = head.config.embed_scale, head.config.layer.norm_eps
        return store_eagle_inputs(embedded, stored, head.feature_norm.weight, scale, eps)

    def _embedded(self, table: PrefillTable) -> NormedTable:
        assert self.head.embed_norm is not None, "is_fused has checked"
        return NormedTable(self.head.embedding, table.field(TOKEN), self.head.embed_norm.weight)

    def _run_layers(self, layers: list[nn.Module], last: HeadLayer, table: PrefillTable) -> Rows:
        """Run these layers and return the inputs of the last one."""
        head, config = self.head, self.head.config
        assert head.feature_norm is not None and last.attention_norm is not None, "it is not the first layer"
        before, eps = (
            NormedTable(self.hidden_state_rows, table.field(PREVIOUS_SLOT), head.feature_norm.weight),
            config.layer.norm_eps,
        )
        x: Rows
        x, residual = eagle_inputs(self._embedded(table), before, config.embed_scale, eps, config.norm_before_residual)
        change, inputs = None, FusedPrefillAttention.of(self, table)
        for index, layer in enumerate(layers):
            assert isinstance(layer, HeadLayer), "a head consists of layers"
            if layer.attention_norm is not None:
                format = qkv_format(layer.attention)
                residual, x = add_norm(residual, change, layer.attention_norm.weight, eps, format=format)
            residual, change = feed_forward(self.linear, layer, residual, self._attend(layer, x, index, inputs))
        format = format_of(last.attention.kv)
        return add_norm(residual, change, last.attention_norm.weight, eps, format=format)[1]

    def _attend(self, layer: HeadLayer, x: Rows, index: int, inputs: FusedPrefillAttention) -> ResidualDelta:
        attention, pages_kv = layer.attention, LayerKV(self.keys[index], self.values[index])
        qkv, norms = qkv_rows(self.linear, attention, x), head_norms(attention)
        rotate_and_store(qkv, self.head.rope_table, inputs.in_pages, pages_kv.keys, pages_kv.values, norms)
        q = rotate_and_store(
            qkv,
            self.head.rope_table,
            inputs.alone,
            inputs.own.keys,
            inputs.own.values,
            norms,
        )
        attended = draft_attention(
            q, pages_kv, inputs.own, inputs.sight, attention.config.scale, attention.config.window
        )
        return linear_parts(self.linear, attention.out, attended)


@dataclass(frozen=True)
class FusedPrefillAttention:
    """Attention of prefilled positions by the draft kernel: each is treated as the only draft token after its context.

    The positions prefilled together with it are in the pages by then.
    """

    in_pages: Level
    alone: Level
    own: LayerKV  # [rows, 1, kv_heads, dim]
    sight: DraftLevel

    @classmethod
    def of(cls, prefill: FusedPrefill, table: PrefillTable) -> FusedPrefillAttention:
        rows, like, positions = table.shape.rows, prefill.keys[0], table.field(POSITION)
        keys, values = torch.empty(2, rows, 1, *like.shape[2:], dtype=like.dtype, device=like.device)
        pages = table.pages.index_select(0, table.field(GRID_INDEX) // table.shape.rows_per_sequence)
        alone = Level(positions, torch.arange(rows, device=like.device))
        sight = DraftLevel(positions, pages, table.shape.columns, rows=1, first=0, depth=0, width=1)
        return cls(Level(positions, table.field(SLOT)), alone, LayerKV(keys, values), sight)


def _input_norms(head: EagleHead) -> list[PartNorm]:
    """Return the norms between the target's hidden states and their projection, in order."""
    norms, eps = [], head.config.layer.norm_eps
    if head.config.target_norm:
        assert head.target_norm is not None, "the target's weights are shared before"
        norms.append(PartNorm(head.target_norm[None], head.target_norm_eps))
    if head.config.fc_norm:
        weights = [norm.weight.data for norm in head.tap_norms if isinstance(norm, Norm)]
        norms.append(PartNorm(torch.stack(weights), eps))
    if head.fc_norm is not None:
        norms.append(PartNorm(head.fc_norm.weight[None], eps))
    return norms
