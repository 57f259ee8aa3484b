"""Rotary position embedding (RoPE), the torch reference."""

from __future__ import annotations

from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [rows, heads, dim] by cos and sin [rows, 1, dim]; the first half of sin is already negated."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
