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
def _embed(
    tokens, embedding, weights, pairs, row, token_stride, width, scale, eps, BLOCK: tl.constexpr, SCALES: tl.constexpr
):
    """The left side of one row."""
    i = tl.arange(0, BLOCK)
    real = i < width
    kind = pairs.dtype.element_ty
    token = tl.load(tokens + row * token_stride).to(tl.int64)
    value = tl.load(embedding + token * width + i, mask=real, other=0.0).to(kind).to(tl.float32)
    if SCALES:
        value = (value * scale).to(kind).to(tl.float32)
    weight = tl.load(weights + i, mask=real, other=0.0).to(tl.float32)
    tl.store(pairs + row * 2 * width + i, normed_row(value, weight, width, eps).to(kind), mask=real)


@triton.jit(do_not_specialize=["token_stride", "before_stride"], do_not_specialize_on_alignment=["tokens", "before"])
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
        _embed(tokens, embedding, embed_weight, pairs, row, token_stride, width, scale, eps, BLOCK, SCALES)
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


@triton.jit(do_not_specialize_on_alignment=["tokens", "slots", "before"])
def _keep_pairs(
    tokens, embedding, embed_weight, fresh, kept, slots, before, feature_weight, pairs, width, scale, eps,
    BLOCK: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """One side of one row. What is written in this launch is not read back: it may not be there yet."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    real = i < width
    if tl.program_id(1) == 0:
        _embed(tokens, embedding, embed_weight, pairs, row, 1, width, scale, eps, BLOCK, SCALES)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        above = tl.load(slots + tl.maximum(row - 1, 0)).to(tl.int64)  # of the first row its own, which goes before
        wanted = tl.load(before + row).to(tl.int64)
        own = fresh + row * width
        if slot >= 0:
            tl.store(kept + slot * width + i, tl.load(own + i, mask=real, other=0.0), mask=real)
        source = tl.where(wanted == above, own - width, kept + wanted * width)
        source = tl.where(wanted == slot, own, source)
        feature = tl.load(source + i, mask=real, other=0.0).to(tl.float32)
        weight = tl.load(feature_weight + i, mask=real, other=0.0).to(tl.float32)
        normed = normed_row(feature, weight, width, eps).to(pairs.dtype.element_ty)
        tl.store(pairs + row * 2 * width + width + i, normed, mask=real)


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


@dataclass(frozen=True)
class KeptFeatures:
    """Places of texts in their order, and what becomes of their features: each is kept in its slot, -1 for none, and
    read is the one `before`, which was kept earlier unless it is that of the row above or the row's own."""

    fresh: Tensor  # [n, width]
    kept: Tensor  # [slots, width]
    slots: Tensor  # [n]
    before: Tensor  # [n]: slots


def keep_pairs(embedded: Side, places: KeptFeatures, feature_weight: Tensor, embed_scale: float, eps: float) -> Tensor:
    """Keep all features; [n, 2 * width] of both sides, as `read_pairs` would read them then."""
    n, width = places.fresh.shape
    pairs = torch.empty(n, 2 * width, dtype=feature_weight.dtype, device=feature_weight.device)
    block = triton.next_power_of_2(width)
    _keep_pairs[(n, 2)](
        embedded.rows, embedded.table, embedded.weight, places.fresh, places.kept, places.slots, places.before,
        feature_weight, pairs, width, embed_scale, eps,
        BLOCK=block, SCALES=embed_scale != 1.0, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return pairs
