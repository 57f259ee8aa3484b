# mypy: ignore-errors
"""Linear layers with int8 or fp8 weights and activations, as `kernels.quant` defines them, for few rows.

Laid out like `linear.py`. Integer sums are exact, so with int8 the inputs may be split anywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels.quant import QUANT_DTYPES, QUANT_MAX, QuantFormat, QuantizedRows

from .activation import apply_glu_pairs
from .launch_limits import QUANT_SPLIT_UNIT, GemmTiling, fit_stages

MAX_ROWS = 256  # rows that the kernel takes
FORMAT_CODES: dict[QuantFormat | None, int] = {None: 0, "int8": 1, "fp8": 2}  # FORMAT of the kernels
ROUND_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding and subtracting it rounds to nearest, ties to even
MIN_ABSMAX = tl.constexpr(1e-30)


@triton.jit
def quantize_row(x, QUANT_MAX: tl.constexpr, FORMAT: tl.constexpr):
    """Return a float32 row x in int8 or fp8, and its scale."""
    peak = tl.maximum(tl.max(tl.abs(x), 0), MIN_ABSMAX)
    values = x * tl.div_rn(QUANT_MAX, peak)
    scale = tl.div_rn(peak, QUANT_MAX)
    if FORMAT == 1:
        quantized = ((values + ROUND_TO_EVEN) - ROUND_TO_EVEN).to(tl.int8)
    if FORMAT == 2:
        quantized = values.to(tl.float8e4nv)
    return quantized, scale


@triton.jit
def _quantize_rows_kernel(x, values, scales, width, BLOCK: tl.constexpr, QUANT_MAX: tl.constexpr, FORMAT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    quantized, scale = quantize_row(
        tl.load(x + row * width + i, mask=i < width, other=0.0).to(tl.float32), QUANT_MAX, FORMAT
    )
    tl.store(values + row * width + i, quantized, mask=i < width)
    tl.store(scales + row, scale)


@triton.jit
def _quant_linear_kernel(
    x, x_scales, weight, scales, bias, out, rows, inputs, outputs,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, SPLITS: tl.constexpr, UNIT: tl.constexpr,
    BIAS: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, FORMAT: tl.constexpr,
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
    total = tl.zeros([OUT, ROWS], tl.int32 if FORMAT == 1 else tl.float32)
    left = weight + o[:, None].to(tl.int64) * inputs
    right = x + r[None, :] * inputs
    for begin in range(split * each, tl.minimum(split * each + each, inputs), IN):
        at = begin + i
        w = tl.load(left + at[None, :], mask=valid[:, None] & (at < inputs)[None, :], other=0.0)
        v = tl.load(right + at[:, None], mask=(r < rows)[None, :] & (at < inputs)[:, None], other=0.0)
        total = tl.dot(w, v, total, out_dtype=tl.int32 if FORMAT == 1 else tl.float32)
    if SCALED:
        row_scale = tl.load(x_scales + r, mask=r < rows, other=0.0)
        output_scale = tl.load(scales + o, mask=valid, other=0.0)
        total = total.to(tl.float32) * row_scale[None, :] * output_scale[:, None]
        if BIAS:
            total += tl.load(bias + o, mask=valid, other=0.0).to(tl.float32)[:, None]
    value = total.to(out.dtype.element_ty)
    if GATED:
        value, outputs = apply_glu_pairs(value, OUT, ROWS, GELU), outputs // 2
        o = tl.program_id(0) * (OUT // 2) + tl.arange(0, OUT // 2)
        valid = o < outputs
    target = out + (split * rows + r[None, :]).to(tl.int64) * outputs + o[:, None]
    tl.store(target, value, mask=valid[:, None] & (r < rows)[None, :])


@triton.jit
def _apply_scales_kernel(
    quant_linear_unscaled, row_scale, output_scale, bias, out, outputs, BLOCK: tl.constexpr, BIAS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = o < outputs
    total = tl.load(quant_linear_unscaled + row * outputs + o, mask=valid, other=0).to(tl.float32)
    total = total * tl.load(row_scale + row) * tl.load(output_scale + o, mask=valid, other=0.0)
    if BIAS:
        total += tl.load(bias + o, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + o, total.to(out.dtype.element_ty), mask=valid)


def empty_quantized(rows: int, width: int, format: QuantFormat, device: torch.device) -> QuantizedRows:
    """Allocate uninitialized quantized rows [rows, width]."""
    values = torch.empty(rows, width, dtype=QUANT_DTYPES[format], device=device)
    return QuantizedRows(values, torch.empty(rows, dtype=torch.float32, device=device))


def quantize_rows(x: Tensor, format: QuantFormat) -> QuantizedRows:
    """Quantize x [rows, in] with one scale per row."""
    rows, width = x.shape
    out = empty_quantized(rows, width, format, x.device)
    block = triton.next_power_of_2(width)
    _quantize_rows_kernel[(rows,)](
        x, out.values, out.scales, width, BLOCK=block, QUANT_MAX=QUANT_MAX[format], FORMAT=FORMAT_CODES[format],
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return out


def quant_linear(x: QuantizedRows, weights: QuantizedRows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply x [rows, in], at most MAX_ROWS, by weights [out, in] -> [rows, out] in `dtype`."""
    out = torch.empty(1, len(x), len(weights), dtype=dtype, device=x.values.device)
    _launch(x, weights, bias, out, GemmTiling.for_8bit(len(weights), x.values.shape[1], len(x), split=False), True)
    return out[0]


