"""Memory in large pages."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

PAGE = 2 * 1024 * 1024
CHUNK = 16 * PAGE  # asked for at a time; what is not written to takes no memory
LINE = 64  # where tensors begin: a cache line


class Room:
    """A step reads every weight once; with ordinary pages, looking up where they lie takes a sixth of that time."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in here; where the system has no large pages to ask for, the tensor itself."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor.contiguous()
        if self._used + tensor.nbytes > len(self._chunk):
            self._chunk, self._used = _large_pages(max(CHUNK, tensor.nbytes)), 0
        place = self._chunk[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._used += tensor.nbytes + -tensor.nbytes % LINE
        return place.copy_(tensor)


def _large_pages(size: int) -> Tensor:
    """`size` bytes that begin with a page; they go back to the system with the last tensor in them."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :][:size]
