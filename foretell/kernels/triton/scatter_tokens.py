# mypy: ignore-errors
"""Between two steps that run one behind the other: the tokens of the first go into the second, and to the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows", "count"])
def _take_up(tokens, chosen, landed, rows, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(landed + i, tl.load(chosen + i, mask=i < count, other=0).to(tl.int32), mask=i < count)
    token = tl.load(tokens + i, mask=i < rows, other=0)
    is_open = token < 0
    tl.store(tokens + i, tl.load(chosen - 1 - token, mask=is_open, other=0).to(tl.int32), mask=is_open)


def take_up(tokens: Tensor, chosen: Tensor, landed: Tensor, count: int) -> None:
    """Of `tokens` [rows] those below 0 become `chosen[-1 - token]`; the first `count` of `chosen` go to `landed`.

    All int32, but `chosen` may be whole numbers in float32. That and `landed` may lie in pinned memory of the host.
    """
    block = triton.next_power_of_2(max(len(tokens), count))
    _take_up[(1,)](tokens, chosen, landed, len(tokens), count, BLOCK=block, num_warps=4)
