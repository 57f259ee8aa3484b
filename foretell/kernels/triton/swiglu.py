# mypy: ignore-errors
"""Gated activation of a feed-forward layer: SwiGLU or GeGLU, optionally quantized."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels.quant import QUANT_MAX, QuantFormat, QuantizedRows

from .activation import apply_glu
from .quant_linear import FORMAT_CODES, empty_quantized, quantize_row

BLOCK = 1024  # columns per program


@triton.jit
def _glu_kernel(
    gate_up, out, scales, width, BLOCK: tl.constexpr, GELU: tl.constexpr, FORMAT: tl.constexpr, QUANT_MAX: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = i < width
    gate = tl.load(gate_up + row * 2 * width + i, mask=valid, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=valid, other=0.0)
    activated = apply_glu(gate, up, GELU)
    if FORMAT == 0:
        tl.store(out + row * width + i, activated, mask=valid)
    else:
        quantized, scale = quantize_row(activated.to(tl.float32), QUANT_MAX, FORMAT)
        tl.store(out + row * width + i, quantized, mask=valid)
        tl.store(scales + row, scale)


def gated_activation(gate_up: Tensor, gelu: bool, format: QuantFormat | None = None) -> Tensor | QuantizedRows:
    """Return silu(gate) * up, or with gelu (tanh approximation), for gate_up [n, 2 * ffn] -> [n, ffn].

    With `format` the result is quantized with one scale per row, so a program processes an entire row.
    """
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    quantized = None if format is None else empty_quantized(n, width, format, gate_up.device)
    out = torch.empty(n, width, dtype=gate_up.dtype, device=gate_up.device) if quantized is None else quantized.values
    block = BLOCK if quantized is None else triton.next_power_of_2(width)
    _glu_kernel[(n, triton.cdiv(width, block))](
        gate_up, out, gate_up if quantized is None else quantized.scales, width, BLOCK=block, GELU=gelu,
        FORMAT=FORMAT_CODES[format], QUANT_MAX=QUANT_MAX.get(format, 1.0), num_warps=max(4, min(16, block // 512)),
    )  # fmt: skip
    return out if quantized is None else quantized
