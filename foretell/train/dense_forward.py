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

from foretell.errors import UnsupportedModelError
from foretell.kernels.attention import masked_attention
from foretell.kernels.norm import rms_norm
from foretell.models.config import Rope
from foretell.models.decoder import Attention, Block, Decoder, RopeRows, rope_rows_at
from foretell.models.draft_heads import Attend
from foretell.models.rope import query_scales, rope_table

RopeTables = dict[Rope, Tensor]

# Without cuDNN, torch's first choice on new devices: it compiles a plan for every shape, and nearly every batch has
# a length of its own.
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def rope_tables(model: Decoder, context: int) -> RopeTables:
    """Return RoPE tables up to `context`. The model builds its own only once its weights are packed."""
    if model.config.layer_sizes:
        raise UnsupportedModelError(f"{model.config.family} cannot be trained for: its layers have different sizes")
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
    x = model.scale_embeddings(F.embedding(tokens, model.embed))
    rope_rows = {kind: _rope_rows(kind, table, positions) for kind, table in rope.items()}
    states = {0: x}
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block), "a decoder is made of blocks"
        x = _block_forward(block, layer, x, rope_rows, attend)
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


def _rope_rows(rope: Rope, table: Tensor, positions: Tensor) -> RopeRows:
    scales = query_scales(rope, len(table)).to(table.device) if rope.query_growth else None
    return rope_rows_at(table, positions, scales)


def _block_forward(block: Block, layer: int, x: Tensor, rope_rows: dict[Rope, RopeRows], attend: Attend) -> Tensor:
    attention = block.attention
    assert isinstance(attention, Attention), "a block has attention"

    def attended(normed: Tensor) -> Tensor:
        output = attend(layer, *attention.queries_keys_values(normed, rope_rows[attention.rope]))
        projected: Tensor = attention.out(output.flatten(-2))
        return projected

    return block.run(x, attended)


class CausalAttention:
    """Causal attention with the sliding window of each layer."""

    def __init__(self, scale: float, windows: Sequence[int | None], softcap: float | None = None) -> None:
        self.scale, self.windows, self.softcap = scale, windows, softcap

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, self.scale, self.windows[layer], self.softcap)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Attend with q [rows, n, heads, dim] over k, v [rows, n, kv_heads, dim].

    Rows are padded on the right, so causality alone hides the padding.
    """
    groups, length = q.shape[-2] // k.shape[-2], q.shape[1]
    q, k, v = q.transpose(1, 2), repeat_kv(k, groups).transpose(1, 2), repeat_kv(v, groups).transpose(1, 2)
    if softcap is not None:
        return masked_attention(q, k, v, causal_mask(length, window, q.device), scale, softcap).transpose(1, 2)
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
