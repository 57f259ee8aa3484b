"""A head's draft by fused kernels: between two products of matrices stands one launch. `GraphDraft` defines it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from foretell.kernels.quant import QuantFormat
from foretell.kernels.triton.draft_attention import Cells, Sight, glance
from foretell.kernels.triton.draft_sample import Draw, guess
from foretell.kernels.triton.eagle_inputs import Side, read_pairs
from foretell.kernels.triton.norm import Change, add_norm
from foretell.kernels.triton.rotary import HeadNorms, turn_and_store
from foretell.kernels.triton.swiglu import gate
from foretell.kernels.triton.tree_topk import Branches, Noise, best_children, descend
from foretell.models.draft_heads import DraftHead, EagleHead
from foretell.models.draft_heads.layer import HeadAttention, HeadLayer
from foretell.models.layers import Linear
from foretell.models.quantize import CudaQuantizedLinear
from foretell.runner.cuda.linear_dispatch import LinearDispatch, Rows, rounding_of
from foretell.runner.heads.graph_draft import GraphDraft
from foretell.runner.heads.sampler import EXPANDED, DraftOutput
from foretell.runner.heads.tables import POSITION, PREVIOUS_SLOT, TOKEN, WIDTH, DraftShape, DraftTable


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
        depth, wide = table.shape.depth, max(1, table.shape.width)
        self.offsets = torch.arange(depth, device=table.device)[:, None, None].expand(-1, 1, wide).contiguous()
        firsts = torch.arange(table.shape.sequences, device=table.device)[:, None] * table.draft_rows
        within = torch.arange(table.draft_rows - 1, device=table.device).view(depth - 1, 1, wide) + 1
        self.slots = [firsts.flatten(), *(firsts + within).flatten(1)]

    def place(self, places: Tensor, last: int) -> list[Level]:
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
        self.state_rows = features.view(-1, features.shape[-1])
        self.levels: dict[DraftShape, Levels] = {}

    def _table(self, sizes: DraftShape) -> DraftTable:
        table = super()._table(sizes)
        if sizes not in self.levels:
            self.levels[sizes] = Levels(table)
        return table

    def run_chain(self, sizes: DraftShape, probs: Tensor | None) -> DraftOutput:
        table, head = self.tables[sizes], self.head
        found = DraftOutput(torch.empty(2, sizes.depth, sizes.sequences, device=table.device), probs)
        layers = FusedLayers(self, table)
        heats = table.temperatures if sizes.sampled else None
        tokens, feature = table.field(TOKEN), LevelStates(self.state_rows, table.field(PREVIOUS_SLOT))
        for offset in range(sizes.depth):
            states = layers(offset, tokens, feature, None)
            draw = None
            if heats is not None and found.probs is not None:
                draw = Draw(heats, table.noise_keys[:, offset], found.probs[offset])
            tokens = torch.empty(sizes.sequences, dtype=torch.int64, device=table.device)
            guess(states.logits, head.draft_ids, draw, tokens, found.readback[:, offset])
            feature = LevelStates(states.carry)
        return found

    def run_tree(self, sizes: DraftShape) -> DraftOutput:
        table = self.tables[sizes]
        layers, heats = FusedLayers(self, table), table.temperatures if sizes.sampled else None
        told = torch.zeros(
            sizes.depth, EXPANDED + 1, sizes.sequences, sizes.width, self.max_children, device=table.device
        )
        tokens, feature, branches = table.field(TOKEN), LevelStates(self.state_rows, table.field(PREVIOUS_SLOT)), None
        for depth in range(sizes.depth):
            states = layers(depth, tokens, feature, branches)
            noise = None if heats is None else Noise(heats, table.noise_keys[:, depth])
            best_children(states.logits, self.head.draft_ids, noise, told[depth, 0], told[depth, 1])
            if depth + 1 < sizes.depth:
                branches = descend(told[depth], table.field(WIDTH), branches, 1 + depth * sizes.width, table.draft_rows)
                tokens, feature = branches.tokens, LevelStates(states.carry, branches.before)
        return DraftOutput(told)


@dataclass(frozen=True)
class LevelStates:
    """What a level starts from: these rows, or all just so."""

    table: Tensor  # [rows, width]
    rows: Tensor | None = None


@dataclass(frozen=True)
class LevelOutput:
    """What a level gives."""

    logits: Tensor  # [texts * rows, outputs], in the head's own type
    carry: Tensor  # [texts * rows, width]: the feature of its places


class FusedLayers:
    """`EagleHead.step`, `logits` and `carry` over one draft's memory."""

    def __init__(self, steps: FusedDraft, table: DraftTable) -> None:
        self.head, self.table = steps.head, table
        self.config, self.eps = self.head.config, self.head.config.layer.norm_eps
        self.linear = LinearDispatch(self.head.like.dtype)
        self.pages_kv = [Cells(*both) for both in zip(steps.keys, steps.values, strict=True)]
        room = (2, len(self.pages_kv), table.shape.sequences, table.draft_rows, *steps.keys[0].shape[2:])
        keys, values = torch.empty(room, dtype=self.head.like.dtype, device=table.device)
        self.draft_kv = [Cells(*both) for both in zip(keys, values, strict=True)]
        self.levels = steps.levels[table.shape].place(table.field(POSITION), len(self.head.rope_table) - 1)

    def __call__(self, depth: int, tokens: Tensor, feature: LevelStates, branches: Branches | None) -> LevelOutput:
        """Of a level, which hangs on these branches, or of a chain's next tokens."""
        head, wide = self.head, max(1, self.table.shape.width)
        rows = 1 if branches is None else wide
        first = 0 if depth == 0 else 1 + (depth - 1) * wide
        ways = None if branches is None else branches.ways
        sight = Sight(self.table.field(POSITION), self.table.pages, self.table.columns, rows, first, depth, wide, ways)
        x: Rows
        change: Change | None = None
        x, residual = self._inputs(tokens, feature)
        for index, layer in enumerate(head.layers):
            assert isinstance(layer, HeadLayer), "a head is made of layers"
            if layer.attention_norm is not None:
                rounding = qkv_format(layer.attention)
                residual, x = add_norm(residual, change, layer.attention_norm.weight, self.eps, rounding=rounding)
            seen = self._attend(layer.attention, x, index, sight)
            residual, change = feed_forward(self.linear, layer, residual, seen)
        assert head.norm is not None, "asked before"
        states, normed = add_norm(residual, change, head.norm.weight, self.eps)
        assert isinstance(normed, Tensor), "no rounding was asked for"
        return LevelOutput(linear_rows(self.linear, head.output, normed), normed if self.config.norm_output else states)

    def _inputs(self, tokens: Tensor, feature: LevelStates) -> tuple[Tensor, Tensor]:
        head = self.head
        assert head.embed_norm is not None and head.feature_norm is not None, "asked before"
        embedded = Side(head.embedding, tokens, head.embed_norm.weight)
        before = Side(feature.table, feature.rows, head.feature_norm.weight)
        scale = self.config.embed_scale
        return read_pairs(embedded, before, scale, self.eps, self.config.norm_before_residual)

    def _attend(self, attention: HeadAttention, x: Rows, index: int, sight: Sight) -> Change:
        text, own, config = self.pages_kv[index], self.draft_kv[index], attention.config
        qkv, level = qkv_rows(self.linear, attention, x), self.levels[sight.depth]
        q = turn_and_store(qkv, self.head.rope_table, level, own.keys, own.values, head_norms(attention))
        return linear_parts(self.linear, attention.out, glance(q, text, own, sight, config.scale, config.window))


