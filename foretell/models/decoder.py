"""The decoder of all model families (`families.py`), which differ in their config only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.kernels.attention import AttentionLayout, SpanGroup, attend
from foretell.kernels.native.huge_pages import HugePageArena
from foretell.kernels.norm import rms_norm
from foretell.kernels.rotary import rotate
from foretell.kernels.store import store
from foretell.kv.cache import KVCache, LayerShape
from foretell.models.config import ModelConfig, Rope
from foretell.models.layers import Linear, Norm
from foretell.models.rope import query_scales, rope_table
from foretell.models.sharding import Ranks, Shard
from foretell.utils.system import trim_memory


@dataclass(frozen=True)
class ForwardBatch:
    """The input of a forward pass: new tokens of several sequences over their KV caches, prefill and decode alike."""

    tokens: Tensor  # [n]
    positions: Tensor  # [n]
    slots: Tensor  # [n] KV cache slot of each token
    groups: list[SpanGroup]


class RopeRows(NamedTuple):
    """The RoPE of the rows of a batch, [..., rows, 1, dim]; `query_scale` is 1 where it is None."""

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None


RopeTables = dict[Rope, RopeRows]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        sizes = config.layer_sizes[layer] if config.layer_sizes else None
        config = config.at(layer)
        self.config, self.layer = config, layer
        self.rope, self.window = config.ropes[layer], config.windows[layer]
        shared = None if sizes is None else sizes.kv_layer
        self.kv_layer = layer if shared is None else shared
        self.num_keys = config.kv_heads if shared is None else 0  # heads that this layer projects
        self.num_values = self.num_keys if sizes is None or sizes.projects_values else 0
        heads = config.heads + self.num_keys + self.num_values
        self.qkv = Linear(config.width, heads * config.head_dim, config.qkv_bias)
        self.out = Linear(config.heads * config.head_dim, config.width, config.out_bias)
        self.q_norm = self._norm(config.heads)
        self.k_norm = self._norm(config.kv_heads) if self.num_keys else None

    def forward(self, x: Tensor, batch: ForwardBatch, cache: KVCache, rope_rows: RopeTables) -> Tensor:
        c = self.config
        keys, values = cache.keys[self.kv_layer], cache.values[self.kv_layer]
        q, k, v = self.queries_keys_values(x, rope_rows[self.rope])
        if self.num_keys:
            store(k, keys, batch.slots)
            store(v, values, batch.slots)
        attended = attend(q, keys, values, batch.groups, c.scale, self.window, c.attention_softcap)
        projected: Tensor = self.out(attended)
        return projected

    def queries_keys_values(self, x: Tensor, rope: RopeRows) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [..., width] to heads [..., heads, dim]; queries and keys are normalized and rotated.

        A layer that attends to the keys of another one has no keys and values.
        """
        c = self.config
        qkv = self.qkv(x).unflatten(-1, (-1, c.head_dim))
        rotated, v = qkv[..., : c.heads + self.num_keys, :], qkv[..., c.heads + self.num_keys :, :]
        if self.num_values < self.num_keys:
            v = rotated[..., c.heads :, :]
        if c.v_norm:
            v = F.rms_norm(v, (c.head_dim,), eps=c.norm_eps)
        if self.q_norm is not None:
            q = self._normalize(rotated[..., : c.heads, :], self.q_norm)
            k = rotated[..., c.heads :, :]
            rotated = torch.cat([q, k if self.k_norm is None else self._normalize(k, self.k_norm)], -2)
        rotated = rotate(rotated, rope.cos, rope.sin)
        q, k = rotated[..., : c.heads, :], rotated[..., c.heads :, :]
        return (q if rope.query_scale is None else q * rope.query_scale), k, v

    def _norm(self, heads: int) -> Norm | None:
        if not self.config.qk_norm:
            return None
        return Norm(self.config.head_dim * (heads if self.config.full_qk_norm else 1))

    def _normalize(self, heads: Tensor, norm: Norm) -> Tensor:
        if not self.config.full_qk_norm:
            return rms_norm(heads, norm.weight, self.config.norm_eps)
        return rms_norm(heads.flatten(-2), norm.weight, self.config.norm_eps).view(heads.shape)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.width, 2 * config.ffn, config.mlp_bias)
        self.down = Linear(config.ffn, config.width, config.mlp_bias)
        self.gelu = config.activation == "gelu_tanh"

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        mixed: Tensor = self.down(gate.mul_(up))
        return mixed


