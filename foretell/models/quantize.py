"""Linear layers on a grid of 8 or 4 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from foretell.kernels.native.huge_pages import HugePageArena
from foretell.kernels.native.library import Library, library
from foretell.kernels.native.packed import PackedLinear, packed_bytes
from foretell.kernels.quant import (
    QUANT_DTYPES,
    QUANT_MAX,
    Int4Weights,
    Int8Weights,
    QuantFormat,
    QuantizedRows,
    quantized_linear,
    split_groups,
)
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.layers import Linear
from foretell.models.load import meta_model, weight_bytes
from foretell.utils.system import trim_memory

Bits = Literal[8, 4]
STARTS = (1.0, 0.9, 1.1)  # of the largest weight's share: where the search for a group's scale begins
CHUNK = 256  # outputs quantized at a time: what is worked out on the way stays in the cache


class QuantizedLinear(Linear):
    """Rows times a matrix of integers. The rows are rounded, too: to 8 bits, group by group."""

    def __init__(self, product: PackedLinear) -> None:
        nn.Module.__init__(self)
        self.outputs, self.inputs = product.outputs, product.inputs
        self.weight, self.packed, self.bias = None, None, None
        self.product = product

    @property
    def native(self) -> PackedLinear:
        return self.product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.float()).to(x.dtype)


class CudaQuantizedLinear(Linear):
    """Rows times a matrix in 8 bits on a CUDA device; this runs its definition, an executor the kernels."""

    def __init__(self, rounded: QuantizedRows, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.outputs, self.inputs = rounded.values.shape
        self.weight, self.packed, self.bias = None, None, bias
        self.quantized = rounded

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.quantized, self.bias)


def quantize_linear_cuda(layer: Linear, rounding: QuantFormat) -> CudaQuantizedLinear:
    """The layer with its weights in 8 bits, each output by its own largest value."""
    assert layer.weight is not None, "quantize before weights are packed"
    values, scales = _in_chunks(layer.weight.data, lambda chunk: _round_outputs(chunk, rounding))
    return CudaQuantizedLinear(QuantizedRows(values, scales), layer.bias)


def _round_outputs(weight: Tensor, rounding: QuantFormat) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1) / QUANT_MAX[rounding]
    on_grid = weight / torch.where(scales > 0, scales, 1.0)[:, None]
    return (on_grid.round_() if rounding == "int8" else on_grid).to(QUANT_DTYPES[rounding]), scales


def quantize_linear(layer: Linear, bits: Bits, room: HugePageArena) -> Linear:
    """The layer with its weights rounded, in `room`; where there is no library for integers, in the type they had."""
    assert layer.weight is not None, "quantize before weights are packed"
    weight = layer.weight.data
    if weight.is_cuda and bits == 8:
        return quantize_linear_cuda(layer, "int8")
    rounded = quantize_int8(weight) if bits == 8 else quantize_int4(weight)
    bias = None if layer.bias is None else layer.bias.data
    if (found := native_for(weight.device)) is not None:
        return QuantizedLinear(PackedLinear(found, rounded, bias, room))
    plain = Linear(layer.inputs, layer.outputs, layer.bias is not None)
    plain.weight, plain.bias = nn.Parameter(rounded.dequantized().to(weight.dtype), requires_grad=False), layer.bias
    plain.pack(room)
    return plain


def native_for(device: torch.device | str) -> Library | None:
    """The library, if it computes where the weights are."""
    return library() if torch.device(device).type == "cpu" else None


def linear_bytes(inputs: int, outputs: int, bits: Bits, dtype: torch.dtype, device: torch.device | str) -> int:
    """What a layer's weights take once `quantize_linear` made it."""
    if torch.device(device).type == "cuda" and bits == 8:
        return cuda_linear_bytes(inputs, outputs)
    if native_for(device) is None:
        return inputs * outputs * dtype.itemsize
    return packed_bytes(outputs, inputs, bits)


def cuda_linear_bytes(inputs: int, outputs: int) -> int:
    """What a layer's weights take once `quantize_linear_cuda` made it."""
    return inputs * outputs + 4 * outputs


def quantize_int8(weight: Tensor) -> Int8Weights:
    """weight [out, in], each output by its own largest value."""
    return Int8Weights(*_in_chunks(weight, _quantize_outputs))


def quantize_int4(weight: Tensor) -> Int4Weights:
    """weight [out, in], each group by the scale with the least squared error of those that were tried."""
    groups, scales = _in_chunks(weight, lambda chunk: _quantize_groups(split_groups(chunk)))
    return Int4Weights(groups.flatten(1)[:, : weight.shape[1]].contiguous(), scales)


