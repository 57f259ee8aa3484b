"""A decoder layer that leaves attention to whoever calls it: dense to train, over pages to serve."""

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
    """What the rows see: their own keys and values and whatever else the caller keeps for that layer.

    q [..., heads, dim], k and v [..., kv_heads, dim], turned already -> [..., heads, dim].
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class HeadAttention(nn.Module):
    """Queries apart from keys and values: of what is only remembered, no query is ever asked."""

    def __init__(self, config: LayerConfig, index: int, inputs: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.q = Linear(inputs, config.heads * config.head_dim, config.qkv_bias)
        self.kv = Linear(inputs, 2 * config.kv_heads * config.head_dim, config.qkv_bias)
        self.out = Linear(config.heads * config.head_dim, config.width, config.out_bias)
        self.q_norm = Norm(config.head_dim) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim) if config.qk_norm else None
        self.qkv: Linear | None = None  # all three in one product, once `join` made it

    def merge_qkv(self) -> Linear:
        """All three matrices as one layer, keys under queries and values under keys."""
        assert self.q.weight is not None and self.kv.weight is not None, "join before weights are packed"
        both = Linear(self.q.inputs, self.q.outputs + self.kv.outputs, self.config.qkv_bias)
        both.weight = nn.Parameter(torch.cat([self.q.weight, self.kv.weight]), requires_grad=False)
        if self.q.bias is not None and self.kv.bias is not None:
            both.bias = nn.Parameter(torch.cat([self.q.bias, self.kv.bias]), requires_grad=False)
        return both

    def forward(self, x: Tensor, turn: RopeRows, attend: Attend) -> Tensor:
        if self.qkv is None:
            q, kv = self._heads(self.q(x)), self._heads(self.kv(x))
        else:
            q, kv = torch.split(self._heads(self.qkv(x)), [self.config.heads, 2 * self.config.kv_heads], -2)
        if self.q_norm is not None:
            q = rms_norm(q, self.q_norm.weight, self.config.norm_eps)
        seen = attend(self.index, rotate(q, *turn), *self._rotated(kv, turn))
        mixed: Tensor = self.out(seen.flatten(-2))
        return mixed

    def keys_values(self, x: Tensor, turn: RopeRows) -> KeysValues:
        """Keys and values of rows, [..., kv_heads, dim] each."""
        return self._rotated(self._heads(self.kv(x)), turn)

    def _rotated(self, kv: Tensor, turn: RopeRows) -> KeysValues:
        k, v = kv.chunk(2, -2)
        if self.k_norm is not None:
            k = rms_norm(k, self.k_norm.weight, self.config.norm_eps)
        return rotate(k, *turn), v

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
    """`inputs` is what attention reads; `input_norm`: whether a norm of the layer's own stands before it."""

    def __init__(self, config: LayerConfig, index: int, inputs: int | None = None, input_norm: bool = True) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.attention_norm = Norm(config.width) if input_norm else None
        self.attention = HeadAttention(config, index, inputs or config.width)
        self.ffn_norm = Norm(config.width)
        self.ffn = HeadFeedForward(config)
        self.ranks: Ranks | None = None

    def forward(self, x: Tensor, turn: RopeRows, attend: Attend, residual: Tensor | None = None) -> Tensor:
        """`residual` is what attention's result is added to, where that is not `x`."""
        x, residual = self.attention_input(x), x if residual is None else residual
        x = residual + self._all_reduce(self.attention(x, turn, attend))
        return x + self._all_reduce(self.ffn(rms_norm(x, self.ffn_norm.weight, self.eps)))

    def _all_reduce(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have."""
        return x if self.ranks is None else self.ranks.all_reduce(x)

    def attention_input(self, x: Tensor) -> Tensor:
        """What attention gets to see of its input."""
        return x if self.attention_norm is None else rms_norm(x, self.attention_norm.weight, self.eps)

    def keys_values(self, x: Tensor, turn: RopeRows) -> KeysValues:
        """The keys and values `forward` would keep."""
        return self.attention.keys_values(self.attention_input(x), turn)


def last_layer_kv(
    layers: nn.ModuleList, x: Tensor, turn: RopeRows, attend: Attend | None, residual: Tensor | None = None
) -> KeysValues:
    """The keys and values of the last layer, behind which nothing of known tokens is of use; all others run."""
    *others, last = layers
    for layer in others:
        x, residual = layer(x, turn, attend, residual), None
    assert isinstance(last, HeadLayer), "a head is made of layers"
    return last.keys_values(x, turn)


def init_weights(
    module: nn.Module, generator: torch.Generator, leave: tuple[str, ...] = (), spread: float = 0.02
) -> None:
    """Random weights to start training from: matrices small, biases nothing, norms one; not those to `leave`."""
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
