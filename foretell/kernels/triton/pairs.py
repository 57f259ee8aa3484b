# mypy: ignore-errors
"""What a head's first layer reads: a token's embedding and the feature of the place before, normed, side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norm import normed_row


@triton.jit
def _pairs(
    tokens, embedding, embed_weight, features, before, feature_weight, pairs, residual,
    token_stride, before_stride, width, scale, eps,
    BLOCK: tl.constexpr, SCALES: tl.constexpr, PICKS: tl.constexpr, KEEPS_NORMED: tl.constexpr,
):  # fmt: skip
    """One side of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    real = i < width
    kind = pairs.dtype.element_ty
    if tl.program_id(1) == 0:
        token = tl.load(tokens + row * token_stride).to(tl.int64)
        value = tl.load(embedding + token * width + i, mask=real, other=0.0).to(kind).to(tl.float32)
        if SCALES:
            value = (value * scale).to(kind).to(tl.float32)
        weight = tl.load(embed_weight + i, mask=real, other=0.0).to(tl.float32)
        tl.store(pairs + row * 2 * width + i, normed_row(value, weight, width, eps).to(kind), mask=real)
    else:
        source = tl.load(before + row * before_stride).to(tl.int64) if PICKS else row
        feature = tl.load(features + source * width + i, mask=real, other=0.0).to(kind)
        weight = tl.load(feature_weight + i, mask=real, other=0.0).to(tl.float32)
        normed = normed_row(feature.to(tl.float32), weight, width, eps).to(kind)
        tl.store(pairs + row * 2 * width + width + i, normed, mask=real)
        if KEEPS_NORMED:
            tl.store(residual + row * width + i, normed, mask=real)
        else:
            tl.store(residual + row * width + i, feature, mask=real)


@dataclass(frozen=True)
class Side:
    """Rows of a table that are normed: which, [n], or all just so."""

    table: Tensor  # [rows, width]
    rows: Tensor | None
    weight: Tensor  # [width]


def read_pairs(
    embedded: Side, feature: Side, embed_scale: float, eps: float, keeps_normed: bool
) -> tuple[Tensor, Tensor]:
    """[n, 2 * width] of both sides, and the feature [n, width], normed or as it is, for attention to be added to."""
    tokens, before = embedded.rows, feature.rows
    n, width, like = len(tokens), embedded.table.shape[1], feature.weight
    pairs = torch.empty(n, 2 * width, dtype=like.dtype, device=like.device)
    residual = torch.empty(n, width, dtype=like.dtype, device=like.device)
    block = triton.next_power_of_2(width)
    _pairs[(n, 2)](
        tokens, embedded.table, embedded.weight, feature.table, tokens if before is None else before, feature.weight,
        pairs, residual, tokens.stride(0), 1 if before is None else before.stride(0), width, embed_scale, eps,
        BLOCK=block, SCALES=embed_scale != 1.0, PICKS=before is not None, KEEPS_NORMED=keeps_normed,
        num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return pairs, residual
