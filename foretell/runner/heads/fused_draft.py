"""A head's draft by fused kernels: between two products of matrices stands one launch. `GraphDraft` defines it."""

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
from foretell.runner.heads.sampler import FOLLOWED, DraftOutput
from foretell.runner.heads.tables import BEFORE, PLACE, TOKEN, WIDE, DraftShape, DraftTable


def is_fused(head: DraftHead[Any], keys: list[Tensor], features: Tensor | None) -> TypeGuard[EagleHead]:
    """Whether the kernels serve this head: EAGLE's third generation, with all it keeps in its own type."""
    if features is None:
        return False
    kinds = {head.like.dtype, features.dtype, *(each.dtype for each in keys)}
    return isinstance(head, EagleHead) and head.is_fusible and len(kinds) == 1


@dataclass(frozen=True)
class Level:
    """Where its rows stand: in the text, and among the guesses of all texts."""

    positions: Tensor  # [texts * rows]
    slots: Tensor  # [texts * rows]


class Levels:
    """What does not change from draft to draft of some sizes; made before anything is recorded."""

    def __init__(self, table: DraftTable) -> None:
        depth, wide = table.sizes.depth, max(1, table.sizes.wide)
        self.offsets = torch.arange(depth, device=table.device)[:, None, None].expand(-1, 1, wide).contiguous()
        firsts = torch.arange(table.sizes.texts, device=table.device)[:, None] * table.guesses
        within = torch.arange(table.guesses - 1, device=table.device).view(depth - 1, 1, wide) + 1
        self.slots = [firsts.flatten(), *(firsts + within).flatten(1)]

    def stand(self, places: Tensor, last: int) -> list[Level]:
        """Behind these places of texts; behind a text's end, which is at `last` at most, anything will do."""
        positions = (places[:, None] + self.offsets).clamp_max_(last)
        by_level = [positions[0, :, 0].contiguous(), *positions[1:].flatten(1)]
        return [Level(*each) for each in zip(by_level, self.slots, strict=True)]


class FusedDraft(GraphDraft):
    """What is guessed lies apart from the pages, and nothing is copied."""

    head: EagleHead

    def __init__(
        self, head: EagleHead, keys: list[Tensor], values: list[Tensor], features: Tensor, most_children: int
    ) -> None:
        super().__init__(head, keys, values, features, most_children)
        self.kept = features.view(-1, features.shape[-1])
        self.levels: dict[DraftShape, Levels] = {}

    def _table(self, sizes: DraftShape) -> DraftTable:
        table = super()._table(sizes)
        if sizes not in self.levels:
            self.levels[sizes] = Levels(table)
        return table

    def run_chain(self, sizes: DraftShape, probs: Tensor | None) -> DraftOutput:
        table, head = self.tables[sizes], self.head
        found = DraftOutput(torch.empty(2, sizes.depth, sizes.texts, device=table.device), probs)
        layers = FusedLayers(self, table)
        heats = table.heats if sizes.drawn else None
        tokens, feature = table.field(TOKEN), Feature(self.kept, table.field(BEFORE))
        for offset in range(sizes.depth):
            states = layers(offset, tokens, feature, None)
            draw = None
            if heats is not None and found.probs is not None:
                draw = DraftSampling(heats, table.keys[:, offset], found.probs[offset])
            tokens = torch.empty(sizes.texts, dtype=torch.int64, device=table.device)
            sample_draft_tokens(states.logits, head.draft_ids, draw, tokens, found.told[:, offset])
            feature = Feature(states.carry)
        return found

    def run_tree(self, sizes: DraftShape) -> DraftOutput:
        table = self.tables[sizes]
        layers, heats = FusedLayers(self, table), table.heats if sizes.drawn else None
        told = torch.zeros(sizes.depth, FOLLOWED + 1, sizes.texts, sizes.wide, self.children, device=table.device)
        tokens, feature, branches = table.field(TOKEN), Feature(self.kept, table.field(BEFORE)), None
        for depth in range(sizes.depth):
            states = layers(depth, tokens, feature, branches)
            noise = None if heats is None else DraftNoise(heats, table.keys[:, depth])
            topk_children(states.logits, self.head.draft_ids, noise, told[depth, 0], told[depth, 1])
            if depth + 1 < sizes.depth:
                branches = select_children(
                    told[depth], table.field(WIDE), branches, 1 + depth * sizes.wide, table.guesses
                )
                tokens, feature = branches.tokens, Feature(states.carry, branches.parent_rows)
        return DraftOutput(told)


@dataclass(frozen=True)
class Feature:
    """What a level starts from: these rows, or all just so."""

    table: Tensor  # [rows, width]
    rows: Tensor | None = None


@dataclass(frozen=True)
class Stepped:
    """What a level gives."""

    logits: Tensor  # [texts * rows, outputs], in the head's own type
    carry: Tensor  # [texts * rows, width]: the feature of its places


