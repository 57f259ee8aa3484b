# mypy: ignore-errors
"""The middle of a feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gate(gate_up, out, width, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = i < width
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * width + i, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=real, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2 * inner)  # (1 + tanh(x)) / 2 is sigmoid(2 x)
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + row * width + i, (gate.to(kind).to(tl.float32) * up).to(kind), mask=real)


def gate(gate_up: Tensor, gelu: bool) -> Tensor:
    """gate_up [n, 2 * ffn]: the first half through silu or gelu (by tanh), times the second -> [n, ffn]."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(n, width, dtype=gate_up.dtype, device=gate_up.device)
    _gate[(n, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK, GELU=gelu, num_warps=4)
    return out
