# mypy: ignore-errors
"""A copy from pinned host memory by a kernel, so that it can be the first node of a captured CUDA graph."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements per program


@triton.jit(do_not_specialize=["count"])
def _copy_from_host_kernel(source, target, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


def copy_from_host(source: Tensor, target: Tensor) -> None:
    """Copy `source` to `target`, 1-D and equally long. The host must not write `source` before the stream is done."""
    _copy_from_host_kernel[(triton.cdiv(len(target), BLOCK),)](source, target, len(target), BLOCK=BLOCK, num_warps=4)
