"""The decoder of all model families: Llama, Mistral, SmolLM2, Qwen 2 and 3, Gemma 3 differ in their config only."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.kernels.attention import SpanGroup, attend
from foretell.kernels.native.huge_pages import HugePageArena
from foretell.kernels.norm import rms_norm
from foretell.kernels.rotary import rotate
from foretell.kernels.store import store
from foretell.kv.cache import KVCache, LayerShape
from foretell.models.config import ModelConfig, Rope
from foretell.models.layers import Linear, Norm
from foretell.models.rope import rope_table
from foretell.models.sharding import Ranks, Shard
from foretell.utils.system import trim_memory


@dataclass(frozen=True)
class ForwardBatch:
    """The input of a forward pass: new tokens of several sequences over their KV caches, prefill and decode alike."""

    tokens: Tensor  # [n]
    positions: Tensor  # [n]
    slots: Tensor  # [n] KV cache slot of each token
    groups: list[SpanGroup]


RopeTables = dict[Rope, tuple[Tensor, Tensor]]  # cosines and sines of the positions of a batch


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.rope, self.window = config.ropes[layer], config.windows[layer]
        heads = config.heads + 2 * config.kv_heads
        self.qkv = Linear(config.width, heads * config.head_dim, config.qkv_bias)
        self.out = Linear(config.heads * config.head_dim, config.width, config.out_bias)
        self.q_norm = Norm(config.head_dim) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim) if config.qk_norm else None

    def forward(self, x: Tensor, batch: ForwardBatch, cache: KVCache, rope_rows: RopeTables) -> Tensor:
        c = self.config
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        qkv = self.qkv(x).view(len(x), -1, c.head_dim)
        rotated, value = qkv[:, : -c.kv_heads], qkv[:, -c.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(rotated[:, : c.heads], self.q_norm.weight, c.norm_eps)
            k = rms_norm(rotated[:, c.heads :], self.k_norm.weight, c.norm_eps)
            rotated = torch.cat([q, k], 1)
        rotated = rotate(rotated, *rope_rows[self.rope])
        store(rotated[:, c.heads :], keys, batch.slots)
        store(value, values, batch.slots)
        attended = attend(rotated[:, : c.heads], keys, values, batch.groups, c.scale, self.window)
        projected: Tensor = self.out(attended)
        return projected


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


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.attention_norm = Norm(config.width)
        self.attention = Attention(config, layer)
        self.attention_post_norm = Norm(config.width) if config.sandwich_norms else None
        self.ffn_norm = Norm(config.width)
        self.ffn = FeedForward(config)
        self.ffn_post_norm = Norm(config.width) if config.sandwich_norms else None
        self.ranks: Ranks | None = None

    def forward(self, x: Tensor, batch: ForwardBatch, cache: KVCache, rope_rows: RopeTables) -> Tensor:
        attended = self.attention(rms_norm(x, self.attention_norm.weight, self.eps), batch, cache, rope_rows)
        x = x + self._add_ranks(attended, self.attention_post_norm)
        mixed = self.ffn(rms_norm(x, self.ffn_norm.weight, self.eps))
        return x + self._add_ranks(mixed, self.ffn_post_norm)

    def _add_ranks(self, x: Tensor, norm: Norm | None) -> Tensor:
        x = x if self.ranks is None else self.ranks.all_reduce(x)
        return x if norm is None else rms_norm(x, norm.weight, self.eps)


class Decoder(nn.Module):
    """A decoder-only transformer, or the tensor-parallel shard of one rank."""

    def __init__(self, config: ModelConfig, shard: Shard | None = None) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.local = config if shard is None else shard.local_config(config)  # config of this rank's shard
        self.embed = nn.Parameter(torch.empty(self.local.vocab, config.width), requires_grad=False)
        self.blocks = nn.ModuleList(Block(self.local, layer) for layer in range(config.layers))
        self.norm = Norm(config.width)
        self.head = Linear(config.width, self.local.vocab)
        if config.tied:
            self.head.weight = self.embed
        self.rope_tables: dict[Rope, Tensor] = {}
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
        return (LayerShape(self.local.kv_heads, self.config.head_dim),) * self.config.layers

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
        for rope in set(self.config.ropes):
            table = rope_table(rope, self.config.head_dim, context)
            self.rope_tables[rope] = table.to(self.embed.device, self.embed.dtype)

    def forward(
        self, batch: ForwardBatch, cache: KVCache, hidden_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the states after the last layer, before the final norm, [n, width], and after `hidden_layers`."""
        x = self.embed_tokens(batch.tokens)
        if self.config.embed_scale != 1.0:
            x = x * torch.tensor(self.config.embed_scale, dtype=x.dtype)  # in the dtype of the model, as in training
        rope_rows = {rope: self._rope_rows(table, batch.positions) for rope, table in self.rope_tables.items()}
        stored = {0: x}
        for layer, block in enumerate(self.blocks):
            x = block(x, batch, cache, rope_rows)
            if layer + 1 in hidden_layers:
                stored[layer + 1] = x
        return x, [stored[index] for index in hidden_layers]

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [n, vocab] of states [n, width], in float32."""
        logits: Tensor = self.head(rms_norm(states, self.norm.weight, self.config.norm_eps))
        return self.gather_logits(logits.float())

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather the logits of all ranks on rank 0."""
        if self.ranks is None or self.shard is None:
            return logits
        return self.ranks.gather(logits, tuple(len(each.vocab(self.config)) for each in self.shard.all_ranks))

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return embeddings [n, width], summed over ranks: a rank contributes zeros for tokens of other ranks."""
        if self.ranks is None:
            return F.embedding(tokens, self.embed)
        local = self.local_tokens
        is_remote = (tokens < local.start) | (tokens >= local.stop)
        rows = F.embedding((tokens - local.start).masked_fill(is_remote, 0), self.embed)
        return self.ranks.all_reduce(rows.masked_fill(is_remote[:, None], 0.0))

    @staticmethod
    def _rope_rows(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = table[positions]
        return rows[:, :1], rows[:, 1:]


def first_layers(model: Decoder, layers: int) -> Decoder:
    """Return the first `layers` of a decoder with its final norm and LM head, sharing all weights (early exit)."""
    early = copy.copy(model)
    early._modules = dict(model._modules)
    early.blocks = nn.ModuleList(list(model.blocks)[:layers])
    early.config, early.local = _shortened(model.config, layers), _shortened(model.local, layers)
    return early


def _shortened(config: ModelConfig, layers: int) -> ModelConfig:
    return replace(config, layers=layers, ropes=config.ropes[:layers], windows=config.windows[:layers])
