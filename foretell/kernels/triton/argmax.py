# mypy: ignore-errors
"""The end of a step: logits in float32 and the argmax of each row, for the host to read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .sample import first_argmax

BLOCK = 8192  # logits in registers at once; a program waits for memory once per block


@triton.jit
def _argmax_kernel(logits, out, tokens, stride, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = i
    for begin in range(0, vocab, BLOCK):
        valid = begin + i < vocab
        x = tl.load(logits + row * stride + begin + i, mask=valid, other=float("-inf")).to(tl.float32)
        tl.store(out + row * vocab + begin + i, x, mask=valid)
        index = tl.where(x > best, begin + i, index)
        best = tl.maximum(best, x)
    _, token = first_argmax(best, index)
    tl.store(tokens + row, token)


def argmax_logits(logits: Tensor, out: Tensor, tokens: Tensor) -> None:
    """Write logits [rows, vocab] to `out` in float32 and their argmax, the first of equals, to `tokens` [rows], int32.

    `tokens` may be pinned host memory, valid once the stream has finished.
    """
    rows, vocab = logits.shape
    block = max(64, min(BLOCK, triton.next_power_of_2(vocab)))
    warps = 16 if block == BLOCK else 4
    _argmax_kernel[(rows,)](logits, out, tokens, logits.stride(0), vocab, BLOCK=block, num_warps=warps)
