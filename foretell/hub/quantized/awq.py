"""AWQ: 4-bit integers packed along the outputs, [in, out / 8], in the interleaved order of its GEMM kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.hub.quantized.parts import FLOATS, WORDS, Parts, unpack
from foretell.hub.tensor import LazyTensor

if TYPE_CHECKING:
    import torch

BITS = 4
EACH = 8  # values in a word
NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word, from the lowest, that holds each of its eight outputs


def dequantize_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """Return (value - zero point) * scale in float32, [out, in].

    qweight is [in, out words], qzeros [groups, out words], scales [groups, out]; a group is `size` inputs.
    """
    values, zeros = (unpack_awq(each).repeat_interleave(times, 0) for each, times in ((qweight, 1), (qzeros, size)))
    return ((values - zeros).float() * scales.float().repeat_interleave(size, 0)).t()


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Unpack the columns of a matrix in their own order."""
    return unpack(words, BITS).view(*words.shape, EACH)[..., list(NIBBLE_OF)].flatten(-2)


def open_awq(parts: Parts) -> LazyTensor:
    """Return the weight of a layer, whose groups follow from the shapes."""
    qweight, inputs, words = parts.matrix("qweight", WORDS)
    scales, count, _ = parts.matrix("scales", FLOATS)
    parts.need("scales", FLOATS, (count, words * EACH))
    qzeros = parts.need("qzeros", WORDS, (count, words))
    size = parts.group_size("scales", inputs, count)

    def decode(start: int, stop: int) -> torch.Tensor:
        first, last = start // EACH, -(-stop // EACH)
        part = qweight.load()[:, first:last], qzeros.load()[:, first:last], scales.load()[:, first * EACH : last * EACH]
        return dequantize_awq(*part, size)[start - first * EACH : stop - first * EACH]

    return parts.weight((words * EACH, inputs), f"asymmetric int4 group {size}", decode)
