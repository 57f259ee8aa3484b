"""Rows times a matrix of 8- or 4-bit integers. These are the definitions; `kernels.native` has the fast twins.

A row is quantized by itself, in groups of inputs, and the groups are added up in float32 from the first to the last,
one rounding an operation. So a row's bits depend on nothing that stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZE = 32  # inputs that share a scale, in rows and in 4-bit weights
MIN_ABSMAX = 1e-30  # a group no larger than this is taken for zeros


@dataclass(frozen=True)
class Int8Weights:
    """values [out, in] from -127 to 127 times scales [out], float32."""

    values: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """The matrix these stand for, in float32."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True)
class Int4Weights:
    """values [out, in] from -8 to 7 times scales [out, groups], bfloat16."""

    values: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """The matrix these stand for, in float32."""
        return (split_groups(self.values) * self.scales.float()[:, :, None]).flatten(1)[:, : self.values.shape[1]]


def split_groups(x: Tensor) -> Tensor:
    """x [rows, in] as [rows, groups, GROUP]; the last group is filled up with zeros."""
    padded = F.pad(x, (0, -x.shape[1] % GROUP_SIZE))
    return padded.view(x.shape[0], padded.shape[1] // GROUP_SIZE, GROUP_SIZE)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in], float32, as int8 from -127 to 127, [rows, groups, GROUP], and float32 scales [rows, groups].

    A group that is not finite has the scale NaN.
    """
    groups = split_groups(x)
    peaks = groups.abs().amax(-1, keepdim=True)
    usable = peaks.isfinite() & (peaks > MIN_ABSMAX)
    values = torch.where(usable, (groups * (127 / peaks)).round(), 0).to(torch.int8)
    scales = torch.where(usable, peaks / 127, torch.where(peaks.isfinite(), 0.0, torch.nan))
    return values, scales[:, :, 0]


def int8_linear(x: Tensor, weights: Int8Weights, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], float32, times 8-bit weights -> [rows, out]."""
    total = x.new_zeros(x.shape[0], weights.values.shape[0])
    for product, scales, _ in _products(x, weights.values):
        total = total + product * scales
    total = total * weights.scales
    return total if bias is None else total + bias


def int4_linear(x: Tensor, weights: Int4Weights, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], float32, times 4-bit weights -> [rows, out]."""
    total = x.new_zeros(x.shape[0], weights.values.shape[0])
    for product, scales, group in _products(x, weights.values):
        total = total + product * weights.scales[:, group].float() * scales
    return total if bias is None else total + bias


def _products(x: Tensor, matrix: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """By group: rows times outputs, [rows, out], whole numbers small enough for float32; the rows' scales [rows, 1]."""
    values, scales = quantize_groups(x)
    matrix = split_groups(matrix)
    for group in range(matrix.shape[1]):
        yield F.linear(values[:, group].float(), matrix[:, group].float()), scales[:, group, None], group


QuantFormat = Literal["int8", "fp8"]
QUANT_DTYPES: dict[QuantFormat, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
QUANT_MAX: dict[QuantFormat, float] = {"int8": 127.0, "fp8": 448.0}
INT_MM_MIN_ROWS = 17  # the least the library multiplies


@dataclass(frozen=True)
class QuantizedRows:
    """values [rows, in] in 8 bits times scales [rows], float32: rows of a step, or a matrix by its outputs."""

    values: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.values)

    @property
    def format(self) -> QuantFormat:
        return "int8" if self.values.dtype == torch.int8 else "fp8"

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantized(self) -> Tensor:
        """What these stand for, in float32."""
        return self.values.float() * self.scales[:, None]


def quantize_rows(x: Tensor, rounding: QuantFormat) -> QuantizedRows:
    """x [rows, in], each row on a grid whose end is the row's largest value."""
    wide, largest = x.float(), QUANT_MAX[rounding]
    peaks = wide.abs().amax(-1).clamp(min=MIN_ABSMAX)
    values = wide * (largest / peaks)[:, None]
    if rounding == "int8":
        values = values.round()
    return QuantizedRows(values.to(QUANT_DTYPES[rounding]), peaks / largest)


def unscaled_matmul(x: QuantizedRows, weights: QuantizedRows) -> Tensor:
    """[rows, in] times [out, in] before any scale, [rows, out]: int32, and float32 for floats."""
    if x.format == "fp8":
        return x.values.float() @ weights.values.float().T
    if x.values.is_cuda and not (x.values.shape[1] % 16 or len(weights) % 16):
        lacking = max(0, INT_MM_MIN_ROWS - len(x))
        return torch._int_mm(F.pad(x.values, (0, 0, 0, lacking)), weights.values.T)[: len(x)]
    return (x.values.double() @ weights.values.double().T).to(torch.int32)  # exact: far below 2 ** 53


def quantized_linear(x: Tensor, weights: QuantizedRows, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times 8-bit weights [out, in] -> [rows, out] in x's type."""
    rows = quantize_rows(x, weights.format)
    product = unscaled_matmul(rows, weights).float() * rows.scales[:, None] * weights.scales
    return (product if bias is None else product + bias.float()).to(x.dtype)
