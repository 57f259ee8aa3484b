"""A decoder layer whose attention is provided by the caller: dense for training, paged for serving."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.kernels.norm import rms_norm
from foretell.kernels.rotary import rotate
from foretell.models.layers import Linear, Norm
from foretell.models.sharding import Ranks

from .config import LayerConfig

RopeRows = tuple[Tensor, Tensor]  # cosines and sines of the rows' positions, [..., 1, head_dim]
KeysValues = tuple[Tensor, Tensor]  # [..., kv_heads, dim] each


class Attend(Protocol):
    """Attention over the rows' own keys and values and those the caller keeps for the layer.

    q [..., heads, dim], k and v [..., kv_heads, dim], already rotated -> [..., heads, dim].
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class HeadAttention(nn.Module):
    """Attention with separate query and key/value projections: a prefill needs keys and values only."""

    def __init__(self, config: LayerConfig, index: int, inputs: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.q = Linear(inputs, config.heads * config.head_dim, config.qkv_bias)
        self.kv = Linear(inputs, 2 * config.kv_heads * config.head_dim, config.qkv_bias)
        self.out = Linear(config.heads * config.head_dim, config.width, config.out_bias)
        self.q_norm = Norm(config.head_dim) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim) if config.qk_norm else None
        self.qkv: Linear | None = None  # merged projection, after `merge_qkv`

    def merge_qkv(self) -> Linear:
        """Return the three projections as one layer, in the order queries, keys, values."""
        assert self.q.weight is not None and self.kv.weight is not None, "merge before weights are packed"
        both = Linear(self.q.inputs, self.q.outputs + self.kv.outputs, self.config.qkv_bias)
        both.weight = nn.Parameter(torch.cat([self.q.weight, self.kv.weight]), requires_grad=False)
        if self.q.bias is not None and self.kv.bias is not None:
            both.bias = nn.Parameter(torch.cat([self.q.bias, self.kv.bias]), requires_grad=False)
        return both

    def forward(self, x: Tensor, rope_rows: RopeRows, attend: Attend) -> Tensor:
        if self.qkv is None:
            q, kv = self._heads(self.q(x)), self._heads(self.kv(x))
        else:
            q, kv = torch.split(self._heads(self.qkv(x)), [self.config.heads, 2 * self.config.kv_heads], -2)
        if self.q_norm is not None:
            q = rms_norm(q, self.q_norm.weight, self.config.norm_eps)
        attended = attend(self.index, rotate(q, *rope_rows), *self._rotated(kv, rope_rows))
        mixed: Tensor = self.out(attended.flatten(-2))
        return mixed

    def keys_values(self, x: Tensor, rope_rows: RopeRows) -> KeysValues:
        """Return keys and values of rows, [..., kv_heads, dim] each."""
        return self._rotated(self._heads(self.kv(x)), rope_rows)

    def _rotated(self, kv: Tensor, rope_rows: RopeRows) -> KeysValues:
        k, v = kv.chunk(2, -2)
        if self.k_norm is not None:
            k = rms_norm(k, self.k_norm.weight, self.config.norm_eps)
        return rotate(k, *rope_rows), v

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.config.head_dim)


class HeadFeedForward(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.width, 2 * config.ffn, config.mlp_bias)
        self.down = Linear(config.ffn, config.width, config.mlp_bias)
        self.gelu = config.activation == "gelu_tanh"

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        mixed: Tensor = self.down((F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)) * up)
        return mixed


class HeadLayer(nn.Module):
    """A decoder layer. `inputs` is the input width of attention; `input_norm` adds a norm before it."""

    def __init__(self, config: LayerConfig, index: int, inputs: int | None = None, input_norm: bool = True) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.attention_norm = Norm(config.width) if input_norm else None
        self.attention = HeadAttention(config, index, inputs or config.width)
        self.ffn_norm = Norm(config.width)
        self.ffn = HeadFeedForward(config)
        self.ranks: Ranks | None = None

    def forward(self, x: Tensor, rope_rows: RopeRows, attend: Attend, residual: Tensor | None = None) -> Tensor:
        """Run the layer. `residual` replaces `x` as the residual of attention."""
        x, residual = self.attention_input(x), x if residual is None else residual
        x = residual + self._all_reduce(self.attention(x, rope_rows, attend))
        return x + self._all_reduce(self.ffn(rms_norm(x, self.ffn_norm.weight, self.eps)))

    def _all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        return x if self.ranks is None else self.ranks.all_reduce(x)

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the input of attention, normalized if the layer has an input norm."""
        return x if self.attention_norm is None else rms_norm(x, self.attention_norm.weight, self.eps)

    def keys_values(self, x: Tensor, rope_rows: RopeRows) -> KeysValues:
        """Return the keys and values that `forward` would cache."""
        return self.attention.keys_values(self.attention_input(x), rope_rows)


def last_layer_kv(
    layers: nn.ModuleList, x: Tensor, rope_rows: RopeRows, attend: Attend | None, residual: Tensor | None = None
) -> KeysValues:
    """Run all layers but the last and return its keys and values; its output for known tokens is not needed."""
    *others, last = layers
    for layer in others:
        x, residual = layer(x, rope_rows, attend, residual), None
    assert isinstance(last, HeadLayer), "a head is made of layers"
    return last.keys_values(x, rope_rows)


def init_weights(
    module: nn.Module, generator: torch.Generator, leave: tuple[str, ...] = (), spread: float = 0.02
) -> None:
    """Initialize weights for training: matrices normal, biases 0, norms 1; skip the names in `leave`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in leave:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(0, spread, generator=generator)
