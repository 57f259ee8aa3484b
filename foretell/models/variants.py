"""Decoders made from a decoder: cheaper ways to run the same weights, as drafts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from foretell.kernels.native.huge_pages import Room
from foretell.kernels.quant import Rounding
from foretell.utils.system import trim_memory

from .config import ModelConfig
from .decoder import Decoder
from .layers import Linear
from .load import sketch, weight_bytes
from .quantize import Bits, linear_bytes, quantize_linear, round_linear, rounded_bytes

Module = TypeVar("Module", bound=nn.Module)


def first_layers(model: Decoder, layers: int) -> Decoder:
    """The first `layers` of a decoder with its final norm and head; nothing is copied."""
    early = copy.copy(model)
    early._modules = dict(model._modules)
    early.blocks = nn.ModuleList(list(model.blocks)[:layers])
    early.config, early.local = _shortened(model.config, layers), _shortened(model.local, layers)
    return early


def _shortened(config: ModelConfig, layers: int) -> ModelConfig:
    return replace(config, layers=layers, ropes=config.ropes[:layers], windows=config.windows[:layers])


def quantized(model: Decoder, bits: Bits) -> Decoder:
    """A decoder with its matrices on a grid; all else, the tables `prepare` will fill included, is the model's own.

    Make it from a loaded model before a runner prepares that one: then its float weights are packed away.
    """
    return _on_grid(model, bits, Room())


def quantized_bytes(
    config: ModelConfig, bits: Bits, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> int:
    """What `quantized` takes beside the model itself."""
    layers = [(name, module) for name, module in sketch(config, dtype).named_modules() if isinstance(module, Linear)]
    return sum(linear_bytes(layer.inputs, layer.outputs, bits_of(name, bits), dtype, device) for name, layer in layers)


def quantize_weights(model: Decoder, bits: Bits) -> Decoder:
    """The model itself with its matrices on a grid; floats are let go as soon as they are rounded.

    The embedding stays as it is: a step reads a few of its rows, so there is nothing to gain but memory.
    """
    room = Room()
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, Linear):
                module._modules[name] = quantize_linear(child, bits_of(name, bits), room)
                child.weight = None
    trim_memory()
    return model


def round_weights(model: Decoder, rounding: Rounding) -> Decoder:
    """The model itself with its matrices in 8 bits for a CUDA device; the embedding stays as it is."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, Linear):
                module._modules[name] = round_linear(child, rounding)
                child.weight = None
    return model


def prepared_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    bits: Bits | None = None,
    rounding: Rounding | None = None,
) -> int:
    """What a model's weights take once it is ready to run, with its matrices in floats or on a grid."""
    if bits is None and rounding is None:
        return weight_bytes(config, dtype, device)
    model = sketch(config, dtype)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    matrices = {id(layer.weight) for layer in layers} - {id(model.embed)}
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in matrices)
    if bits is None:
        return rest * dtype.itemsize + sum(rounded_bytes(layer.inputs, layer.outputs) for layer in layers)
    return rest * dtype.itemsize + quantized_bytes(config, bits, dtype, device)


def _on_grid(module: Module, bits: Bits, room: Room) -> Module:
    twin = copy.copy(module)
    twin._modules = {
        name: child if child is None else _child(name, child, bits, room) for name, child in module._modules.items()
    }
    return twin


def _child(name: str, child: nn.Module, bits: Bits, room: Room) -> nn.Module:
    if isinstance(child, Linear):
        return quantize_linear(child, bits_of(name, bits), room)
    return _on_grid(child, bits, room)


def bits_of(name: str, bits: Bits) -> Bits:
    """The head stays at 8 bits: with 4 there, too, SmolLM2-135M accepts 3.3 tokens a step instead of 3.7."""
    return 8 if name == "head" else bits
