"""A decoder over whole texts at once, rows beside rows: to capture states, to write many texts, and to be trained.

Attention is the caller's, as with heads: `attend(layer, q, k, v)` gets turned q [..., heads, dim] and k, v
[..., kv_heads, dim] and returns [..., heads, dim].
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

Tables = dict[Rope, Tensor]

# Not cuDNN's, which is torch's first choice on new devices: it works out a plan for every shape it meets, and nearly
# every batch has lengths of its own.
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def rope_tables(model: Decoder, context: int) -> Tables:
    """How positions up to `context` turn; the model's own are only there once its weights are packed away."""
    dim = model.config.head_dim
    return {r: rope_table(r, dim, context).to(model.embed.device, model.dtype) for r in set(model.config.ropes)}


def dense_forward(
    model: Decoder, tables: Tables, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """As `Decoder.forward`, for tokens [..., n] at their positions: states [..., n, width], and those tapped."""
    x = F.embedding(tokens, model.embed)
    if model.config.embed_scale != 1.0:
        x = x * torch.tensor(model.config.embed_scale, dtype=x.dtype)
    turns = {rope: _turn(table, positions) for rope, table in tables.items()}
    tapped = {0: x}
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block), "a decoder is made of blocks"
        x = _through(block, layer, x, turns, attend)
        tapped[layer + 1] = x
    return x, [tapped[tap] for tap in taps]


def final_norm(model: Decoder, states: Tensor) -> Tensor:
    """What the model's output matrix reads."""
    return rms_norm(states, model.norm.weight, model.config.norm_eps)


def output_weight(model: Decoder) -> Tensor:
    """The output matrix, [vocab, width]."""
    rows = model.embed if model.config.tied else model.head.weight
    assert rows is not None, "weights are not packed away"
    return rows


def _turn(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    rows = table[positions]
    return rows[..., :1, :], rows[..., 1:, :]


def _through(block: Block, layer: int, x: Tensor, turns: dict[Rope, tuple[Tensor, Tensor]], attend: Attend) -> Tensor:
    seen = _attention(block.attention, layer, rms_norm(x, block.attention_norm.weight, block.eps), turns, attend)
    x = x + _after(seen, block.attention_post_norm, block.eps)
    mixed = block.ffn(rms_norm(x, block.ffn_norm.weight, block.eps))
    return x + _after(mixed, block.ffn_post_norm, block.eps)


def _attention(
    own: Attention, layer: int, x: Tensor, turns: dict[Rope, tuple[Tensor, Tensor]], attend: Attend
) -> Tensor:
    c = own.config
    q, k, v = own.qkv(x).unflatten(-1, (-1, c.head_dim)).split([c.heads, c.kv_heads, c.kv_heads], -2)
    if own.q_norm is not None and own.k_norm is not None:
        q, k = rms_norm(q, own.q_norm.weight, c.norm_eps), rms_norm(k, own.k_norm.weight, c.norm_eps)
    seen = attend(layer, rotate(q, *turns[own.rope]), rotate(k, *turns[own.rope]), v)
    projected: Tensor = own.out(seen.flatten(-2))
    return projected


def _after(x: Tensor, norm: Norm | None, eps: float) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight, eps)


class CausalAttention:
    """Each place of a row sees those before it, as far back as its layer's window reaches."""

    def __init__(self, scale: float, windows: Sequence[int | None]) -> None:
        self.scale, self.windows = scale, windows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, self.scale, self.windows[layer])


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """q [rows, n, heads, dim] over k, v [rows, n, kv_heads, dim]; padding stands behind a row and is never seen."""
    share, length = q.shape[-2] // k.shape[-2], q.shape[1]
    q, k, v = q.transpose(1, 2), repeat_kv(k, share).transpose(1, 2), repeat_kv(v, share).transpose(1, 2)
    everything = window is None or window >= length
    mask = None if everything else causal_mask(length, window, q.device)
    with sdpa_kernel(ANY_SHAPE):
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=everything, scale=scale)
    return seen.transpose(1, 2)


def repeat_kv(x: Tensor, share: int) -> Tensor:
    """A key head for each query head, [..., kv_heads, dim] -> [..., heads, dim]."""
    return x if share == 1 else x.repeat_interleave(share, -2)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, length]: what a place may see, itself included."""
    place = torch.arange(length, device=device)
    seen = place[None, :] <= place[:, None]
    return seen if window is None else seen & (place[None, :] > place[:, None] - window)
