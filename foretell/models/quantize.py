"""Quantized linear layers and decoders: int8 and int4 on a CPU, int8 and fp8 on a CUDA device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

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
    QuantizedRows,
    quantized_linear,
    split_groups,
)
from foretell.kernels.quant import QuantFormat as QuantFormat  # exported, for packages above that do not import kernels
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.layers import Linear
from foretell.models.load import meta_model, weight_bytes
from foretell.utils.system import trim_memory

Module = TypeVar("Module", bound=nn.Module)

SCALE_STARTS = (1.0, 0.9, 1.1)  # factors of absmax / 8 at which the search for the scale of an int4 group starts
# Starts for weights that are int4 already: one of them is the scale itself, since the largest value is 1 to 8 of it.
GRID_STARTS = tuple(8 / steps for steps in range(1, 9))
GRID_SAMPLE = 16  # outputs by which a matrix is found to be int4 already
GRID_ERROR = 2**-8  # largest relative error of an int4 matrix, whose scales are rounded to bfloat16
CHUNK_OUTPUTS = 256  # outputs quantized at a time, so that intermediate results stay in the CPU cache


class NativeQuantizedLinear(Linear):
    """A linear layer with int8 or int4 weights on a CPU. The native library quantizes its inputs to int8 per group."""

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
    """A linear layer with int8 or fp8 weights on a CUDA device.

    `forward` is the reference; the CUDA executor calls the Triton kernels on `quantized` instead.
    """

    def __init__(self, quantized: QuantizedRows, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.outputs, self.inputs = quantized.values.shape
        self.weight, self.packed, self.bias = None, None, bias
        self.quantized = quantized

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.quantized, self.bias)


def quantize_linear(layer: Linear, format: QuantFormat, arena: HugePageArena) -> Linear:
    """Return the layer with quantized weights, which a CPU keeps in `arena`.

    Where no kernel multiplies integers, the weights are quantized, dequantized and kept in their dtype.
    """
    assert layer.weight is not None, "quantize before weights are packed"
    weight = layer.weight.data
    if weight.is_cuda and format != "int4":
        return quantize_linear_cuda(layer, format)
    quantized = quantize_int4(weight) if format == "int4" else quantize_int8(weight)
    bias = None if layer.bias is None else layer.bias.data
    if (native := native_for(weight.device)) is not None:
        return NativeQuantizedLinear(PackedLinear(native, quantized, bias, arena))
    plain = Linear(layer.inputs, layer.outputs, layer.bias is not None)
    plain.weight, plain.bias = nn.Parameter(quantized.dequantized().to(weight.dtype), requires_grad=False), layer.bias
    plain.pack(arena)
    return plain


def quantize_linear_cuda(layer: Linear, format: QuantFormat) -> CudaQuantizedLinear:
    """Return the layer with int8 or fp8 weights and one scale per output."""
    assert layer.weight is not None, "quantize before weights are packed"
    values, scales = _in_chunks(layer.weight.data, lambda chunk: _quantize_outputs(chunk, format))
    return CudaQuantizedLinear(QuantizedRows(values, scales), layer.bias)


def native_for(device: torch.device | str) -> Library | None:
    """Return the native library if it computes on `device`."""
    return library() if torch.device(device).type == "cpu" else None


def linear_bytes(inputs: int, outputs: int, format: QuantFormat, dtype: torch.dtype, device: torch.device | str) -> int:
    """Return the bytes of a layer's weights after `quantize_linear`."""
    if torch.device(device).type == "cuda" and format != "int4":
        return cuda_linear_bytes(inputs, outputs)
    if native_for(device) is None:
        return inputs * outputs * dtype.itemsize
    return packed_bytes(outputs, inputs, 4 if format == "int4" else 8)


def cuda_linear_bytes(inputs: int, outputs: int) -> int:
    """Return the bytes of a layer's weights after `quantize_linear_cuda`."""
    return inputs * outputs + 4 * outputs


def quantize_int8(weight: Tensor) -> Int8Weights:
    """Quantize weight [out, in] to int8 with one scale per output, its largest magnitude / 127."""
    return Int8Weights(*_in_chunks(weight, lambda chunk: _quantize_outputs(chunk, "int8")))


def quantize_int4(weight: Tensor) -> Int4Weights:
    """Quantize weight [out, in] to int4 with one scale per group, the one of least squared error among those tried.

    A matrix that is int4 already, such as that of a GPTQ checkpoint, keeps its values.
    """
    starts = GRID_STARTS if _is_int4(weight[:GRID_SAMPLE].float()) else SCALE_STARTS
    groups, scales = _in_chunks(weight, lambda chunk: _quantize_int4_groups(split_groups(chunk), starts))
    return Int4Weights(groups.flatten(1)[:, : weight.shape[1]].contiguous(), scales)


def _is_int4(weight: Tensor) -> bool:
    """Return whether every group has integer values from -8 to 7 of one scale, up to the rounding of scales."""
    groups = split_groups(weight)
    values, scales = _quantize_int4_groups(groups, GRID_STARTS)
    error = (values * scales.float()[:, :, None] - groups).square_().sum()
    return bool(error <= GRID_ERROR**2 * groups.square().sum())


