# mypy: ignore-errors
"""The end of a step: logits in float32, and the likeliest token of each row, for the host to read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .sample import first_of_largest

BLOCK = 8192  # as many as registers hold: a program waits for memory once for each block


@triton.jit
def _finish(logits, out, tokens, stride, vocab, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = i
    for begin in range(0, vocab, BLOCK):
        real = begin + i < vocab
        x = tl.load(logits + row * stride + begin + i, mask=real, other=float("-inf")).to(tl.float32)
        tl.store(out + row * vocab + begin + i, x, mask=real)
        place = tl.where(x > best, begin + i, place)
        best = tl.maximum(best, x)
    _, token = first_of_largest(best, place)
    tl.store(tokens + row, token)


def finish(logits: Tensor, out: Tensor, tokens: Tensor) -> None:
    """logits [rows, vocab] to `out` in float32, and the first of the largest of each row to `tokens` [rows], int32.

    `tokens` may lie in pinned memory of the host: it is there when the device is done.
    """
    rows, vocab = logits.shape
    block = max(64, min(BLOCK, triton.next_power_of_2(vocab)))
    _finish[(rows,)](logits, out, tokens, logits.stride(0), vocab, BLOCK=block, num_warps=16 if block == BLOCK else 4)
