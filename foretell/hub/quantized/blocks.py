"""FP8 and int8 weights with one scale per tensor, output, group of inputs or block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from foretell.hub.quantized.parts import FLOATS, FP8, Parts
from foretell.hub.tensor import LazyTensor

if TYPE_CHECKING:
    import torch

SCALES = ("weight_scale_inv", "weight_scale")  # DeepSeek and Qwen call the factor of a block the inverse of its scale
SCALE_TYPES = (*FLOATS, "F8_E8M0")


def dequantize_blocks(
    values: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    first: int = 0,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (value - zero point) * scale in float32, [rows, in]; `values` are the rows of a weight from `first`.

    Scales and zero points are [row blocks, column blocks] with `block` rows and columns each.
    """
    import torch

    rows, inputs = torch.arange(first, first + len(values)) // block[0], values.shape[1]
    columns = min(block[1], inputs)  # a block of any size that a config states needs no more memory than the weight
    wide = [
        each.float()[rows].repeat_interleave(columns, 1)[:, :inputs] for each in (scales, zeros) if each is not None
    ]
    return (values.float() if zeros is None else values.float() - wide[1]) * wide[0]


def open_blocks(parts: Parts, block: tuple[int, int] | None) -> LazyTensor:
    """Return the weight of a layer; `block` is the size that the config states, if any."""
    weight, outputs, inputs = parts.matrix("weight", (*FP8, "I8"))
    kind = "int8" if weight.dtype == "I8" else "FP8"
    part = next((name for name in SCALES if name in parts.tensors), SCALES[1])
    scale = parts.need(part, SCALE_TYPES)
    size, grid, how = _layout(parts, part, (outputs, inputs), block)
    zero = parts.get("weight_zero_point", ("I8", "U8", "I32", *FLOATS), scale.shape)

    def decode(start: int, stop: int) -> torch.Tensor:
        zeros = None if zero is None else zero.load().reshape(grid)
        return dequantize_blocks(weight.rows(start, stop), scale.load().reshape(grid), size, start, zeros)

    return parts.weight((outputs, inputs), f"{kind} {how}", decode)


def _layout(
    parts: Parts, part: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[tuple[int, int], tuple[int, int], str]:
    """Return the rows and columns that share a scale, the shape of the scales, and both in words."""
    stored, (outputs, inputs) = parts.tensors[part].shape, shape
    if math.prod(stored) == 1:
        return shape, (1, 1), "per tensor"
    if stored in ((outputs,), (outputs, 1)):
        return (1, inputs), (outputs, 1), "per channel"
    if block is not None:
        grid = (-(-outputs // block[0]), -(-inputs // block[1]))
        if stored in (grid, (grid[0], 1, grid[1], 1)):  # ModelOpt keeps the dimensions within a block
            return block, grid, f"{block[0]}x{block[1]} blocks"
        wanted = f"[1], [{outputs}, 1] or {list(grid)} for {block[0]}x{block[1]} blocks"
        raise parts.wrong(part, f"has shape {list(stored)}, but must have {wanted}")
    if len(stored) == 2 and stored[0] == outputs:
        size = parts.group_size(part, inputs, stored[1])
        return (1, size), (outputs, stored[1]), f"group {size}"
    raise parts.wrong(part, f"has shape {list(stored)}, but must have [1], [{outputs}, 1] or [{outputs}, groups]")
