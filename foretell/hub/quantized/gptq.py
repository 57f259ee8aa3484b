"""GPTQ and AWQ: small integers packed into int32, with zero points.

GPTQ packs 2, 4 or 8 bits along the inputs, [in / 8, out], with an order of groups. AWQ packs 4 bits along the outputs,
[in, out / 8], in the interleaved order of its GEMM kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.hub.quantized.packed import read_groups
from foretell.hub.quantized.parts import FLOATS, INT4_GROUP, WORDS, Parts, unpack
from foretell.hub.tensor import LazyTensor

if TYPE_CHECKING:
    import torch

BITS = (2, 4, 8)


def dequantize_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    bits: int,
    zero_offset: int = 1,
) -> torch.Tensor:
    """Return (value - zero point) * scale in float32, [out, in].

    qweight [in words, out] is packed along the inputs, qzeros [groups, out words] along the outputs; scales are
    [groups, out]. Input i has the scale of `groups[i]`: with act order, groups are no ranges of inputs. The first
    version of the format stores zero points minus one (`zero_offset` 1), the second as they are.
    """
    values = unpack(qweight.t(), bits)
    zeros = (unpack(qzeros, bits) + zero_offset) & ((1 << bits) - 1)
    return (values - zeros[groups].t()).float() * scales[groups].t().float()


@dataclass(frozen=True)
class GptqSettings:
    """Settings of the config that shapes do not show."""

    group_size: int  # inputs; -1: all
    zero_offset: int = 1  # added to stored zero points
    symmetric: bool = False  # all zero points are in the middle
    act_order: bool = False


def open_gptq(parts: Parts, settings: GptqSettings) -> LazyTensor:
    """Return the weight of a layer, whose bits follow from the shapes."""
    qweight, rows, outputs = parts.matrix("qweight", WORDS)
    scales, count, _ = parts.matrix("scales", FLOATS)
    parts.need("scales", FLOATS, (count, outputs))
    qzeros, _, columns = parts.matrix("qzeros", WORDS)
    bits = 32 * columns // outputs
    if bits not in BITS or 32 * columns != bits * outputs:
        allowed = " or ".join(f"[{count}, {bits * outputs // 32}] ({bits} bits)" for bits in BITS)
        raise parts.wrong("qzeros", f"has shape {list(qzeros.shape)}, but must have {allowed}")
    parts.need("qzeros", WORDS, (count, columns))
    inputs = rows * 32 // bits
    index = parts.get("g_idx", ("I32", "I64"), (inputs,))
    size = _group_size(parts, inputs, count, settings.group_size, index is not None)
    each = 32 // bits

    def decode(start: int, stop: int) -> torch.Tensor:
        first, last = start // each, -(-stop // each)
        columns = slice(first * each, min(last * each, outputs))
        groups = read_groups(parts, "g_idx", index, inputs, size, count)
        part = qweight.load()[:, columns], qzeros.load()[:, first:last], scales.load()[:, columns]
        values = dequantize_gptq(*part, groups, bits, settings.zero_offset)
        return values[start - columns.start : stop - columns.start]

    order, is_int4_grid = settings.act_order or not size, bits == 4 and settings.symmetric
    words = "" if settings.symmetric else "asymmetric ", _groups_in_words(size, count), ", act order" if order else ""
    kind = f"{words[0]}int{bits} {words[1]}{words[2]}"
    fits_int4 = is_int4_grid and not order and (count == 1 or size % INT4_GROUP == 0)
    return parts.weight((outputs, inputs), kind, decode, fits_int4)


def _group_size(parts: Parts, inputs: int, count: int, stated: int, has_index: bool) -> int:
    """Return the inputs per group: as the config says, or another number if the tensors agree on one.

    GPTQModel's `dynamic` and AutoRound's `extra_config` give layers groups of their own. scales and qzeros have one
    row for each group, so they have to agree. Return 0 if only `g_idx` says which inputs make up a group.
    """
    if -(-inputs // stated) == count:
        return stated
    if inputs % count == 0:  # also for -1, one group of all inputs
        return inputs // count
    if has_index:
        return 0
    raise parts.wrong("scales", f"has {count} groups, which neither are of {stated} nor divide {inputs} inputs")


def _groups_in_words(size: int, count: int) -> str:
    if count == 1:
        return "per channel"
    return f"group {size}" if size else f"{count} groups"


AWQ_BITS = 4
AWQ_WORD = 8  # values in an int32 word
NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word, from the lowest, that holds each of its eight outputs


def dequantize_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """Return (value - zero point) * scale in float32, [out, in].

    qweight is [in, out words], qzeros [groups, out words], scales [groups, out]; a group is `size` inputs.
    """
    values, zeros = (unpack_awq(each).repeat_interleave(times, 0) for each, times in ((qweight, 1), (qzeros, size)))
    return ((values - zeros).float() * scales.float().repeat_interleave(size, 0)).t()


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Unpack the columns of a matrix in their own order."""
    return unpack(words, AWQ_BITS).view(*words.shape, AWQ_WORD)[..., list(NIBBLE_OF)].flatten(-2)


def open_awq(parts: Parts) -> LazyTensor:
    """Return the weight of a layer, whose groups follow from the shapes."""
    qweight, inputs, words = parts.matrix("qweight", WORDS)
    scales, count, _ = parts.matrix("scales", FLOATS)
    parts.need("scales", FLOATS, (count, words * AWQ_WORD))
    qzeros = parts.need("qzeros", WORDS, (count, words))
    size = parts.group_size("scales", inputs, count)

    def decode(start: int, stop: int) -> torch.Tensor:
        first, last = start // AWQ_WORD, -(-stop // AWQ_WORD)
        columns = slice(first * AWQ_WORD, last * AWQ_WORD)
        part = (
            qweight.load()[:, first:last],
            qzeros.load()[:, first:last],
            scales.load()[:, columns],
        )
        return dequantize_awq(*part, size)[start - columns.start : stop - columns.start]

    return parts.weight((words * AWQ_WORD, inputs), f"asymmetric int4 group {size}", decode)
