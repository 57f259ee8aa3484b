"""Dense forward pass of a decoder over whole sequences: to capture hidden states, to sample answers, and to train.

The caller supplies attention, as with draft heads: `attend(layer, q, k, v)` gets q [..., heads, dim] and k, v
[..., kv_heads, dim] with RoPE applied, and returns [..., heads, dim].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foretell.kernels.norm import rms_norm
from foretell.kernels.rotary import rotate
from foretell.models.config import Rope
from foretell.models.decoder import Attention, Block, Decoder
from foretell.models.draft_heads import Attend
from foretell.models.layers import Norm
from foretell.models.rope import rope_table

RopeTables = dict[Rope, Tensor]
CosSin = dict[Rope, tuple[Tensor, Tensor]]

# Without cuDNN, torch's first choice on new devices: it compiles a plan for every shape, and nearly every batch has
# a length of its own.
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def rope_tables(model: Decoder, context: int) -> RopeTables:
    """Return RoPE tables up to `context`. The model builds its own only once its weights are packed."""
    dim = model.config.head_dim
    return {r: rope_table(r, dim, context).to(model.embed.device, model.dtype) for r in set(model.config.ropes)}


def dense_forward(
    model: Decoder,
    rope: RopeTables,
    tokens: Tensor,
    positions: Tensor,
    attend: Attend,
    hidden_layers: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Run tokens [..., n] at their positions, as `Decoder.forward` does.

    Returns the last layer's states [..., n, width] and those of `hidden_layers`, where 0 is the embedding.
    """
    x = F.embedding(tokens, model.embed)
    if model.config.embed_scale != 1.0:
        x = x * torch.tensor(model.config.embed_scale, dtype=x.dtype)
    cos_sin = {kind: _cos_sin(table, positions) for kind, table in rope.items()}
    states = {0: x}
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block), "a decoder is made of blocks"
        x = _block_forward(block, layer, x, cos_sin, attend)
        states[layer + 1] = x
    return x, [states[layer] for layer in hidden_layers]


def final_norm(model: Decoder, states: Tensor) -> Tensor:
    """Apply the norm before the output matrix."""
    return rms_norm(states, model.norm.weight, model.config.norm_eps)


def output_weight(model: Decoder) -> Tensor:
    """Return the output matrix, [vocab, width]."""
    weight = model.embed if model.config.tied else model.head.weight
    assert weight is not None, "the weights are not packed"
    return weight


def _cos_sin(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    rows = table[positions]
    return rows[..., :1, :], rows[..., 1:, :]


def _block_forward(block: Block, layer: int, x: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
    normed = rms_norm(x, block.attention_norm.weight, block.eps)
    attention = _attention(block.attention, layer, normed, cos_sin, attend)
    x = x + _post_norm(attention, block.attention_post_norm, block.eps)
    ffn = block.ffn(rms_norm(x, block.ffn_norm.weight, block.eps))
    return x + _post_norm(ffn, block.ffn_post_norm, block.eps)


def _attention(attention: Attention, layer: int, x: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
    c = attention.config
    q, k, v = attention.qkv(x).unflatten(-1, (-1, c.head_dim)).split([c.heads, c.kv_heads, c.kv_heads], -2)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = rms_norm(q, attention.q_norm.weight, c.norm_eps), rms_norm(k, attention.k_norm.weight, c.norm_eps)
    output = attend(layer, rotate(q, *cos_sin[attention.rope]), rotate(k, *cos_sin[attention.rope]), v)
    projected: Tensor = attention.out(output.flatten(-2))
    return projected


def _post_norm(x: Tensor, norm: Norm | None, eps: float) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight, eps)


class CausalAttention:
    """Causal attention with the sliding window of each layer."""

    def __init__(self, scale: float, windows: Sequence[int | None]) -> None:
        self.scale, self.windows = scale, windows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, self.scale, self.windows[layer])


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Attend with q [rows, n, heads, dim] over k, v [rows, n, kv_heads, dim].

    Rows are padded on the right, so causality alone hides the padding.
    """
    groups, length = q.shape[-2] // k.shape[-2], q.shape[1]
    q, k, v = q.transpose(1, 2), repeat_kv(k, groups).transpose(1, 2), repeat_kv(v, groups).transpose(1, 2)
    is_full = window is None or window >= length
    mask = None if is_full else causal_mask(length, window, q.device)
    with sdpa_kernel(SDPA_BACKENDS):
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_full, scale=scale)
    return output.transpose(1, 2)


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    """Repeat key or value heads for grouped-query attention, [..., kv_heads, dim] -> [..., heads, dim]."""
    return x if groups == 1 else x.repeat_interleave(groups, -2)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return [length, length]: the positions a row attends to, itself included."""
    position = torch.arange(length, device=device)
    visible = position[None, :] <= position[:, None]
    return visible if window is None else visible & (position[None, :] > position[:, None] - window)
