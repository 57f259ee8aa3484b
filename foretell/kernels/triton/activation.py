# mypy: ignore-errors
"""What a gate lets through, in whichever kernel it is worked out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """Both in the model's type, and so is what comes out; every step rounded as its definition rounds it."""
    kind = gate.dtype
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2 * inner)  # (1 + tanh(x)) / 2 is sigmoid(2 x)
    else:
        gate = gate * tl.sigmoid(gate)
    return (gate.to(kind).to(tl.float32) * up).to(kind)


@triton.jit
def through_gates(pairs, OUT: tl.constexpr, ROWS: tl.constexpr, GELU: tl.constexpr):
    """[OUT, ROWS], behind each gate what it lets through -> [OUT / 2, ROWS]."""
    gate, up = pairs.reshape(OUT // 2, 2, ROWS).permute(0, 2, 1).split()
    return gated(gate, up, GELU)