def gated_quant_linear(
    x: QuantizedRows, weights: QuantizedRows, bias: Tensor | None, dtype: torch.dtype, gelu: bool
) -> Tensor:
    """Return `gated_activation(quant_linear(x))`, bit for bit: weights [2 * out, in], gates above up -> [rows, out]."""
    out = torch.empty(1, len(x), len(weights) // 2, dtype=dtype, device=x.values.device)
    _launch(
        x, weights, bias, out, GemmTiling.for_8bit(len(weights), x.values.shape[1], len(x), split=False), True, gelu
    )
    return out[0]


def quant_linear_unscaled(x: QuantizedRows, weights: QuantizedRows) -> Tensor:
    """Return the products before scaling, [splits, rows, out] in int32 or float32, for the reader to add and scale."""
    tiling = GemmTiling.for_8bit(len(weights), x.values.shape[1], len(x), split=True)
    dtype = torch.int32 if x.format == "int8" else torch.float32
    out = torch.empty(tiling.splits, len(x), len(weights), dtype=dtype, device=x.values.device)
    _launch(x, weights, None, out, tiling, False)
    return out


def apply_scales(
    totals: Tensor, x: QuantizedRows, weights: QuantizedRows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Scale sums [rows, out] of another kernel, such as cuBLAS, to the result of `quant_linear`."""
    rows, outputs = totals.shape
    out = torch.empty(rows, outputs, dtype=dtype, device=totals.device)
    _apply_scales_kernel[(rows, triton.cdiv(outputs, 2048))](
        totals, x.scales, weights.scales, weights.scales if bias is None else bias, out, outputs,
        BLOCK=2048, BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out


def _launch(
    x: QuantizedRows,
    weights: QuantizedRows,
    bias: Tensor | None,
    out: Tensor,
    tiling: GemmTiling,
    scale: bool,
    gelu: bool | None = None,
) -> None:
    """Launch the kernel. `gelu` selects GeGLU or SwiGLU; None: no gated activation."""
    rows, inputs = x.values.shape
    outputs, padded_rows = len(weights), max(16, triton.next_power_of_2(rows))
    stages = fit_stages(tiling.stages, (tiling.outputs + padded_rows) * tiling.inputs, x.values.device)
    _quant_linear_kernel[(triton.cdiv(outputs, tiling.outputs), tiling.splits)](
        x.values, x.scales, weights.values, weights.scales, weights.scales if bias is None else bias, out,
        rows, inputs, outputs,
        ROWS=padded_rows, OUT=tiling.outputs, IN=tiling.inputs, SPLITS=tiling.splits, UNIT=QUANT_SPLIT_UNIT,
        BIAS=bias is not None, SCALED=scale, GATED=gelu is not None, GELU=bool(gelu),
        FORMAT=FORMAT_CODES[x.format], num_warps=tiling.warps, num_stages=stages,
    )  # fmt: skip
