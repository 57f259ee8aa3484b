"""Memory in large pages."""

from __future__ import annotations

import contextlib
import mmap
import re
from pathlib import Path

import torch
from torch import Tensor

PAGE = 2 * 1024 * 1024
CHUNK = 16 * PAGE  # asked for at a time; what is not written to takes no memory
LINE = 64  # where tensors begin: a cache line


class HugePageArena:
    """A step reads every weight once; with ordinary pages, looking up where they lie takes a sixth of that time."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in here; where the system has no large pages to ask for, the tensor itself."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor.contiguous()
        if self._used + tensor.nbytes > len(self._chunk):
            self._chunk, self._used = _map_huge_pages(max(CHUNK, tensor.nbytes)), 0
        place = self._chunk[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._used += tensor.nbytes + -tensor.nbytes % LINE
        return place.copy_(tensor)


def _map_huge_pages(size: int) -> Tensor:
    """`size` bytes that begin with a page; they go back to the system with the last tensor in them."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :][:size]


def in_huge_pages(tensor: Tensor, ours: Path = Path("/proc/self")) -> bool:
    """Whether the mapped file that a tensor lies in is, as newer kernels have it; true where nobody can tell."""
    try:
        maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", (ours / "smaps").read_text(), flags=re.M)
    except OSError:
        return True
    for each in maps:
        first, _, last = each.partition(" ")[0].partition("-")
        if last and int(first, 16) <= tensor.data_ptr() < int(last, 16):
            sizes = {name: int(size) for name, size in re.findall(r"^(Rss|FilePmdMapped): +(\d+) kB", each, re.M)}
            return 2 * sizes.get("FilePmdMapped", 0) > sizes.get("Rss", 0)
    return True
