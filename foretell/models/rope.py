"""RoPE tables: cosines and sines for each context extension (linear, Llama 3, YaRN, LongRoPE)."""

from __future__ import annotations

import math
from dataclasses import replace

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
    """Return the factor of cosines and sines (the attention factor of YaRN and LongRoPE)."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0


def rope_table(rope: Rope, dim: int, context: int) -> Tensor:
    """Return [context, 2, dim]: cosines, then sines with the first half negated, as `kernels.rotary` reads them.

    Dimensions that are not rotated have cosine 1 and sine 0; `rotated_first` has the order of a head's dimensions.
    """
    rotated = 0 if rope.kind == "none" else rope.dims or dim
    if rope.kind == "longrope" and context > rope.original_context:
        # By the longest sequence served, not by each: keys in the cache keep their rotation while a sequence grows.
        rope = replace(rope, factors=rope.long_factors)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * inverse_frequencies(rope, rotated)
    kept = (context, (dim - rotated) // 2)
    cos = torch.cat([angles.cos() * amplitude(rope), torch.ones(kept)], -1)
    sin = torch.cat([angles.sin() * amplitude(rope), torch.zeros(kept)], -1)
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)


def rotated_first(rope: Rope, dim: int) -> list[int]:
    """Return where each dimension of a head is in the checkpoint, in the order that `rope_table` has.

    RoPE pairs dimension i with i + dim / 2, so the rotated dimensions at the start of a head are spread over both
    halves. Scores do not change, because queries and keys have the same order.
    """
    half = (rope.dims or dim) // 2
    kept = range(2 * half, dim)
    return [*range(half), *kept[: len(kept) // 2], *range(half, 2 * half), *kept[len(kept) // 2 :]]


def query_scales(rope: Rope, context: int) -> Tensor:
    """Return the factor of the queries at each position, [context], in float32."""
    steps = torch.arange(context, dtype=torch.float32).div(rope.original_context).floor()
    return 1 + rope.query_growth * torch.log1p(steps)
