# mypy: ignore-errors
"""Rows times a matrix in 8 bits, as `kernels.rounded` defines it: a few rows, and the matrix is read once.

Laid out as in `linear.py`. Sums of integers are exact, so here the inputs may be cut at any place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels.quant import QUANT_DTYPES, QUANT_MAX, QuantFormat, QuantizedRows

from .activation import through_gates
from .launch_limits import stages_that_fit

MOST_ROWS = 256
BUSY = 192  # programs that keep an H200's memory busy where the inputs can be cut
ONE_WAVE = 132  # multiprocessors
UNIT = 256  # inputs a part is made of
KINDS: dict[QuantFormat | None, int] = {None: 0, "int8": 1, "fp8": 2}
EVEN = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: added and taken away again, it rounds to the nearest even number
LEAST_PEAK = tl.constexpr(1e-30)


@triton.jit
def on_grid(x, QUANT_MAX: tl.constexpr, KIND: tl.constexpr):
    """A row x in float32 as 8 bits, and its scale."""
    peak = tl.maximum(tl.max(tl.abs(x), 0), LEAST_PEAK)
    values = x * tl.div_rn(QUANT_MAX, peak)
    scale = tl.div_rn(peak, QUANT_MAX)
    if KIND == 1:
        rounded = ((values + EVEN) - EVEN).to(tl.int8)
    if KIND == 2:
        rounded = values.to(tl.float8e4nv)
    return rounded, scale


@triton.jit
def _round(x, values, scales, width, BLOCK: tl.constexpr, QUANT_MAX: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    rounded, scale = on_grid(tl.load(x + row * width + i, mask=i < width, other=0.0).to(tl.float32), QUANT_MAX, KIND)
    tl.store(values + row * width + i, rounded, mask=i < width)
    tl.store(scales + row, scale)


@dataclass(frozen=True)
class Plan:
    """How a product is cut: outputs and inputs a program looks at at once, and parts of the inputs."""

    outputs: int
    inputs: int
    parts: int
    warps: int
    stages: int

    @classmethod
    def of(cls, outputs: int, inputs: int, rows: int, parts: bool) -> Plan:
        """By measurement on an H200. In floats a row's bits hang on the parts, which must not depend on `rows`."""
        block = 64 if outputs >= 3584 else 32 if outputs >= 2048 else 16
        programs, cuts = -(-outputs // block), 1
        while parts and programs * cuts < BUSY and inputs >= 4 * cuts * UNIT:
            cuts *= 2
        if parts:
            return cls(block, 256, cuts, 4, 3) if inputs >= 8192 else cls(block, 128, cuts, 4, 4)
        if programs <= ONE_WAVE:
            return cls(block, 256, cuts, 4, 5)
        return cls(block, 256, cuts, 4, 3) if rows <= 32 else cls(block, 128, cuts, 4, 4)


@triton.jit
def _product(
    x, x_scales, weight, scales, bias, out, rows, inputs, outputs,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    BIAS: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows, by one part of the inputs; or some gates with what they let through, in pairs."""
    o = tl.program_id(0) * OUT + tl.arange(0, OUT)
    real = o < outputs
    if GATED:
        o = o // 2 + o % 2 * (outputs // 2)
    part = tl.program_id(1)
    each = tl.cdiv(tl.cdiv(inputs, UNIT), PARTS) * UNIT
    r = tl.arange(0, ROWS)
    i = tl.arange(0, IN)
    total = tl.zeros([OUT, ROWS], tl.int32 if KIND == 1 else tl.float32)
    left = weight + o[:, None].to(tl.int64) * inputs
    right = x + r[None, :] * inputs
    for begin in range(part * each, tl.minimum(part * each + each, inputs), IN):
        at = begin + i
        w = tl.load(left + at[None, :], mask=real[:, None] & (at < inputs)[None, :], other=0.0)
        v = tl.load(right + at[:, None], mask=(r < rows)[None, :] & (at < inputs)[:, None], other=0.0)
        total = tl.dot(w, v, total, out_dtype=tl.int32 if KIND == 1 else tl.float32)
    if SCALED:
        by_row = tl.load(x_scales + r, mask=r < rows, other=0.0)
        by_output = tl.load(scales + o, mask=real, other=0.0)
        total = total.to(tl.float32) * by_row[None, :] * by_output[:, None]
        if BIAS:
            total += tl.load(bias + o, mask=real, other=0.0).to(tl.float32)[:, None]
    value = total.to(out.dtype.element_ty)
    if GATED:
        value, outputs = through_gates(value, OUT, ROWS, GELU), outputs // 2
        o = tl.program_id(0) * (OUT // 2) + tl.arange(0, OUT // 2)
        real = o < outputs
    target = out + (part * rows + r[None, :]).to(tl.int64) * outputs + o[:, None]
    tl.store(target, value, mask=real[:, None] & (r < rows)[None, :])


@triton.jit
def _scale(sums, by_row, by_output, bias, out, outputs, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = o < outputs
    total = tl.load(sums + row * outputs + o, mask=real, other=0).to(tl.float32)
    total = total * tl.load(by_row + row) * tl.load(by_output + o, mask=real, other=0.0)
    if BIAS:
        total += tl.load(bias + o, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + o, total.to(out.dtype.element_ty), mask=real)


def empty_rows(rows: int, width: int, rounding: QuantFormat, device: torch.device) -> QuantizedRows:
    """Room for rows in 8 bits."""
    values = torch.empty(rows, width, dtype=QUANT_DTYPES[rounding], device=device)
    return QuantizedRows(values, torch.empty(rows, dtype=torch.float32, device=device))


def round_rows(x: Tensor, rounding: QuantFormat) -> QuantizedRows:
    """x [rows, in], each row by its own largest value."""
    rows, width = x.shape
    out = empty_rows(rows, width, rounding, x.device)
    block = triton.next_power_of_2(width)
    _round[(rows,)](
        x, out.values, out.scales, width, BLOCK=block, QUANT_MAX=QUANT_MAX[rounding], KIND=KINDS[rounding],
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return out


def product(x: QuantizedRows, weights: QuantizedRows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [rows, in], at most MOST_ROWS, times weights [out, in]: [rows, out] in `dtype`."""
    out = torch.empty(1, len(x), len(weights), dtype=dtype, device=x.values.device)
    _multiply(x, weights, bias, out, Plan.of(len(weights), x.values.shape[1], len(x), False), True)
    return out[0]


def gated_product(
    x: QuantizedRows, weights: QuantizedRows, bias: Tensor | None, dtype: torch.dtype, gelu: bool
) -> Tensor:
    """What `gate` makes of `product`, bit for bit: weights [2 * out, in], gates first -> [rows, out]."""
    out = torch.empty(1, len(x), len(weights) // 2, dtype=dtype, device=x.values.device)
    _multiply(x, weights, bias, out, Plan.of(len(weights), x.values.shape[1], len(x), False), True, gelu)
    return out[0]


def sums(x: QuantizedRows, weights: QuantizedRows) -> Tensor:
    """The same before any scale, [parts, rows, out] in int32 or float32, for a reader that adds them up."""
    plan = Plan.of(len(weights), x.values.shape[1], len(x), True)
    dtype = torch.int32 if x.rounding == "int8" else torch.float32
    out = torch.empty(plan.parts, len(x), len(weights), dtype=dtype, device=x.values.device)
    _multiply(x, weights, None, out, plan, False)
    return out


def scaled(totals: Tensor, x: QuantizedRows, weights: QuantizedRows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sums [rows, out] that somebody else added up, as `product` would give them."""
    rows, outputs = totals.shape
    out = torch.empty(rows, outputs, dtype=dtype, device=totals.device)
    _scale[(rows, triton.cdiv(outputs, 2048))](
        totals, x.scales, weights.scales, weights.scales if bias is None else bias, out, outputs,
        BLOCK=2048, BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out


def _multiply(
    x: QuantizedRows,
    weights: QuantizedRows,
    bias: Tensor | None,
    out: Tensor,
    plan: Plan,
    scale: bool,
    gelu: bool | None = None,
) -> None:
    """`gelu`: by which gates go; None: there are none."""
    rows, inputs = x.values.shape
    outputs, wide = len(weights), max(16, triton.next_power_of_2(rows))
    stages = stages_that_fit(plan.stages, (plan.outputs + wide) * plan.inputs, x.values.device)
    _product[(triton.cdiv(outputs, plan.outputs), plan.parts)](
        x.values, x.scales, weights.values, weights.scales, weights.scales if bias is None else bias, out,
        rows, inputs, outputs,
        ROWS=wide, OUT=plan.outputs, IN=plan.inputs, PARTS=plan.parts, UNIT=UNIT,
        BIAS=bias is not None, SCALED=scale, GATED=gelu is not None, GELU=bool(gelu),
        KIND=KINDS[x.rounding], num_warps=plan.warps, num_stages=stages,
    )  # fmt: skip
