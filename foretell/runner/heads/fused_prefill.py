"""What a head keeps of places, by fused kernels: between two products stands one launch. `GraphPrefill` defines it."""

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
from foretell.runner.heads.fused_draft import Level, asked, attention_format, feed, head_norms, in_parts, product
from foretell.runner.heads.prefill import BEFORE, HOME, PLACE, SLOT, TOKEN, GraphPrefill, PrefillTable


@dataclass(frozen=True)
class PartNorm:
    """A norm of each of some parts of a row."""

    weights: Tensor  # [parts, width]
    eps: float


class FusedPrefill(GraphPrefill):
    """Of a head that `is_fused`. Of its last layer keys and values are all there is to keep."""

    leaves_out = True
    head: EagleHead

    def __init__(
        self, head: EagleHead, keys: Several[Tensor], values: Several[Tensor], features: Tensor, page_size: int
    ) -> None:
        super().__init__(head, keys, values, features, page_size)
        self.kept = features.view(-1, features.shape[-1])
        self.products, self.norms = LinearDispatch(head.like.dtype), _norms_before(head)

    def run(self, table: PrefillTable) -> None:
        *others, last = self.head.layers
        assert isinstance(last, HeadLayer), "a head is made of layers"
        x: Rows = self._read(table)
        if others:
            x = self._run(others, last, table)
        kv = product(self.products, last.attention.kv, x)  # without queries, which nobody asks
        rows, norms = Level(table.field(PLACE), table.field(SLOT)), head_norms(last.attention)
        rotate_and_store(kv, self.head.rope_table, rows, self.keys[-1], self.values[-1], norms)

    def _read(self, table: PrefillTable) -> Tensor:
        """Features are kept, and the first layer has its pairs."""
        head, embedded = self.head, self._embedded(table)
        assert head.feature_norm is not None, "asked before"
        states = table.inputs
        for norm in self.norms:
            states = norm_parts(states, norm.weights, norm.eps)
        fresh = product(self.products, head.fc, states)
        places = NewHiddenStates(fresh, self.kept, table.field(SLOT), table.field(BEFORE))
        scale, eps = head.config.embed_scale, head.config.layer.norm_eps
        return store_eagle_inputs(embedded, places, head.feature_norm.weight, scale, eps)

    def _embedded(self, table: PrefillTable) -> NormedTable:
        assert self.head.embed_norm is not None, "asked before"
        return NormedTable(self.head.embedding, table.field(TOKEN), self.head.embed_norm.weight)

    def _run(self, layers: list[nn.Module], last: HeadLayer, table: PrefillTable) -> Rows:
        """These layers, one after the other: what the last one reads."""
        head, config = self.head, self.head.config
        assert head.feature_norm is not None and last.attention_norm is not None, "it is not the first"
        before, eps = NormedTable(self.kept, table.field(BEFORE), head.feature_norm.weight), config.layer.norm_eps
        x: Rows
        x, residual = eagle_inputs(self._embedded(table), before, config.embed_scale, eps, config.norm_before_residual)
        change, look = None, Look.of(self, table)
        for index, layer in enumerate(layers):
            assert isinstance(layer, HeadLayer), "a head is made of layers"
            if layer.attention_norm is not None:
                format = attention_format(layer.attention)
                residual, x = add_norm(residual, change, layer.attention_norm.weight, eps, format=format)
            residual, change = feed(self.products, layer, residual, self._attend(layer, x, index, look))
        format = format_of(last.attention.kv)
        return add_norm(residual, change, last.attention_norm.weight, eps, format=format)[1]

    def _attend(self, layer: HeadLayer, x: Rows, index: int, look: Look) -> ResidualDelta:
        attention, text = layer.attention, LayerKV(self.keys[index], self.values[index])
        qkv, norms = asked(self.products, attention, x), head_norms(attention)
        rotate_and_store(qkv, self.head.rope_table, look.in_text, text.keys, text.values, norms)
        q = rotate_and_store(qkv, self.head.rope_table, look.alone, look.own.keys, look.own.values, norms)
        seen = draft_attention(q, text, look.own, look.sight, attention.config.scale, attention.config.window)
        return in_parts(self.products, attention.out, seen)


@dataclass(frozen=True)
class Look:
    """How the places that are read see what comes before them: each as if it were the one guess behind a text that ends
    there, for what was read with it lies in the pages by then."""

    in_text: Level
    alone: Level
    own: LayerKV  # [rows, 1, kv_heads, dim]
    sight: DraftLevel

    @classmethod
    def of(cls, reader: FusedPrefill, table: PrefillTable) -> Look:
        rows, like, places = table.sizes.rows, reader.keys[0], table.field(PLACE)
        keys, values = torch.empty(2, rows, 1, *like.shape[2:], dtype=like.dtype, device=like.device)
        pages = table.pages.index_select(0, table.field(HOME) // table.sizes.each)
        alone = Level(places, torch.arange(rows, device=like.device))
        sight = DraftLevel(places, pages, table.sizes.columns, rows=1, first=0, depth=0, width=1)
        return cls(Level(places, table.field(SLOT)), alone, LayerKV(keys, values), sight)


def _norms_before(head: EagleHead) -> list[PartNorm]:
    """Those that stand between the target's states and their projection, in their order."""
    found, eps = [], head.config.layer.norm_eps
    if head.config.target_norm:
        assert head.target_norm is not None, "borrow first"
        found.append(PartNorm(head.target_norm[None], head.target_norm_eps))
    if head.config.fc_norm:
        weights = [norm.weight.data for norm in head.tap_norms if isinstance(norm, Norm)]
        found.append(PartNorm(torch.stack(weights), eps))
    if head.fc_norm is not None:
        found.append(PartNorm(head.fc_norm.weight[None], eps))
    return found
