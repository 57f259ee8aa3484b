# mypy: ignore-errors
"""Residual addition and RMS norm in one kernel, which also adds the splits of a linear layer and may quantize."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels.quant import QUANT_MAX, QuantFormat, QuantizedRows

from .quant_linear import FORMAT_CODES, empty_quantized, quantize_row


@triton.jit
def rms_norm_row(x, weight, width, eps):
    """Return the RMS norm of a float32 row with the operations of the torch function."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight


@triton.jit
def _add_norm_kernel(
    x, delta, row_scales, output_scales, post, weight, rows, summed, out, scales, width, count, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, POST: tl.constexpr, SELECTS_ROWS: tl.constexpr,
    STORES_SUM: tl.constexpr, SCALED: tl.constexpr, FORMAT: tl.constexpr, QUANT_MAX: tl.constexpr,
):  # fmt: skip
    """Process one row; with SELECTS_ROWS `rows` says which."""
    out_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + out_row).to(tl.int64) if SELECTS_ROWS else out_row
    i = tl.arange(0, BLOCK)
    valid = i < width
    dtype = x.dtype.element_ty
    value = tl.load(x + row * width + i, mask=valid, other=0.0).to(tl.float32)
    scale = tl.load(weight + i, mask=valid, other=0.0).to(tl.float32)  # loaded early, to hide its latency
    if ADDS:
        update = tl.load(delta + row * width + i, mask=valid, other=0)
        if PARTS > 1:
            for part in tl.static_range(1, PARTS):
                update += tl.load(delta + (part * count + row) * width + i, mask=valid, other=0)
        update = update.to(tl.float32)
        if SCALED:  # unscaled int8 or fp8 products
            update = update * tl.load(row_scales + row) * tl.load(output_scales + i, mask=valid, other=0.0)
        update = update.to(dtype).to(tl.float32)
        if POST:
            post_weight = tl.load(post + i, mask=valid, other=0.0).to(tl.float32)
            update = rms_norm_row(update, post_weight, width, eps).to(dtype).to(tl.float32)
        value = (value + update).to(dtype).to(tl.float32)
    if STORES_SUM:
        tl.store(summed + out_row * width + i, value.to(dtype), mask=valid)
    normed = rms_norm_row(value, scale, width, eps).to(dtype)
    if FORMAT == 0:
        tl.store(out + out_row * width + i, normed, mask=valid)
    else:
        quantized, row_scale = quantize_row(normed.to(tl.float32), QUANT_MAX, FORMAT)
        tl.store(out + out_row * width + i, quantized, mask=valid)
        tl.store(scales + out_row, row_scale)


@triton.jit
def _norm_parts_kernel(x, weights, out, width, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Normalize one part of one row."""
    part = tl.program_id(1)
    at = (tl.program_id(0).to(tl.int64) * PARTS + part) * width
    i = tl.arange(0, BLOCK)
    valid = i < width
    value = tl.load(x + at + i, mask=valid, other=0.0).to(tl.float32)
    weight = tl.load(weights + part * width + i, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + at + i, rms_norm_row(value, weight, width, eps).to(out.dtype.element_ty), mask=valid)


def norm_parts(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Return x [n, parts * width] with an RMS norm for each part; `weights` [parts, width]."""
    parts, width = weights.shape
    out, block = torch.empty_like(x), triton.next_power_of_2(width)
    _norm_parts_kernel[(len(x), parts)](
        x, weights, out, width, eps, PARTS=parts, BLOCK=block, num_warps=max(1, min(16, block // 512))
    )
    return out


@dataclass(frozen=True)
class ResidualDelta:
    """The output of a layer before it is added to the residual: splits [splits, n, width] and, if unscaled, scales."""

    splits: Tensor
    row_scales: Tensor | None = None  # [n]
    output_scales: Tensor | None = None  # [width]


def add_norm(
    x: Tensor,
    update: ResidualDelta | None,
    weight: Tensor,
    eps: float,
    post: Tensor | None = None,
    rows: Tensor | None = None,
    format: QuantFormat | None = None,
) -> tuple[Tensor, Tensor | QuantizedRows]:
    """Add `update` to x [n, width], with the RMS norm `post` first if given; return the sum and its RMS norm.

    With `rows` only those rows are normalized, and x is returned in place of the sum. With `format` the normalized
    rows are quantized.
    """
    n, width = x.shape if rows is None else (len(rows), x.shape[1])
    keeps = rows is None and update is not None
    summed = torch.empty(n, width, dtype=x.dtype, device=x.device) if keeps else x
    block = triton.next_power_of_2(width)
    quantized = None if format is None else empty_quantized(n, width, format, x.device)
    out = torch.empty(n, width, dtype=x.dtype, device=x.device) if quantized is None else quantized.values
    delta = ResidualDelta(x[None]) if update is None else update
    scales = delta.row_scales is not None and delta.output_scales is not None
    _add_norm_kernel[(n,)](
        x, delta.splits, delta.row_scales if scales else weight, delta.output_scales if scales else weight,
        weight if post is None else post, weight, weight if rows is None else rows, summed, out,
        weight if quantized is None else quantized.scales, width, len(x), eps,
        PARTS=len(delta.splits), BLOCK=block, ADDS=update is not None, POST=post is not None,
        SELECTS_ROWS=rows is not None,
        STORES_SUM=keeps, SCALED=scales, FORMAT=FORMAT_CODES[format], QUANT_MAX=QUANT_MAX.get(format, 1.0),
        num_warps=max(1, min(8, block // 128)),
    )  # fmt: skip
    return summed, out if quantized is None else quantized
