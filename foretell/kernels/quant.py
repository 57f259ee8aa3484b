"""Linear layers with quantized weights and activations: the reference definitions.

There are two schemes. On a CPU activations are quantized to int8 in groups of `GROUP_SIZE` inputs, weights to int8 (one
scale per output) or int4 (one scale per group); `kernels.native` has the fast implementation. On a CUDA device rows and
weights are int8 or fp8 with one scale per row; `kernels.triton.quant_linear` has the fast implementation.

Either way a row is quantized by itself and its products are added in a fixed order with one float rounding per
operation, so the result for a row does not depend on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

QuantFormat = Literal["int8", "int4", "fp8"]  # a CPU serves int8 and int4, a CUDA device int8 and fp8

GROUP_SIZE = 32  # inputs that share a scale, in activations and in int4 weights
MIN_ABSMAX = 1e-30  # a group whose largest magnitude is at most this is quantized to zeros
QUANT_DTYPES: dict[QuantFormat, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
QUANT_MAX: dict[QuantFormat, float] = {"int8": 127.0, "fp8": 448.0}  # largest representable value
INT_MM_MIN_ROWS = 17  # fewest rows that `torch._int_mm` accepts


@dataclass(frozen=True)
class Int8Weights:
    """An int8 matrix with one scale per output: values [out, in] from -127 to 127, scales [out] in float32."""

    values: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """Return the matrix in float32, [out, in]."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True)
class Int4Weights:
    """An int4 matrix with one scale per group: values [out, in] from -8 to 7, scales [out, groups] in bfloat16."""

    values: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """Return the matrix in float32, [out, in]."""
        return (split_groups(self.values) * self.scales.float()[:, :, None]).flatten(1)[:, : self.values.shape[1]]


def split_groups(x: Tensor) -> Tensor:
    """Return x [rows, in] as [rows, groups, GROUP_SIZE]; the last group is padded with zeros."""
    padded = F.pad(x, (0, -x.shape[1] % GROUP_SIZE))
    return padded.view(x.shape[0], padded.shape[1] // GROUP_SIZE, GROUP_SIZE)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize float32 rows x [rows, in] per group.

    Return int8 values from -127 to 127, [rows, groups, GROUP_SIZE], and float32 scales [rows, groups]. The scale of a
    group with a value that is not finite is NaN.
    """
    groups = split_groups(x)
    peaks = groups.abs().amax(-1, keepdim=True)
    usable = peaks.isfinite() & (peaks > MIN_ABSMAX)
    values = torch.where(usable, (groups * (127 / peaks)).round(), 0).to(torch.int8)
    scales = torch.where(usable, peaks / 127, torch.where(peaks.isfinite(), 0.0, torch.nan))
    return values, scales[:, :, 0]


def int8_linear(x: Tensor, weights: Int8Weights, bias: Tensor | None = None) -> Tensor:
    """Multiply float32 rows x [rows, in] by int8 weights -> [rows, out]."""
    total = x.new_zeros(x.shape[0], weights.values.shape[0])
    for product, scales, _ in _group_products(x, weights.values):
        total = total + product * scales
    total = total * weights.scales
    return total if bias is None else total + bias


def int4_linear(x: Tensor, weights: Int4Weights, bias: Tensor | None = None) -> Tensor:
    """Multiply float32 rows x [rows, in] by int4 weights -> [rows, out]."""
    total = x.new_zeros(x.shape[0], weights.values.shape[0])
    for product, scales, group in _group_products(x, weights.values):
        total = total + product * weights.scales[:, group].float() * scales
    return total if bias is None else total + bias


def _group_products(x: Tensor, matrix: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield for each group its integer products [rows, out], exact in float32, row scales [rows, 1] and its index."""
    values, scales = quantize_groups(x)
    matrix = split_groups(matrix)
    for group in range(matrix.shape[1]):
        yield F.linear(values[:, group].float(), matrix[:, group].float()), scales[:, group, None], group


@dataclass(frozen=True)
class QuantizedRows:
    """Rows in int8 or fp8 with one scale each: values [rows, in], scales [rows] in float32.

    Holds the activations of a step, or a weight matrix with a row per output.
    """

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
        """Return the rows in float32, [rows, in]."""
        return self.values.float() * self.scales[:, None]


def quantize_rows(x: Tensor, format: QuantFormat) -> QuantizedRows:
    """Quantize x [rows, in] with one scale per row, so that the row's largest magnitude maps to the format's."""
    wide, largest = x.float(), QUANT_MAX[format]
    peaks = wide.abs().amax(-1).clamp(min=MIN_ABSMAX)
    values = wide * (largest / peaks)[:, None]
    if format == "int8":
        values = values.round()
    return QuantizedRows(values.to(QUANT_DTYPES[format]), peaks / largest)


def unscaled_matmul(x: QuantizedRows, weights: QuantizedRows) -> Tensor:
    """Multiply the values of x [rows, in] and weights [out, in] -> [rows, out], int32 for int8 and float32 for fp8."""
    if x.format == "fp8":
        return x.values.float() @ weights.values.float().T
    if x.values.is_cuda and not (x.values.shape[1] % 16 or len(weights) % 16):
        padding = max(0, INT_MM_MIN_ROWS - len(x))
        return torch._int_mm(F.pad(x.values, (0, 0, 0, padding)), weights.values.T)[: len(x)]
    return (x.values.double() @ weights.values.double().T).to(torch.int32)  # exact: far below 2 ** 53


def quantized_linear(x: Tensor, weights: QuantizedRows, bias: Tensor | None = None) -> Tensor:
    """Multiply x [rows, in] by quantized weights [out, in] -> [rows, out] in the dtype of x."""
    rows = quantize_rows(x, weights.format)
    product = unscaled_matmul(rows, weights).float() * rows.scales[:, None] * weights.scales
    return (product if bias is None else product + bias.float()).to(x.dtype)
