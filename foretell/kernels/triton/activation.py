# mypy: ignore-errors
"""Gated activations (SwiGLU, GeGLU) as device functions, for the kernels that end with one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def apply_glu(gate, up, GELU: tl.constexpr):
    """Return activation(gate) * up in the dtype of both, with the intermediate precision of the torch definition."""
    dtype = gate.dtype
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2 * inner)  # (1 + tanh(x)) / 2 is sigmoid(2 x)
    else:
        gate = gate * tl.sigmoid(gate)
    return (gate.to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def apply_glu_pairs(pairs, OUT: tl.constexpr, ROWS: tl.constexpr, GELU: tl.constexpr):
    """Return [OUT / 2, ROWS] for [OUT, ROWS] whose rows alternate between gate and up."""
    gate, up = pairs.reshape(OUT // 2, 2, ROWS).permute(0, 2, 1).split()
    return apply_glu(gate, up, GELU)
