"""Finds the quantized layers of a checkpoint and replaces their tensors by weights that are decoded on reading."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from foretell.errors import ModelError, UnsupportedModelError
from foretell.hub.quantized.bitsandbytes import STATES, open_4bit, open_int8
from foretell.hub.quantized.blocks import open_blocks
from foretell.hub.quantized.fp4 import open_fp4, open_mxfp4_blocks
from foretell.hub.quantized.gptq import open_awq, open_gptq
from foretell.hub.quantized.packed import open_packed
from foretell.hub.quantized.parts import FP8, Parts
from foretell.hub.quantized.settings import Layout, Quantization
from foretell.hub.tensor import LazyTensor

PARTS: dict[Layout, frozenset[str]] = {
    "blocks": frozenset({"weight", "weight_scale", "weight_scale_inv", "weight_zero_point"}),
    "packed": frozenset({"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"}),
    "fp4": frozenset({"weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_scale_2"}),
    "mxfp4 blocks": frozenset({"blocks", "scales"}),
    "gptq": frozenset({"qweight", "qzeros", "scales", "g_idx"}),
    "awq": frozenset({"qweight", "qzeros", "scales"}),
    "NF4 or FP4": frozenset(
        {"weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES}
    ),
    "int8 with SCB": frozenset({"weight", "SCB", "weight_format"}),
}
NAMES = sorted({part for parts in PARTS.values() for part in parts} - {"blocks"}, key=len, reverse=True)
PART = re.compile(rf"^(?P<module>.+)\.(?P<part>{'|'.join(map(re.escape, NAMES))})$")
MXFP4_PART = re.compile(r"^(?P<module>.+)_(?P<part>blocks|scales)$")
# Scales of activations and of a quantized KV cache. Both are kept in our own formats, so their scales are not used.
ACTIVATIONS = re.compile(r"\.((input|output|q|k|v|kv|activation)_(scale|zero_point)|input_global_scale)$")


def dequantized_tensors(tensors: Mapping[str, LazyTensor], quantization: Quantization) -> dict[str, LazyTensor]:
    """Return the tensors with quantized layers as weights, named `weight`, that are decoded when they are read.

    A layer counts as quantized by the tensors it has, so modules that any list of the config ignores stay as stored.
    """
    layers: dict[str, dict[str, LazyTensor]] = {}
    plain: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if (match := _match(name, quantization)) is not None:
            layers.setdefault(match["module"], {})[match["part"]] = tensor
        elif not ACTIVATIONS.search(name):
            plain[name] = tensor
    for module, parts in layers.items():
        weight = _open(Parts(module, parts), quantization)
        if weight.name in plain:
            raise ModelError(f"tensor {weight.name!r} is stored twice, quantized and not; remove one of them")
        plain[weight.name] = weight
    return plain


def describe_formats(tensors: Iterable[LazyTensor], method: str) -> str:
    """Return the method and the stored formats in words, the most frequent first."""
    formats = Counter(tensor.stored.name for tensor in tensors if tensor.stored is not None)
    *others, last = [name for name, _ in formats.most_common()] or ["no quantized layer"]
    names = f"{', '.join(others)} and {last}" if others else last
    return f"{method} {names}".strip()


def _match(name: str, quantization: Quantization) -> re.Match[str] | None:
    return (MXFP4_PART if "mxfp4 blocks" in quantization.layouts else PART).match(name)


def _open(parts: Parts, quantization: Quantization) -> LazyTensor:
    """Return the weight of a layer, as stored if it is not quantized."""
    layout = _layout(parts)
    if layout is None:
        return parts.tensors["weight"]
    if layout == "gptq" and "awq" in quantization.layouts:
        layout = "awq"
    first = f"{parts.module}.{next(iter(parts.tensors))}"
    if layout not in quantization.layouts:
        wanted = " or ".join(sorted(quantization.layouts))
        raise UnsupportedModelError(
            f"tensor {first!r} belongs to a layer in the layout {layout}, but the config's method has {wanted}; "
            "use shards of one checkpoint"
        )
    if extra := sorted(parts.tensors.keys() - PARTS[layout]):
        raise ModelError(
            f"tensor '{parts.module}.{extra[0]}' does not belong to a layer in the layout {layout}; "
            "use shards of one checkpoint"
        )
    return _open_layout(parts, layout, quantization)


def _layout(parts: Parts) -> Layout | None:
    """Return the layout of a layer by the tensors it has; None for a plain weight."""
    names, weight = parts.tensors.keys(), parts.tensors.get("weight")
    dtype = "" if weight is None else weight.dtype
    if "qweight" in names or "qzeros" in names:
        return "gptq"
    if "weight_packed" in names:
        return "packed" if parts.tensors["weight_packed"].dtype == "I32" else "fp4"
    if "blocks" in names or names == {"scales"}:
        return "mxfp4 blocks"
    if "weight.absmax" in names or any(state in names for state in STATES):
        return "NF4 or FP4"
    if "SCB" in names:
        return "int8 with SCB"
    if dtype == "U8":
        return "fp4" if "weight_scale" in names else "NF4 or FP4"
    if names == {"weight"} and dtype not in (*FP8, "I8"):
        return None
    return "blocks"


def _open_layout(parts: Parts, layout: Layout, quantization: Quantization) -> LazyTensor:
    if layout == "gptq":
        assert quantization.gptq is not None, "a method with this layout has its settings"
        return open_gptq(parts, quantization.gptq)
    if layout == "blocks":
        return open_blocks(parts, quantization.block)
    if layout == "fp4":
        return open_fp4(parts, "weight_packed" if "weight_packed" in parts.tensors else "weight")
    if layout == "mxfp4 blocks":
        return replace(open_mxfp4_blocks(parts), name=parts.module)
    simple = {"packed": open_packed, "awq": open_awq, "NF4 or FP4": open_4bit, "int8 with SCB": open_int8}
    return simple[layout](parts)