class PerLayerInputs(nn.Module):
    """The inputs of each layer of Gemma 4 besides the residual stream, from the tokens and their embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.layers = config, config.layers
        total = config.layers * config.per_layer_width
        self.embed = nn.Parameter(torch.empty(config.per_layer_vocab, total), requires_grad=False)
        self.projection = Linear(config.width, total)
        self.norm = Norm(config.per_layer_width)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return [n, layers, per_layer_width] for tokens [n] and their scaled embeddings x [n, width]."""
        c = self.config
        shape = (len(tokens), self.layers, c.per_layer_width)
        embedded = F.embedding(tokens, self.embed) * torch.tensor(c.per_layer_width**0.5, dtype=x.dtype)
        projected = rms_norm((self.projection(x) * c.width**-0.5).view(shape), self.norm.weight, c.norm_eps)
        combined: Tensor = (projected + embedded.view(shape)) * 2**-0.5
        return combined


class PerLayerMixing(nn.Module):
    """Adds the per-layer input of a layer to its output, gated by the output itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.gate = Linear(config.width, config.per_layer_width)
        self.out = Linear(config.per_layer_width, config.width)
        self.norm = Norm(config.width)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        gated = F.gelu(self.gate(x), approximate="tanh") * inputs
        return x + rms_norm(self.out(gated), self.norm.weight, self.eps)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        config = config.at(layer)
        self.eps, self.residual_scale = config.norm_eps, config.residual_scale
        self.attention_norm = Norm(config.width) if config.pre_norms else None
        self.attention = Attention(config, layer)
        self.attention_post_norm = Norm(config.width) if config.sandwich_norms else None
        self.ffn_norm = Norm(config.width) if config.pre_norms else None
        self.ffn = FeedForward(config)
        self.ffn_post_norm = Norm(config.width) if config.sandwich_norms else None
        self.per_layer = PerLayerMixing(config) if config.per_layer_width else None
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False) if config.layer_scales else None
        self.ranks: Ranks | None = None

    def forward(
        self, x: Tensor, batch: ForwardBatch, cache: KVCache, rope_rows: RopeTables, inputs: Tensor | None = None
    ) -> Tensor:
        x = self.run(x, lambda normed: self.attention(normed, batch, cache, rope_rows))
        if self.per_layer is not None:
            x = self.per_layer(x, inputs)
        return x if self.scale is None else x * self.scale

    def run(self, x: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the layer over x [..., width] with this attention over normalized states."""
        attended = attention(self._normalize(x, self.attention_norm))
        x = x + self._add_ranks(attended, self.attention_post_norm)
        mixed = self.ffn(self._normalize(x, self.ffn_norm))
        return x + self._add_ranks(mixed, self.ffn_post_norm)

    def _add_ranks(self, x: Tensor, norm: Norm | None) -> Tensor:
        x = x if self.ranks is None else self.ranks.all_reduce(x)
        x = self._normalize(x, norm)
        return x if self.residual_scale == 1 else x * self.residual_scale

    def _normalize(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else rms_norm(x, norm.weight, self.eps)


class Decoder(nn.Module):
    """A decoder-only transformer, or the tensor-parallel shard of one rank."""

    def __init__(self, config: ModelConfig, shard: Shard | None = None) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.local = config if shard is None else shard.local_config(config)  # config of this rank's shard
        self.embed = nn.Parameter(torch.empty(self.local.vocab, config.width), requires_grad=False)
        self.per_layer = PerLayerInputs(config) if config.per_layer_width else None
        self.blocks = nn.ModuleList(Block(self.local, layer) for layer in range(config.layers))
        self.norm = Norm(config.width)
        self.head = Linear(config.width, self.local.vocab)
        if config.tied:
            self.head.weight = self.embed
        self.rope_tables: dict[Rope, Tensor] = {}
        self.query_scales: dict[Rope, Tensor] = {}  # [context], of RoPE that scales queries within the context
        self.ranks: Ranks | None = None

    def join_ranks(self, ranks: Ranks) -> None:
        """Connect the other tensor-parallel ranks."""
        self.ranks = ranks
        for block in self.blocks:
            assert isinstance(block, Block), "a decoder is made of blocks"
            block.ranks = ranks

    @property
    def num_logits(self) -> int:
        """Return the logits per row: the vocabulary on rank 0, its own range on other ranks."""
        return self.config.vocab if self.shard is None or self.shard.rank == 0 else self.local.vocab

    @property
    def local_tokens(self) -> range:
        """Return the tokens whose rows of the embedding and LM head are on this rank."""
        return range(self.config.vocab) if self.shard is None else self.shard.vocab(self.config)

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        return kv_shapes(self.local)

    def attention_layout(self, page_size: int) -> AttentionLayout:
        """Return the settings of attention over pages of this size."""
        return attention_layout(self.local, page_size, self.embed)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def is_packed(self) -> bool:
        """Return whether linear layers are packed, which frees their float weights."""
        return self.head.weight is None

    @property
    def can_share_weights(self) -> bool:
        """Return whether embedding and LM head are complete and in floats, for draft heads to share."""
        return self.shard is None and (self.config.tied or not self.is_packed)

    def prepare(self, context: int) -> None:
        """Pack the weights and build RoPE tables for sequences of up to `context` tokens."""
        arena = HugePageArena()
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(arena)
        trim_memory()
        for rope, layer in {rope: layer for layer, rope in enumerate(self.config.ropes)}.items():
            table = rope_table(rope, self.config.at(layer).head_dim, context)
            self.rope_tables[rope] = table.to(self.embed.device, self.embed.dtype)
            if rope.query_growth and context > rope.original_context:
                self.query_scales[rope] = query_scales(rope, context).to(self.embed.device)

    def forward(
        self, batch: ForwardBatch, cache: KVCache, hidden_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the states after the last layer, before the final norm, [n, width], and after `hidden_layers`."""
        x = self.scale_embeddings(self.embed_tokens(batch.tokens))
        rope_rows = {
            rope: rope_rows_at(table, batch.positions, self.query_scales.get(rope))
            for rope, table in self.rope_tables.items()
        }
        inputs = None if self.per_layer is None else self.per_layer(batch.tokens, x)
        stored = {0: x}
        for layer, block in enumerate(self.blocks):
            x = block(x, batch, cache, rope_rows, None if inputs is None else inputs[:, layer])
            if layer + 1 in hidden_layers:
                stored[layer + 1] = x
        return x, [stored[index] for index in hidden_layers]

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [n, vocab] of states [n, width], in float32."""
        logits: Tensor = self.head(rms_norm(states, self.norm.weight, self.config.norm_eps))
        return self.finish_logits(logits.float())

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Gather the output of the LM head of all ranks on rank 0, and scale and cap it."""
        if self.ranks is not None and self.shard is not None:
            logits = self.ranks.gather(logits, tuple(len(each.vocab(self.config)) for each in self.shard.all_ranks))
        return final_logits(self.config, logits)

    def scale_embeddings(self, x: Tensor) -> Tensor:
        """Scale embeddings for the first layer, in the dtype of the model, as in training."""
        scale = self.config.embed_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return embeddings [n, width], summed over ranks: a rank contributes zeros for tokens of other ranks."""
        if self.ranks is None:
            return F.embedding(tokens, self.embed)
        local = self.local_tokens
        is_remote = (tokens < local.start) | (tokens >= local.stop)
        rows = F.embedding((tokens - local.start).masked_fill(is_remote, 0), self.embed)
        return self.ranks.all_reduce(rows.masked_fill(is_remote[:, None], 0.0))


def attention_layout(config: ModelConfig, page_size: int, like: Tensor) -> AttentionLayout:
    """Return the settings of attention over pages of this size, with the dtype and device of `like`."""
    by_window = {}
    for window, sizes in zip(config.windows, config.layer_sizes, strict=False):
        by_window[window] = config.heads // sizes.kv_heads
    windows, group = frozenset(config.windows), config.heads // config.kv_heads
    return AttentionLayout(page_size, group, windows, like.dtype, like.device, tuple(by_window.items()))


def kv_shapes(config: ModelConfig) -> tuple[LayerShape, ...]:
    """Return the KV of each layer; a layer that attends to another one's has no heads of its own."""
    if not config.layer_sizes:
        return (LayerShape(config.kv_heads, config.head_dim),) * config.layers
    return tuple(
        LayerShape(0 if each.kv_layer is not None else each.kv_heads, each.head_dim) for each in config.layer_sizes
    )


def rope_rows_at(table: Tensor, positions: Tensor, query_scale: Tensor | None = None) -> RopeRows:
    """Return the RoPE of rows at these positions, [...], from the tables of the model."""
    rows = table[positions]
    scale = None if query_scale is None else query_scale[positions][..., None, None].to(table.dtype)
    return RopeRows(rows[..., :1, :], rows[..., 1:, :], scale)


def has_plain_logits(config: ModelConfig) -> bool:
    """Return whether logits are the output of the LM head as it is."""
    return config.logit_scale == 1 and config.logit_softcap is None


def final_logits(config: ModelConfig, logits: Tensor) -> Tensor:
    """Scale and cap the output of the LM head (Granite, Gemma)."""
    if config.logit_scale != 1:
        logits = logits * config.logit_scale
    cap = config.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def first_layers(model: Decoder, layers: int) -> Decoder:
    """Return the first `layers` of a decoder with its final norm and LM head, sharing all weights (early exit)."""
    early = copy.copy(model)
    early._modules = dict(model._modules)
    early.blocks = nn.ModuleList(list(model.blocks)[:layers])
    early.config, early.local = _shortened(model.config, layers), _shortened(model.local, layers)
    return early


def _shortened(config: ModelConfig, layers: int) -> ModelConfig:
    return replace(
        config,
        layers=layers,
        ropes=config.ropes[:layers],
        windows=config.windows[:layers],
        layer_sizes=config.layer_sizes[:layers],
    )