def _in_chunks(weight: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Quantize some outputs at a time into preallocated values and scales, which avoids memory fragmentation."""
    first = quantize(weight[:CHUNK_OUTPUTS].float())
    results = tuple(part.new_empty(len(weight), *part.shape[1:]) for part in first)
    for at in range(0, len(weight), CHUNK_OUTPUTS):
        parts = quantize(weight[at : at + CHUNK_OUTPUTS].float()) if at else first
        for result, part in zip(results, parts, strict=True):
            result[at : at + CHUNK_OUTPUTS] = part
    return results[0], results[1]


def _quantize_outputs(weight: Tensor, format: QuantFormat) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1) / QUANT_MAX[format]
    scaled = weight / torch.where(scales > 0, scales, 1.0)[:, None]
    return (scaled.round_() if format == "int8" else scaled).to(QUANT_DTYPES[format]), scales


def _quantize_int4_groups(groups: Tensor, starts: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return int8 values [out, groups, GROUP_SIZE] from -8 to 7 and bfloat16 scales [out, groups].

    From each start one step of least squares refines the scale; the group keeps the result of least squared error.
    """
    # The signed value of largest magnitude maps to -8, because the negative side has one step more.
    peaks = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    best_values, best_scales = torch.zeros_like(groups), torch.zeros_like(peaks)
    least = torch.full_like(peaks, torch.inf)
    for start in starts:
        values = _round_to_int4(groups, peaks * start)
        scales = _fit_scales(groups, values)
        values = _round_to_int4(groups, scales)
        error = (values * scales - groups).square_().sum(-1, keepdim=True)
        better = error < least
        best_values, best_scales = torch.where(better, values, best_values), torch.where(better, scales, best_scales)
        least = torch.where(better, error, least)
    return best_values.to(torch.int8), best_scales[:, :, 0].to(torch.bfloat16)


def _round_to_int4(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / torch.where(scales == 0, 1.0, scales)).round_().clamp_(-8, 7)


def _fit_scales(groups: Tensor, values: Tensor) -> Tensor:
    """Return the least-squares scales of the groups for these integer values, in bfloat16 precision."""
    scales = (groups * values).sum(-1, keepdim=True) / values.square().sum(-1, keepdim=True).clamp_(min=1)
    return scales.to(torch.bfloat16).float()


def quantized_copy(model: Decoder, format: QuantFormat) -> Decoder:
    """Return a decoder with quantized linear layers that shares everything else, RoPE tables included, with `model`.

    Call it on a loaded model before a runner prepares that model, which frees the float weights.
    """
    return _quantized_copy(model, format, HugePageArena())


def quantized_bytes(
    config: ModelConfig, format: QuantFormat, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> int:
    """Return the bytes that `quantized_copy` takes in addition to the model itself."""
    modules = meta_model(config, dtype).named_modules()
    layers = [(layer_format(name, format), layer) for name, layer in modules if isinstance(layer, Linear)]
    return sum(linear_bytes(layer.inputs, layer.outputs, own, dtype, device) for own, layer in layers)


def quantize_weights(model: Decoder, format: QuantFormat) -> Decoder:
    """Quantize the linear layers of `model` in place for its device, freeing float weights as it goes.

    The embedding stays in floats: a step reads only a few of its rows, so quantizing it would save memory but no time.
    """
    if model.embed.is_cuda and format != "int4":
        return quantize_weights_cuda(model, format)
    arena = HugePageArena()
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, Linear):
                module._modules[name] = quantize_linear(child, layer_format(name, format), arena)
                child.weight = None
    trim_memory()
    return model


def quantize_weights_cuda(model: Decoder, format: QuantFormat) -> Decoder:
    """Quantize the linear layers of `model` in place to int8 or fp8 for the CUDA kernels."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, Linear):
                module._modules[name] = quantize_linear_cuda(child, format)
                child.weight = None
    return model


def prepared_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    format: QuantFormat | None = None,
) -> int:
    """Return the bytes of a model's weights once it is ready to run, in floats or quantized."""
    if format is None:
        return weight_bytes(config, dtype, device)
    model = meta_model(config, dtype)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    matrices = {id(layer.weight) for layer in layers} - {id(model.embed)}
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in matrices)
    return rest * dtype.itemsize + quantized_bytes(config, format, dtype, device)


def _quantized_copy(module: Module, format: QuantFormat, arena: HugePageArena) -> Module:
    twin = copy.copy(module)
    twin._modules = {
        name: child if child is None else _quantized_child(name, child, format, arena)
        for name, child in module._modules.items()
    }
    return twin


def _quantized_child(name: str, child: nn.Module, format: QuantFormat, arena: HugePageArena) -> nn.Module:
    if isinstance(child, Linear):
        return quantize_linear(child, layer_format(name, format), arena)
    return _quantized_copy(child, format, arena)


def layer_format(name: str, format: QuantFormat) -> QuantFormat:
    """Return the format of a layer by its name: int8 for the LM head of an int4 model, else `format`.

    With an int4 head, SmolLM2-135M as a draft of itself has 3.3 accepted tokens per step instead of 3.7.
    """
    return "int8" if name == "head" and format == "int4" else format
