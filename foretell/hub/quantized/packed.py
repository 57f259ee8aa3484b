"""Integers of 2, 4 or 8 bits packed into int32 along the inputs: `pack-quantized` of compressed-tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.hub.quantized.parts import FLOATS, INT4_GROUP, WORDS, Parts, unpack
from foretell.hub.tensor import LazyTensor

if TYPE_CHECKING:
    import torch

BITS = (4, 8, 2)


def dequantize_packed(
    words: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor, bits: int, zeros: torch.Tensor | None = None
) -> torch.Tensor:
    """Return (value - zero point) * scale in float32, [rows, in].

    Values [rows, words] are stored plus 2 ** (bits - 1). Column i has the scale and zero point of `groups[i]`.
    """
    values = unpack(words, bits)[:, : len(groups)].float() - 2 ** (bits - 1)
    if zeros is not None:
        values -= zeros.float()[:, groups]
    weight: torch.Tensor = values * scales.float()[:, groups]
    return weight


def open_packed(parts: Parts) -> LazyTensor:
    """Return the weight of a layer, whose bits follow from the shapes."""
    packed, outputs, columns = parts.matrix("weight_packed", WORDS)
    inputs, bits = _inputs(parts, outputs, columns)
    scale = parts.need("weight_scale", FLOATS)
    if len(scale.shape) != 2 or scale.shape[0] != outputs:
        raise parts.wrong("weight_scale", f"has shape {list(scale.shape)}, but must have [{outputs}, groups]")
    count = scale.shape[1]
    size = parts.group_size("weight_scale", inputs, count)
    zero = parts.get("weight_zero_point", WORDS, (-(-outputs * bits // 32), count))
    index = parts.get("weight_g_idx", ("I32", "I64"), (inputs,))

    def decode(start: int, stop: int) -> torch.Tensor:
        zeros = None if zero is None else unpack_rows(zero.load(), bits, start, stop) - 2 ** (bits - 1)
        groups = read_groups(parts, "weight_g_idx", index, inputs, size, count)
        return dequantize_packed(packed.rows(start, stop), scale.rows(start, stop), groups, bits, zeros)

    kind = "" if zero is None else "asymmetric "
    kind += f"int{bits} per channel" if count == 1 else f"int{bits} group {size}"
    fits_int4 = bits == 4 and zero is None and index is None and (count == 1 or size % INT4_GROUP == 0)
    return parts.weight((outputs, inputs), kind + ("" if index is None else ", act order"), decode, fits_int4)


def _inputs(parts: Parts, outputs: int, columns: int) -> tuple[int, int]:
    """Return the inputs of the layer and the bits per weight, for which there is one possibility at most."""
    stated = parts.need("weight_shape", ("I64", "I32"), (2,)).load().tolist()
    bits = next((bits for bits in BITS if stated[1] > 0 and -(-stated[1] * bits // 32) == columns), None)
    if stated[0] != outputs or bits is None:
        raise parts.wrong("weight_shape", f"says {stated}, which does not fit weight_packed {[outputs, columns]}")
    return int(stated[1]), bits


def unpack_rows(words: torch.Tensor, bits: int, start: int, stop: int) -> torch.Tensor:
    """Unpack rows `start` to `stop` of a matrix that is packed along its rows, [words, columns] -> [rows, columns]."""
    each = 32 // bits
    first = start // each
    wide = unpack(words[first : -(-stop // each)].t(), bits).t()
    return wide[start - first * each : stop - first * each]


def read_groups(parts: Parts, part: str, index: LazyTensor | None, inputs: int, size: int, count: int) -> torch.Tensor:
    """Return the group of each input: `index`, or else consecutive groups of `size`."""
    import torch

    if index is None:
        return torch.arange(inputs) // size
    groups = index.load().long()
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        raise parts.wrong(part, f"must name groups from 0 to {count - 1}")
    return groups
