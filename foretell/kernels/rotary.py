"""Rotary positions."""

from __future__ import annotations

from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [rows, heads, dim] by cos and sin [rows, 1, dim]; sin's first half is negated already."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
