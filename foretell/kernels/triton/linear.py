# mypy: ignore-errors
"""A few rows times a matrix, which is read once: bound by memory, and a row's bits do not depend on its neighbours.

The weights stand left in the product and the rows right, so the instructions are the same for one row and for many.
The inputs are cut at fixed places; who reads the result adds the parts up, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import through_gates
from .launch_limits import stages_that_fit

MOST_ROWS = 256
FEW_ROWS = 64
LIBRARY_ROWS = 32  # from more on the library's product is as fast or faster
BUSY = 192  # programs that keep an H200's memory busy where the inputs can be cut
ONE_WAVE = 132  # multiprocessors: fewer programs than these need more bytes on their way each
UNIT = 128  # inputs a part is made of


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
        """By measurement on an H200. What a row's bits hang on must not depend on `rows`."""
        block = 64 if outputs >= 3584 else 32 if outputs >= 2048 else 16
        programs, cuts = -(-outputs // block), 1
        while parts and programs * cuts < BUSY and inputs >= 4 * cuts * UNIT:
            cuts *= 2
        if programs * cuts <= ONE_WAVE and rows <= FEW_ROWS:
            return cls(block, 128, cuts, 4, 6)
        if cuts > 1 and block == 64 and rows <= FEW_ROWS:
            return cls(block, 128, cuts, 4, 3)
        if rows <= 32:
            return cls(block, 64, cuts, 4, 4 if block == 64 else 6)
        if rows <= FEW_ROWS:
            tall = programs >= 4 * ONE_WAVE and block == 64
            return cls(128, 64, cuts, 8, 6) if tall else cls(block, 64, cuts, 4, 4)
        if rows <= 128:
            return cls(block, 64, cuts, 4, 4)
        return cls(max(block, 128) if block == 64 else block, 64, cuts, 8 if block == 64 else 4, 4)


@triton.jit
def _linear(
    x, weight, bias, out, rows, inputs, outputs,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
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
    total = tl.zeros([OUT, ROWS], tl.float32)
    left = weight + o[:, None].to(tl.int64) * inputs
    right = x + r[None, :] * inputs
    for begin in range(part * each, tl.minimum(part * each + each, inputs), IN):
        at = begin + i
        w = tl.load(left + at[None, :], mask=real[:, None] & (at < inputs)[None, :], other=0.0)
        v = tl.load(right + at[:, None], mask=(r < rows)[None, :] & (at < inputs)[:, None], other=0.0)
        total = tl.dot(w, v, total)
    if BIAS:
        added = tl.load(bias + o, mask=real, other=0.0).to(tl.float32)
        total += tl.where(part == 0, added, 0.0)[:, None]
    value = total.to(out.dtype.element_ty)
    if GATED:
        value, outputs = through_gates(value, OUT, ROWS, GELU), outputs // 2
        o = tl.program_id(0) * (OUT // 2) + tl.arange(0, OUT // 2)
        real = o < outputs
    target = out + (part * rows + r[None, :]).to(tl.int64) * outputs + o[:, None]
    tl.store(target, value, mask=real[:, None] & (r < rows)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, parts: bool = False) -> Tensor:
    """x [rows, in], at most MOST_ROWS, times weight [out, in] plus bias: [rows, out].

    With `parts` the sum is left to whoever reads it: [parts, rows, out], in float32 if there are several.
    """
    rows, outputs = len(x), len(weight)
    plan = Plan.of(outputs, x.shape[1], rows, parts)
    out = torch.empty(plan.parts, rows, outputs, dtype=x.dtype if plan.parts == 1 else torch.float32, device=x.device)
    _launch(plan, x, weight, bias, out)
    return out if parts else out[0]


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    """What `gate` makes of `linear`, bit for bit: x [rows, in] by weight [2 * out, in], gates first -> [rows, out]."""
    plan = Plan.of(len(weight), x.shape[1], len(x), False)
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(plan, x, weight, bias, out, gelu)
    return out


def _launch(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, gelu: bool | None = None) -> None:
    """`gelu`: by which gates go; None: there are none."""
    (rows, inputs), outputs = x.shape, len(weight)
    wide = max(16, triton.next_power_of_2(rows))
    stages = stages_that_fit(plan.stages, (plan.outputs + wide) * plan.inputs * x.element_size(), x.device)
    _linear[(triton.cdiv(outputs, plan.outputs), plan.parts)](
        x, weight, weight if bias is None else bias, out, rows, inputs, outputs,
        ROWS=wide, OUT=plan.outputs, IN=plan.inputs, PARTS=plan.parts, UNIT=UNIT,
        BIAS=bias is not None, GATED=gelu is not None, GELU=bool(gelu), num_warps=plan.warps, num_stages=stages,
    )  # fmt: skip
