# mypy: ignore-errors
"""Async scheduling: the sampled tokens of one step become inputs of the next without a round trip to the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows", "count"])
def _scatter_tokens_kernel(tokens, sampled, to_host, rows, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(to_host + i, tl.load(sampled + i, mask=i < count, other=0).to(tl.int32), mask=i < count)
    token = tl.load(tokens + i, mask=i < rows, other=0)
    is_placeholder = token < 0
    tl.store(tokens + i, tl.load(sampled - 1 - token, mask=is_placeholder, other=0).to(tl.int32), mask=is_placeholder)


def scatter_tokens(tokens: Tensor, sampled: Tensor, to_host: Tensor, count: int) -> None:
    """Replace each placeholder t < 0 of `tokens` [rows] by `sampled[-1 - t]`; copy `count` of `sampled` to `to_host`.

    All are int32, but `sampled` may hold integers as float32. `sampled` and `to_host` may be pinned host memory.
    """
    block = triton.next_power_of_2(max(len(tokens), count))
    _scatter_tokens_kernel[(1,)](tokens, sampled, to_host, len(tokens), count, BLOCK=block, num_warps=4)