class FusedLayers:
    """`EagleHead.step`, `logits` and `carry` over one draft's memory."""

    def __init__(self, steps: FusedDraft, table: DraftTable) -> None:
        self.head, self.table = steps.head, table
        self.config, self.eps = self.head.config, self.head.config.layer.norm_eps
        self.products = LinearDispatch(self.head.like.dtype)
        self.text = [LayerKV(*both) for both in zip(steps.keys, steps.values, strict=True)]
        room = (2, len(self.text), table.sizes.texts, table.guesses, *steps.keys[0].shape[2:])
        keys, values = torch.empty(room, dtype=self.head.like.dtype, device=table.device)
        self.own = [LayerKV(*both) for both in zip(keys, values, strict=True)]
        self.levels = steps.levels[table.sizes].stand(table.field(PLACE), len(self.head.rope_table) - 1)

    def __call__(self, depth: int, tokens: Tensor, feature: Feature, branches: TreeLevel | None) -> Stepped:
        """Of a level, which hangs on these branches, or of a chain's next tokens."""
        head, wide = self.head, max(1, self.table.sizes.wide)
        rows = 1 if branches is None else wide
        first = 0 if depth == 0 else 1 + (depth - 1) * wide
        ways = None if branches is None else branches.ancestors
        sight = DraftLevel(
            self.table.field(PLACE), self.table.pages, self.table.columns, rows, first, depth, wide, ways
        )
        x: Rows
        change: ResidualDelta | None = None
        x, residual = self._read(tokens, feature)
        for index, layer in enumerate(head.layers):
            assert isinstance(layer, HeadLayer), "a head is made of layers"
            if layer.attention_norm is not None:
                format = attention_format(layer.attention)
                residual, x = add_norm(residual, change, layer.attention_norm.weight, self.eps, format=format)
            seen = self._attend(layer.attention, x, index, sight)
            residual, change = feed(self.products, layer, residual, seen)
        assert head.norm is not None, "asked before"
        states, normed = add_norm(residual, change, head.norm.weight, self.eps)
        assert isinstance(normed, Tensor), "no format was asked for"
        return Stepped(product(self.products, head.output, normed), normed if self.config.norm_output else states)

    def _read(self, tokens: Tensor, feature: Feature) -> tuple[Tensor, Tensor]:
        head = self.head
        assert head.embed_norm is not None and head.feature_norm is not None, "asked before"
        embedded = NormedTable(head.embedding, tokens, head.embed_norm.weight)
        before = NormedTable(feature.table, feature.rows, head.feature_norm.weight)
        scale = self.config.embed_scale
        return eagle_inputs(embedded, before, scale, self.eps, self.config.norm_before_residual)

    def _attend(self, attention: HeadAttention, x: Rows, index: int, sight: DraftLevel) -> ResidualDelta:
        text, own, config = self.text[index], self.own[index], attention.config
        qkv, level = asked(self.products, attention, x), self.levels[sight.depth]
        q = rotate_and_store(qkv, self.head.rope_table, level, own.keys, own.values, head_norms(attention))
        return in_parts(self.products, attention.out, draft_attention(q, text, own, sight, config.scale, config.window))


def product(products: LinearDispatch, layer: Linear, x: Rows) -> Tensor:
    """By the library, but in 8 bits: guesses may hang on how many rows stand beside them."""
    return products(layer, x, reads=not isinstance(layer, CudaQuantizedLinear))


def in_parts(products: LinearDispatch, layer: Linear, x: Rows) -> ResidualDelta:
    """A product whose parts are left to whoever adds it."""
    return products.in_parts(layer, x, reads=not isinstance(layer, CudaQuantizedLinear))


def asked(products: LinearDispatch, attention: HeadAttention, x: Rows) -> Tensor:
    """Queries, keys and values, side by side."""
    if attention.qkv is not None:
        return product(products, attention.qkv, x)
    return torch.cat([product(products, attention.q, x), product(products, attention.kv, x)], -1)


def attention_format(attention: HeadAttention) -> QuantFormat | None:
    """In what `asked` wants its rows."""
    return None if attention.qkv is None else format_of(attention.qkv)


def feed(
    products: LinearDispatch, layer: HeadLayer, residual: Tensor, seen: ResidualDelta
) -> tuple[Tensor, ResidualDelta]:
    """What a layer makes of what it has seen: that added, and what is still to be."""
    ffn = layer.ffn
    residual, x = add_norm(residual, seen, layer.ffn_norm.weight, layer.eps, format=format_of(ffn.gate_up))
    mixed = gated_activation(product(products, ffn.gate_up, x), ffn.gelu, format_of(ffn.down))
    return residual, in_parts(products, ffn.down, mixed)


def head_norms(attention: HeadAttention) -> QKNorms | None:
    """Those of its queries and keys, where it has any."""
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return QKNorms(attention.q_norm.weight, attention.k_norm.weight, attention.config.norm_eps)
