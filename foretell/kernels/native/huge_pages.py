"""Memory in huge pages (2 MiB)."""

from __future__ import annotations

import contextlib
import mmap
import re
from pathlib import Path

import torch
from torch import Tensor

PAGE = 2 * 1024 * 1024  # bytes
CHUNK = 16 * PAGE  # bytes mapped at a time; pages that are not written take no memory
LINE = 64  # alignment of tensors in bytes: a cache line


class HugePageArena:
    """An arena of huge pages for weights. With ordinary pages TLB misses take a sixth of the time of a step."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in the arena; the tensor itself where the system has no huge pages."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor.contiguous()
        if self._used + tensor.nbytes > len(self._chunk):
            self._chunk, self._used = _map_huge_pages(max(CHUNK, tensor.nbytes)), 0
        copy = self._chunk[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._used += tensor.nbytes + -tensor.nbytes % LINE
        return copy.copy_(tensor)


def _map_huge_pages(size: int) -> Tensor:
    """Return `size` bytes aligned to a huge page. They are unmapped with the last tensor in them."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    return mapped[-mapped.data_ptr() % PAGE :][:size]


def in_huge_pages(tensor: Tensor, ours: Path = Path("/proc/self")) -> bool:
    """Return whether the mapped file of a tensor is in huge pages, as newer kernels can do; True if unknown."""
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
