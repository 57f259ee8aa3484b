# mypy: ignore-errors
"""What comes before a layer: the last one's result joins the residual, which is then normed. One reading of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels.quant import QUANT_MAX, QuantFormat, QuantizedRows

from .quant_linear import KINDS, empty_rows, on_grid


@triton.jit
def normed_row(x, weight, width, eps):
    """x in float32, normed, as the torch function rounds it."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight


@triton.jit
def _add_norm(
    x, delta, by_row, by_output, post, weight, rows, summed, out, scales, width, count, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, POST: tl.constexpr, PICKS: tl.constexpr,
    KEEPS: tl.constexpr, SCALES: tl.constexpr, KIND: tl.constexpr, QUANT_MAX: tl.constexpr,
):  # fmt: skip
    """One row. `rows` says which one, where only some are wanted."""
    to = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + to).to(tl.int64) if PICKS else to
    i = tl.arange(0, BLOCK)
    real = i < width
    kind = x.dtype.element_ty
    value = tl.load(x + row * width + i, mask=real, other=0.0).to(tl.float32)
    scale = tl.load(weight + i, mask=real, other=0.0).to(tl.float32)  # asked for now, it is here when it is needed
    if ADDS:
        change = tl.load(delta + row * width + i, mask=real, other=0)
        if PARTS > 1:
            for part in tl.static_range(1, PARTS):
                change += tl.load(delta + (part * count + row) * width + i, mask=real, other=0)
        change = change.to(tl.float32)
        if SCALES:  # of sums in 8 bits
            change = change * tl.load(by_row + row) * tl.load(by_output + i, mask=real, other=0.0)
        change = change.to(kind).to(tl.float32)
        if POST:
            by = tl.load(post + i, mask=real, other=0.0).to(tl.float32)
            change = normed_row(change, by, width, eps).to(kind).to(tl.float32)
        value = (value + change).to(kind).to(tl.float32)
    if KEEPS:
        tl.store(summed + to * width + i, value.to(kind), mask=real)
    normed = normed_row(value, scale, width, eps).to(kind)
    if KIND == 0:
        tl.store(out + to * width + i, normed, mask=real)
    else:
        rounded, row_scale = on_grid(normed.to(tl.float32), QUANT_MAX, KIND)
        tl.store(out + to * width + i, rounded, mask=real)
        tl.store(scales + to, row_scale)


@triton.jit
def _norm_parts(x, weights, out, width, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One part of one row."""
    part = tl.program_id(1)
    at = (tl.program_id(0).to(tl.int64) * PARTS + part) * width
    i = tl.arange(0, BLOCK)
    real = i < width
    value = tl.load(x + at + i, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(weights + part * width + i, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at + i, normed_row(value, weight, width, eps).to(out.dtype.element_ty), mask=real)


def norm_parts(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Rows x [n, parts * width] with each part normed by itself; `weights` [parts, width]."""
    parts, width = weights.shape
    out, block = torch.empty_like(x), triton.next_power_of_2(width)
    _norm_parts[(len(x), parts)](
        x, weights, out, width, eps, PARTS=parts, BLOCK=block, num_warps=max(1, min(16, block // 512))
    )
    return out


@dataclass(frozen=True)
class Change:
    """What a layer adds to the states, [parts, n, width], still to be added up; sums in 8 bits come with scales."""

    parts: Tensor
    by_row: Tensor | None = None  # [n]
    by_output: Tensor | None = None  # [width]


def add_norm(
    x: Tensor,
    change: Change | None,
    weight: Tensor,
    eps: float,
    post: Tensor | None = None,
    rows: Tensor | None = None,
    rounding: QuantFormat | None = None,
) -> tuple[Tensor, Tensor | QuantizedRows]:
    """x [n, width] plus the change, itself normed first by `post` if given; that sum, and the sum normed.

    With `rows` only those come out, and the sum that comes back is x. With `rounding` what is normed is in 8 bits.
    """
    n, width = x.shape if rows is None else (len(rows), x.shape[1])
    keeps = rows is None and change is not None
    summed = torch.empty(n, width, dtype=x.dtype, device=x.device) if keeps else x
    block = triton.next_power_of_2(width)
    rounded = None if rounding is None else empty_rows(n, width, rounding, x.device)
    out = torch.empty(n, width, dtype=x.dtype, device=x.device) if rounded is None else rounded.values
    delta = Change(x[None]) if change is None else change
    scales = delta.by_row is not None and delta.by_output is not None
    _add_norm[(n,)](
        x, delta.parts, delta.by_row if scales else weight, delta.by_output if scales else weight,
        weight if post is None else post, weight, weight if rows is None else rows, summed, out,
        weight if rounded is None else rounded.scales, width, len(x), eps,
        PARTS=len(delta.parts), BLOCK=block, ADDS=change is not None, POST=post is not None, PICKS=rows is not None,
        KEEPS=keeps, SCALES=scales, KIND=KINDS[rounding], QUANT_MAX=QUANT_MAX.get(rounding, 1.0),
        num_warps=max(1, min(8, block // 128)),
    )  # fmt: skip
    return summed, out if rounded is None else rounded
