"""Rows times a matrix, both in 8 bits: each row by its own largest value, each output by its own. The definitions.

With integers the sum is exact, whoever adds it up and in whatever order, so a row's result is the same in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Rounding = Literal["int8", "fp8"]
TYPES: dict[Rounding, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST: dict[Rounding, float] = {"int8": 127.0, "fp8": 448.0}
LIBRARY_ROWS = 17  # the least the library multiplies
LEAST_PEAK = 1e-30  # a row no larger than this is taken for zeros


@dataclass(frozen=True)
class Rounded:
    """values [rows, in] in 8 bits times scales [rows], float32: rows of a step, or a matrix by its outputs."""

    values: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.values)

    @property
    def rounding(self) -> Rounding:
        return "int8" if self.values.dtype == torch.int8 else "fp8"

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantized(self) -> Tensor:
        """What these stand for, in float32."""
        return self.values.float() * self.scales[:, None]


def round_rows(x: Tensor, rounding: Rounding) -> Rounded:
    """x [rows, in], each row on a grid whose end is the row's largest value."""
    wide, largest = x.float(), LARGEST[rounding]
    peaks = wide.abs().amax(-1).clamp(min=LEAST_PEAK)
    values = wide * (largest / peaks)[:, None]
    if rounding == "int8":
        values = values.round()
    return Rounded(values.to(TYPES[rounding]), peaks / largest)


def rounded_sums(x: Rounded, weights: Rounded) -> Tensor:
    """[rows, in] times [out, in] before any scale, [rows, out]: int32, and float32 for floats."""
    if x.rounding == "fp8":
        return x.values.float() @ weights.values.float().T
    if x.values.is_cuda and not (x.values.shape[1] % 16 or len(weights) % 16):
        lacking = max(0, LIBRARY_ROWS - len(x))
        return torch._int_mm(F.pad(x.values, (0, 0, 0, lacking)), weights.values.T)[: len(x)]
    return (x.values.double() @ weights.values.double().T).to(torch.int32)  # exact: far below 2 ** 53


def rounded_linear(x: Tensor, weights: Rounded, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times 8-bit weights [out, in] -> [rows, out] in x's type."""
    rows = round_rows(x, weights.rounding)
    product = rounded_sums(rows, weights).float() * rows.scales[:, None] * weights.scales
    return (product if bias is None else product + bias.float()).to(x.dtype)
