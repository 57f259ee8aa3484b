# mypy: ignore-errors
"""Linear layers with few rows: the weights are read once, and a row's result does not depend on the other rows.

Weights are the left operand of each `tl.dot` and rows the right one, so the instructions are the same for one row and
for many. The inputs are split at fixed positions (split-K); the reader of the result adds the splits in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import apply_glu_pairs
from .launch_limits import FEW_ROWS, FLOAT_SPLIT_UNIT, GemmTiling, fit_stages

__all__ = ["CUBLAS_ROWS", "FEW_ROWS", "MAX_ROWS", "gated_linear", "linear"]

MAX_ROWS = 256  # rows that the kernel takes
CUBLAS_ROWS = 32  # with more rows than this cuBLAS is as fast or faster


@triton.jit
def _linear_kernel(
    x, weight, bias, out, rows, inputs, outputs,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, SPLITS: tl.constexpr, UNIT: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Compute a block of outputs for all rows from one split of the inputs. With GATED outputs are gate/up pairs."""
    o = tl.program_id(0) * OUT + tl.arange(0, OUT)
    valid = o < outputs
    if GATED:
        o = o // 2 + o % 2 * (outputs // 2)
    split = tl.program_id(1)
    each = tl.cdiv(tl.cdiv(inputs, UNIT), SPLITS) * UNIT
    r = tl.arange(0, ROWS)
    i = tl.arange(0, IN)
    total = tl.zeros([OUT, ROWS], tl.float32)
    left = weight + o[:, None].to(tl.int64) * inputs
    right = x + r[None, :] * inputs
    for begin in range(split * each, tl.minimum(split * each + each, inputs), IN):
        at = begin + i
        w = tl.load(left + at[None, :], mask=valid[:, None] & (at < inputs)[None, :], other=0.0)
        v = tl.load(right + at[:, None], mask=(r < rows)[None, :] & (at < inputs)[:, None], other=0.0)
        total = tl.dot(w, v, total)
    if BIAS:
        added = tl.load(bias + o, mask=valid, other=0.0).to(tl.float32)
        total += tl.where(split == 0, added, 0.0)[:, None]
    value = total.to(out.dtype.element_ty)
    if GATED:
        value, outputs = apply_glu_pairs(value, OUT, ROWS, GELU), outputs // 2
        o = tl.program_id(0) * (OUT // 2) + tl.arange(0, OUT // 2)
        valid = o < outputs
    target = out + (split * rows + r[None, :]).to(tl.int64) * outputs + o[:, None]
    tl.store(target, value, mask=valid[:, None] & (r < rows)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, split: bool = False) -> Tensor:
    """Multiply x [rows, in], at most MAX_ROWS, by weight [out, in] and add bias -> [rows, out].

    With `split` return the partial sums [splits, rows, out], in float32 if there are several, for the reader to add.
    """
    rows, outputs = len(x), len(weight)
    tiling = GemmTiling.for_float(outputs, x.shape[1], rows, split)
    out = torch.empty(
        tiling.splits, rows, outputs, dtype=x.dtype if tiling.splits == 1 else torch.float32, device=x.device
    )
    _launch(tiling, x, weight, bias, out)
    return out if split else out[0]


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    """Return `gated_activation(linear(x))`, bit for bit: weight [2 * out, in], gates above up -> [rows, out]."""
    tiling = GemmTiling.for_float(len(weight), x.shape[1], len(x), split=False)
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(tiling, x, weight, bias, out, gelu)
    return out


def _launch(
    tiling: GemmTiling, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, gelu: bool | None = None
) -> None:
    """Launch the kernel. `gelu` selects GeGLU or SwiGLU; None: no gated activation."""
    (rows, inputs), outputs = x.shape, len(weight)
    padded_rows = max(16, triton.next_power_of_2(rows))
    stages = fit_stages(tiling.stages, (tiling.outputs + padded_rows) * tiling.inputs * x.element_size(), x.device)
    _linear_kernel[(triton.cdiv(outputs, tiling.outputs), tiling.splits)](
        x, weight, weight if bias is None else bias, out, rows, inputs, outputs,
        ROWS=padded_rows, OUT=tiling.outputs, IN=tiling.inputs, SPLITS=tiling.splits, UNIT=FLOAT_SPLIT_UNIT,
        BIAS=bias is not None, GATED=gelu is not None, GELU=bool(gelu), num_warps=tiling.warps, num_stages=stages,
    )  # fmt: skip
