# mypy: ignore-errors
"""The middle of a feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels.quant import QUANT_MAX, QuantFormat, QuantizedRows

from .activation import gated
from .quant_linear import KINDS, empty_rows, on_grid

BLOCK = 1024


@triton.jit
def _gate(
    gate_up, out, scales, width, BLOCK: tl.constexpr, GELU: tl.constexpr, KIND: tl.constexpr, QUANT_MAX: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = i < width
    gate = tl.load(gate_up + row * 2 * width + i, mask=real, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=real, other=0.0)
    mixed = gated(gate, up, GELU)
    if KIND == 0:
        tl.store(out + row * width + i, mixed, mask=real)
    else:
        rounded, scale = on_grid(mixed.to(tl.float32), QUANT_MAX, KIND)
        tl.store(out + row * width + i, rounded, mask=real)
        tl.store(scales + row, scale)


def gate(gate_up: Tensor, gelu: bool, rounding: QuantFormat | None = None) -> Tensor | QuantizedRows:
    """gate_up [n, 2 * ffn]: the first half through silu or gelu (by tanh), times the second -> [n, ffn].

    With `rounding` in 8 bits; a row's scale is its own, so one program has the whole row.
    """
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    rounded = None if rounding is None else empty_rows(n, width, rounding, gate_up.device)
    out = torch.empty(n, width, dtype=gate_up.dtype, device=gate_up.device) if rounded is None else rounded.values
    block = BLOCK if rounded is None else triton.next_power_of_2(width)
    _gate[(n, triton.cdiv(width, block))](
        gate_up, out, gate_up if rounded is None else rounded.scales, width, BLOCK=block, GELU=gelu,
        KIND=KINDS[rounding], QUANT_MAX=QUANT_MAX.get(rounding, 1.0), num_warps=max(4, min(16, block // 512)),
    )  # fmt: skip
    return out if rounded is None else rounded
