"""RoPE tables: cosines and sines for each context extension (linear, Llama 3, YaRN)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import Rope


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """Return the rotation per token of each pair of dimensions, [dim / 2], in float32."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.factors:
        plain = plain / torch.tensor(rope.factors)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend those in between."""
    wavelength = 2 * math.pi / plain
    low = rope.original_context / rope.low_freq_factor
    high = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(wavelength > low, plain / rope.factor, plain)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, stretched)


def _yarn(rope: Rope, plain: Tensor, dim: int) -> Tensor:
    """Blend scaled and plain frequencies by a ramp over the dimensions (YaRN)."""

    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def amplitude(rope: Rope) -> float:
    """Return the factor of cosines and sines (YaRN's attention factor)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0


def rope_table(rope: Rope, dim: int, context: int) -> Tensor:
    """Return [context, 2, dim]: cosines, then sines with the first half negated, as `kernels.rotary` reads them."""
    angles = torch.arange(context, dtype=torch.float32)[:, None] * inverse_frequencies(rope, dim)
    cos, sin = angles.cos() * amplitude(rope), angles.sin() * amplitude(rope)
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
