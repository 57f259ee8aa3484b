# mypy: ignore-errors
"""What comes before a layer: the last one's result joins the residual, which is then normed. One reading of both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normed(x, weight, width, eps):
    """x in float32, normed, as the torch function rounds it."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight


@triton.jit
def _add_norm(
    x, delta, post, weight, rows, summed, out, width, count, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, POST: tl.constexpr, PICKS: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    """One row. `rows` says which one, where only some are wanted."""
    to = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + to).to(tl.int64) if PICKS else to
    i = tl.arange(0, BLOCK)
    real = i < width
    kind = out.dtype.element_ty
    value = tl.load(x + row * width + i, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        change = tl.load(delta + row * width + i, mask=real, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            change += tl.load(delta + (part * count + row) * width + i, mask=real, other=0.0)
        change = change.to(kind).to(tl.float32)
        if POST:
            scale = tl.load(post + i, mask=real, other=0.0).to(tl.float32)
            change = _normed(change, scale, width, eps).to(kind).to(tl.float32)
        value = (value + change).to(kind).to(tl.float32)
    if KEEPS:
        tl.store(summed + to * width + i, value.to(kind), mask=real)
    scale = tl.load(weight + i, mask=real, other=0.0).to(tl.float32)
    tl.store(out + to * width + i, _normed(value, scale, width, eps).to(kind), mask=real)


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    post: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [n, width] plus delta, itself normed first by `post` if given; that sum, and the sum normed.

    delta is [parts, n, width], to be added up. With `rows` only those come out, and the sum that comes back is x.
    """
    n, width = x.shape if rows is None else (len(rows), x.shape[1])
    out = torch.empty(n, width, dtype=x.dtype, device=x.device)
    keeps = rows is None and delta is not None
    summed = torch.empty_like(out) if keeps else x
    block = triton.next_power_of_2(width)
    _add_norm[(n,)](
        x, x if delta is None else delta, weight if post is None else post, weight, weight if rows is None else rows,
        summed, out, width, len(x), eps, PARTS=1 if delta is None else len(delta), BLOCK=block,
        ADDS=delta is not None, POST=post is not None, PICKS=rows is not None, KEEPS=keeps,
        num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return summed, out
