"""bitsandbytes: NF4 and FP4 with a table of values and a scale per block, and int8 with a scale per output."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from foretell.hub.quantized.parts import FLOATS, Parts
from foretell.hub.tensor import LazyTensor

if TYPE_CHECKING:
    import torch

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
MOST_STATE = 1 << 16  # bytes of the description of a tensor
LEVELS = 16  # values of 4 bits
ABSMAX_LEVELS = 256  # values of an 8-bit absmax
INT8_STEPS = 127  # the absmax of an output is this value


def dequantize_4bit(packed: torch.Tensor, table: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Return table[value] * absmax in float32: packed [n / 2] uint8 with the first value in high bits, absmax [n]."""
    import torch

    values = torch.stack([packed >> 4, packed & 15], -1).flatten()
    return table.float()[values.int()] * absmax


def dequantize_absmax(values: torch.Tensor, table: torch.Tensor, absmax: torch.Tensor, offset: float) -> torch.Tensor:
    """Return the absmax of blocks that are quantized themselves: table[value] * absmax of 256 blocks + offset."""
    return table.float()[values.int()] * absmax.float() + offset


def dequantize_int8(values: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Return value * absmax / 127 in float32: values [out, in] int8, absmax [out]."""
    return values.float() * (absmax.float()[:, None] / INT8_STEPS)


def open_int8(parts: Parts) -> LazyTensor:
    """Return the weight of a layer in int8."""
    weight, outputs, inputs = parts.matrix("weight", ("I8",))
    absmax = parts.need("SCB", FLOATS, (outputs,), (outputs, 1))
    form = parts.get("weight_format", ("U8",), (), (1,))
    if form is not None and int(form.load().reshape(()).item()) != 0:
        raise parts.wrong("weight_format", "names a layout for a GPU; only `row` is supported")
    return parts.weight(
        (outputs, inputs),
        "int8 per channel",
        lambda start, stop: dequantize_int8(weight.rows(start, stop), absmax.load().flatten()[start:stop]),
    )


def open_4bit(parts: Parts) -> LazyTensor:
    """Return the weight of a layer in NF4 or FP4, whose shape is in the description of its tensor."""
    part, state = _read_state(parts)
    shape, block = _shape(parts, part, state), _integer(parts, part, state, "blocksize")
    outputs, inputs = shape
    size = outputs * inputs
    packed = parts.need("weight", ("U8",), (size // 2, 1), (1, size // 2), (size // 2,))
    table = parts.need("weight.quant_map", FLOATS, (LEVELS,))
    blocks = -(-size // block)
    nested = "weight.nested_absmax" in parts.tensors
    absmax = parts.need("weight.absmax", ("U8",) if nested else FLOATS, (blocks,))
    read_absmax = (
        _nested(parts, part, state, absmax, blocks) if nested else lambda first, last: absmax.load()[first:last]
    )

    def decode(start: int, stop: int) -> torch.Tensor:
        import torch

        begin, end = start * inputs, stop * inputs
        first = begin // block
        scales = read_absmax(first, -(-end // block)).float()
        values = torch.arange(begin, end) // block - first
        content = packed.load().flatten()[begin // 2 : end // 2]
        return dequantize_4bit(content, table.load(), scales[values]).view(stop - start, inputs)

    kind = "NF4" if part == STATES[0] else "FP4"
    return parts.weight(shape, kind, decode)


def _nested(parts: Parts, part: str, state: dict[str, Any], absmax: LazyTensor, blocks: int) -> Any:
    """Return a function that reads a range of absmax values, which are quantized in 8 bits."""
    size, offset = _integer(parts, part, state, "nested_blocksize"), state.get("nested_offset", 0.0)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise parts.wrong(part, "must state a finite nested_offset")
    outer = parts.need("weight.nested_absmax", FLOATS, (-(-blocks // size),))
    levels = parts.need("weight.nested_quant_map", FLOATS, (ABSMAX_LEVELS,))

    def read(first: int, last: int) -> torch.Tensor:
        import torch

        scales = outer.load()[torch.arange(first, last) // size]
        return dequantize_absmax(absmax.load()[first:last], levels.load(), scales, float(offset))

    return read


def _read_state(parts: Parts) -> tuple[str, dict[str, Any]]:
    """Return the name and content of the JSON object that describes a tensor."""
    part = next((name for name in STATES if name in parts.tensors), STATES[0])
    stored = parts.need(part, ("U8",))
    if len(stored.shape) != 1 or stored.shape[0] > MOST_STATE:
        raise parts.wrong(part, f"has shape {list(stored.shape)}, but must be a short list of bytes")
    try:
        state = json.loads(stored.load().numpy().tobytes())
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise parts.wrong(part, "must hold a JSON object")
    return part, state


def _shape(parts: Parts, part: str, state: dict[str, Any]) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise parts.wrong(part, "must state the shape of a matrix")
    if shape[1] % 2:
        raise parts.wrong(part, f"states {shape[1]} inputs; only even numbers are supported")
    return shape[0], shape[1]


def _integer(parts: Parts, part: str, state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or not 0 < value <= 1 << 20:
        raise parts.wrong(part, f"must state {name}")
    return value
