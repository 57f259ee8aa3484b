"""The one decoder: Llama, Mistral, SmolLM2, Qwen 2 and 3, Gemma 3 differ by what their config says."""

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
    """No prefill and no decode: some new tokens over some cached ones."""

    tokens: Tensor  # [n]
    positions: Tensor  # [n]
    slots: Tensor  # [n] where each token's key and value go
    groups: list[SpanGroup]


RopeTables = dict[Rope, tuple[Tensor, Tensor]]  # cosines and sines of a batch's positions


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

    def forward(self, x: Tensor, batch: ForwardBatch, cache: KVCache, turns: RopeTables) -> Tensor:
        c = self.config
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        qkv = self.qkv(x).view(len(x), -1, c.head_dim)
        turned, value = qkv[:, : -c.kv_heads], qkv[:, -c.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(turned[:, : c.heads], self.q_norm.weight, c.norm_eps)
            k = rms_norm(turned[:, c.heads :], self.k_norm.weight, c.norm_eps)
            turned = torch.cat([q, k], 1)
        turned = rotate(turned, *turns[self.rope])
        store(turned[:, c.heads :], keys, batch.slots)
        store(value, values, batch.slots)
        seen = attend(turned[:, : c.heads], keys, values, batch.groups, c.scale, self.window)
        projected: Tensor = self.out(seen)
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

    def forward(self, x: Tensor, batch: ForwardBatch, cache: KVCache, turns: RopeTables) -> Tensor:
        seen = self.attention(rms_norm(x, self.attention_norm.weight, self.eps), batch, cache, turns)
        x = x + self._after(seen, self.attention_post_norm)
        mixed = self.ffn(rms_norm(x, self.ffn_norm.weight, self.eps))
        return x + self._after(mixed, self.ffn_post_norm)

    def _after(self, x: Tensor, norm: Norm | None) -> Tensor:
        x = x if self.ranks is None else self.ranks.all_reduce(x)
        return x if norm is None else rms_norm(x, norm.weight, self.eps)


class Decoder(nn.Module):
    """Tokens to states, states to logits. One of several ranks has a part of every layer and of the vocabulary."""

    def __init__(self, config: ModelConfig, shard: Shard | None = None) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.local = config if shard is None else shard.local_config(config)  # what lies here
        self.embed = nn.Parameter(torch.empty(self.local.vocab, config.width), requires_grad=False)
        self.blocks = nn.ModuleList(Block(self.local, layer) for layer in range(config.layers))
        self.norm = Norm(config.width)
        self.head = Linear(config.width, self.local.vocab)
        if config.tied:
            self.head.weight = self.embed
        self.rope_tables: dict[Rope, Tensor] = {}
        self.ranks: Ranks | None = None

    def join_ranks(self, ranks: Ranks) -> None:
        """Run with the others that have the rest of the model."""
        self.ranks = ranks
        for block in self.blocks:
            assert isinstance(block, Block), "a decoder is made of blocks"
            block.ranks = ranks

    @property
    def num_logits(self) -> int:
        """Logits of a row: the first rank has all."""
        return self.config.vocab if self.shard is None or self.shard.rank == 0 else self.local.vocab

    @property
    def local_tokens(self) -> range:
        """Those whose rows of the embedding and of the head lie here."""
        return range(self.config.vocab) if self.shard is None else self.shard.vocab(self.config)

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        return (LayerShape(self.local.kv_heads, self.config.head_dim),) * self.config.layers

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def is_packed(self) -> bool:
        """Whether matrices lie as kernels want them; then those of floats are gone."""
        return self.head.weight is None

    @property
    def can_share_weights(self) -> bool:
        """Whether its embedding and its output rows are here, whole and in floats, for heads to borrow."""
        return self.shard is None and (self.config.tied or not self.is_packed)

    def prepare(self, context: int) -> None:
        """Ready the weights to run texts of up to `context` tokens."""
        room = HugePageArena()
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(room)
        trim_memory()
        for rope in set(self.config.ropes):
            table = rope_table(rope, self.config.head_dim, context)
            self.rope_tables[rope] = table.to(self.embed.device, self.embed.dtype)

    def forward(self, batch: ForwardBatch, cache: KVCache, taps: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """States after the last layer, not yet normed, [n, width], and those after each layer in `taps`."""
        x = self.embed_tokens(batch.tokens)
        if self.config.embed_scale != 1.0:
            x = x * torch.tensor(
                self.config.embed_scale, dtype=x.dtype
            )  # rounded to the model's type, as it was trained
        turns = {rope: self._turns(table, batch.positions) for rope, table in self.rope_tables.items()}
        tapped = {0: x}
        for layer, block in enumerate(self.blocks):
            x = block(x, batch, cache, turns)
            if layer + 1 in taps:
                tapped[layer + 1] = x
        return x, [tapped[tap] for tap in taps]

    def logits(self, states: Tensor) -> Tensor:
        """[n, width] -> [n, vocab], in float32."""
        logits: Tensor = self.head(rms_norm(states, self.norm.weight, self.config.norm_eps))
        return self.gather_logits(logits.float())

    def gather_logits(self, logits: Tensor) -> Tensor:
        """With those of other ranks, which the first one gets."""
        if self.ranks is None or self.shard is None:
            return logits
        return self.ranks.gather(logits, tuple(len(each.vocab(self.config)) for each in self.shard.all_ranks))

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """[n, width]; of a token that lies elsewhere this rank has zeros, and its own rank the rest of the sum."""
        if self.ranks is None:
            return F.embedding(tokens, self.embed)
        here = self.local_tokens
        elsewhere = (tokens < here.start) | (tokens >= here.stop)
        rows = F.embedding((tokens - here.start).masked_fill(elsewhere, 0), self.embed)
        return self.ranks.all_reduce(rows.masked_fill(elsewhere[:, None], 0.0))

    @staticmethod
    def _turns(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = table[positions]
        return rows[:, :1], rows[:, 1:]


def first_layers(model: Decoder, layers: int) -> Decoder:
    """The first `layers` of a decoder with its final norm and head; nothing is copied."""
    early = copy.copy(model)
    early._modules = dict(model._modules)
    early.blocks = nn.ModuleList(list(model.blocks)[:layers])
    early.config, early.local = _shortened(model.config, layers), _shortened(model.local, layers)
    return early


def _shortened(config: ModelConfig, layers: int) -> ModelConfig:
    return replace(config, layers=layers, ropes=config.ropes[:layers], windows=config.windows[:layers])
