# mypy: ignore-errors
"""Whole numbers from pinned memory of the host to the device by a kernel, so that a recorded graph begins with it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _fetch(source, target, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


def fetch(source: Tensor, target: Tensor) -> None:
    """Both flat and as long as each other. The host must not write to `source` before the device is done."""
    _fetch[(triton.cdiv(len(target), BLOCK),)](source, target, len(target), BLOCK=BLOCK, num_warps=4)