def _in_chunks(weight: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Values and scales, some outputs at a time, each put where it belongs: no memory is left in pieces."""
    first = quantize(weight[:CHUNK].float())
    whole = tuple(part.new_empty(len(weight), *part.shape[1:]) for part in first)
    for at in range(0, len(weight), CHUNK):
        for target, part in zip(whole, quantize(weight[at : at + CHUNK].float()) if at else first, strict=True):
            target[at : at + CHUNK] = part
    return whole[0], whole[1]


def _quantize_outputs(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1) / 127
    steps = torch.where(scales > 0, scales, 1.0)[:, None]
    return (weight / steps).round_().to(torch.int8), scales


def _quantize_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[out, groups, GROUP] on the best of several grids: int8 values, bfloat16 scales [out, groups]."""
    peaks = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8  # the side of -8 has one step more
    best_values, best_scales = torch.zeros_like(groups), torch.zeros_like(peaks)
    least = torch.full_like(peaks, torch.inf)
    for start in STARTS:
        values = _on_grid(groups, peaks * start)
        scales = _fitted(groups, values)
        values = _on_grid(groups, scales)
        error = (values * scales - groups).square_().sum(-1, keepdim=True)
        better = error < least
        best_values, best_scales = torch.where(better, values, best_values), torch.where(better, scales, best_scales)
        least = torch.where(better, error, least)
    return best_values.to(torch.int8), best_scales[:, :, 0].to(torch.bfloat16)


def _on_grid(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / torch.where(scales == 0, 1.0, scales)).round_().clamp_(-8, 7)


def _fitted(groups: Tensor, values: Tensor) -> Tensor:
    """The scales with which these values come nearest to the groups, as bfloat16 has them."""
    scales = (groups * values).sum(-1, keepdim=True) / values.square().sum(-1, keepdim=True).clamp_(min=1)
    return scales.to(torch.bfloat16).float()


Module = TypeVar("Module", bound=nn.Module)


def quantized_copy(model: Decoder, bits: Bits) -> Decoder:
    """A decoder with its matrices on a grid; all else, the tables `prepare` will fill included, is the model's own.

    Make it from a loaded model before a runner prepares that one: then its float weights are packed away.
    """
    return _quantized_copy(model, bits, HugePageArena())


def quantized_bytes(
    config: ModelConfig, bits: Bits, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> int:
    """What `quantized_copy` takes beside the model itself."""
    layers = [
        (name, module) for name, module in meta_model(config, dtype).named_modules() if isinstance(module, Linear)
    ]
    return sum(
        linear_bytes(layer.inputs, layer.outputs, layer_bits(name, bits), dtype, device) for name, layer in layers
    )


def quantize_weights(model: Decoder, bits: Bits) -> Decoder:
    """The model itself with its matrices on a grid; floats are let go as soon as they are rounded.

    The embedding stays as it is: a step reads a few of its rows, so there is nothing to gain but memory.
    """
    room = HugePageArena()
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, Linear):
                module._modules[name] = quantize_linear(child, layer_bits(name, bits), room)
                child.weight = None
    trim_memory()
    return model


def quantize_weights_cuda(model: Decoder, rounding: QuantFormat) -> Decoder:
    """The model itself with its matrices in 8 bits for a CUDA device; the embedding stays as it is."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, Linear):
                module._modules[name] = quantize_linear_cuda(child, rounding)
                child.weight = None
    return model


def prepared_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    bits: Bits | None = None,
    rounding: QuantFormat | None = None,
) -> int:
    """What a model's weights take once it is ready to run, with its matrices in floats or on a grid."""
    if bits is None and rounding is None:
        return weight_bytes(config, dtype, device)
    model = meta_model(config, dtype)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    matrices = {id(layer.weight) for layer in layers} - {id(model.embed)}
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in matrices)
    if bits is None:
        return rest * dtype.itemsize + sum(cuda_linear_bytes(layer.inputs, layer.outputs) for layer in layers)
    return rest * dtype.itemsize + quantized_bytes(config, bits, dtype, device)


def _quantized_copy(module: Module, bits: Bits, room: HugePageArena) -> Module:
    twin = copy.copy(module)
    twin._modules = {
        name: child if child is None else _child(name, child, bits, room) for name, child in module._modules.items()
    }
    return twin


def _child(name: str, child: nn.Module, bits: Bits, room: HugePageArena) -> nn.Module:
    if isinstance(child, Linear):
        return quantize_linear(child, layer_bits(name, bits), room)
    return _quantized_copy(child, bits, room)


def layer_bits(name: str, bits: Bits) -> Bits:
    """The head stays at 8 bits: with 4 there, too, SmolLM2-135M accepts 3.3 tokens a step instead of 3.7."""
    return 8 if name == "head" else bits
