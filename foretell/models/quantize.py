"""Linear layers on a grid of 8 or 4 bits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from foretell.kernels.native.library import Library, library
from foretell.kernels.native.packed import PackedLinear, packed_bytes
from foretell.kernels.native.room import Room
from foretell.kernels.quantized import Int4Weights, Int8Weights, in_groups

from .layers import Linear

Bits = Literal[8, 4]
STARTS = (1.0, 0.9, 1.1)  # of the largest weight's share: where the search for a group's scale begins
CHUNK = 256  # outputs quantized at a time: what is worked out on the way stays in the cache


class QuantizedLinear(Linear):
    """Rows times a matrix of integers. The rows are rounded to 8 bits, too, each by its own largest value."""

    def __init__(self, weights: Int8Weights | Int4Weights, bias: Tensor | None, library: Library, room: Room) -> None:
        nn.Module.__init__(self)
        self.outputs, self.inputs = weights.values.shape
        self.weight, self.packed, self.bias = None, None, None
        self.product = PackedLinear(library, weights, bias, room)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.float()).to(x.dtype)


def quantize_linear(layer: Linear, bits: Bits, room: Room) -> Linear:
    """The layer with its weights rounded, in `room`; where there is no library for integers, in the type they had."""
    assert layer.weight is not None, "quantize before weights are packed"
    weight = layer.weight.data
    rounded = quantize_int8(weight) if bits == 8 else quantize_int4(weight)
    bias = None if layer.bias is None else layer.bias.data
    if (found := native_for(weight.device)) is not None:
        return QuantizedLinear(rounded, bias, found, room)
    plain = Linear(layer.inputs, layer.outputs, layer.bias is not None)
    plain.weight, plain.bias = nn.Parameter(rounded.dequantized().to(weight.dtype), requires_grad=False), layer.bias
    plain.pack()
    return plain


def native_for(device: torch.device | str) -> Library | None:
    """The library, if it computes where the weights are."""
    return library() if torch.device(device).type == "cpu" else None


def linear_bytes(inputs: int, outputs: int, bits: Bits, dtype: torch.dtype, device: torch.device | str) -> int:
    """What a layer's weights take once `quantize_linear` made it."""
    if native_for(device) is None:
        return inputs * outputs * dtype.itemsize
    return packed_bytes(outputs, inputs, bits)


def quantize_int8(weight: Tensor) -> Int8Weights:
    """weight [out, in], each output by its own largest value."""
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    steps = torch.where(scales > 0, scales, 1.0)[:, None]
    return Int8Weights((weight / steps).round_().to(torch.int8), scales)


def quantize_int4(weight: Tensor) -> Int4Weights:
    """weight [out, in], each group by the scale with the least squared error of those that were tried."""
    pairs = [_quantize_groups(in_groups(chunk.float())) for chunk in torch.split(weight, CHUNK)]
    values, scales = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return Int4Weights(values.flatten(1)[:, : weight.shape[1]].contiguous(), scales.squeeze(-1))


def _quantize_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The best of several grids, each fitted once: int8 values and a bfloat16 scale a group."""
    peaks = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8  # the side of -8 has one step more
    best_values, best_scales, least = groups, peaks, torch.full_like(peaks, torch.inf)
    for start in STARTS:
        values = _on_grid(groups, peaks * start)
        scales = ((groups * values).sum(-1, keepdim=True) / values.square().sum(-1, keepdim=True).clamp_(min=1)).to(
            torch.bfloat16
        )
        values = _on_grid(groups, scales.float())
        error = (values * scales.float() - groups).square_().sum(-1, keepdim=True)
        better = error < least
        best_values, best_scales = torch.where(better, values, best_values), torch.where(better, scales, best_scales)
        least = torch.where(better, error, least)
    return best_values.to(torch.int8), best_scales.to(torch.bfloat16)


def _on_grid(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / torch.where(scales == 0, 1.0, scales)).round_().clamp_(-8, 7)