def linear_rows(products: LinearDispatch, layer: Linear, x: Rows) -> Tensor:
    """By the library, but in 8 bits: guesses may hang on how many rows stand beside them."""
    return products(layer, x, prefill=not isinstance(layer, CudaQuantizedLinear))


def linear_parts(products: LinearDispatch, layer: Linear, x: Rows) -> Change:
    """A product whose parts are left to whoever adds it."""
    return products.in_parts(layer, x, prefill=not isinstance(layer, CudaQuantizedLinear))


def qkv_rows(products: LinearDispatch, attention: HeadAttention, x: Rows) -> Tensor:
    """Queries, keys and values, side by side."""
    if attention.qkv is not None:
        return linear_rows(products, attention.qkv, x)
    return torch.cat([linear_rows(products, attention.q, x), linear_rows(products, attention.kv, x)], -1)


def qkv_format(attention: HeadAttention) -> QuantFormat | None:
    """In what `asked` wants its rows."""
    return None if attention.qkv is None else rounding_of(attention.qkv)


def feed_forward(products: LinearDispatch, layer: HeadLayer, residual: Tensor, seen: Change) -> tuple[Tensor, Change]:
    """What a layer makes of what it has seen: that added, and what is still to be."""
    ffn = layer.ffn
    residual, x = add_norm(residual, seen, layer.ffn_norm.weight, layer.eps, rounding=rounding_of(ffn.gate_up))
    mixed = gate(linear_rows(products, ffn.gate_up, x), ffn.gelu, rounding_of(ffn.down))
    return residual, linear_parts(products, ffn.down, mixed)


def head_norms(attention: HeadAttention) -> HeadNorms | None:
    """Those of its queries and keys, where it has any."""
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.config.norm_eps)
