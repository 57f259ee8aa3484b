"""The tensors of the paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.kernels.bounds import require
from foretell.kernels.kv_types import stored_width

CACHE_LINE = 64  # bytes; a vector that crosses a line takes two loads


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer's KV; layers of a cache may differ. A drafter's layer may have keys only."""

    kv_heads: int
    head_dim: int
    has_values: bool = True
    scratch_slots: int = 0  # slots after all pages, for KV that is dropped after the call

    def stored_as(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return the elements per head and their type; a layer without values holds hidden states of type `dtype`."""
        return (stored_width(self.head_dim, kv_dtype), kv_dtype) if self.has_values else (self.head_dim, dtype)

    def bytes_per_token(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
        width, stored = self.stored_as(dtype, kv_dtype)
        return (1 + self.has_values) * self.kv_heads * width * stored.itemsize


class KVCache:
    """Keys and values of each layer, [pages, page_size, kv_heads, stored width]; the target's layers come first."""

    def __init__(
        self,
        shapes: tuple[LayerShape, ...],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is the model's, `kv_dtype` that of keys and values (default: the model's)."""
        kv_dtype = kv_dtype or dtype

        def empty(shape: LayerShape) -> Tensor:
            extra = -(-shape.scratch_slots // page_size)
            width, stored = shape.stored_as(dtype, kv_dtype)
            return _zeros((pages + extra, page_size, shape.kv_heads, width), stored, device)

        self.shapes, self.page_size, self.dtype, self.kv_dtype = shapes, page_size, dtype, kv_dtype
        self.keys = [empty(shape) for shape in shapes]
        self.values = [empty(shape) if shape.has_values else torch.empty(0, device=device) for shape in shapes]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all key and value tensors."""
        return tuple(tensor for tensor in (*self.keys, *self.values) if tensor.numel())

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy slots in every layer, to compact the KV of an accepted branch of a draft tree.

        Both lists ascend, and each target lies before its source.
        """
        if source == target:
            return
        require(len(source) == len(target), "the same number of source and target slots")
        if self.keys[0].is_cuda and find_spec("triton") is not None:
            self._mover(source, target)
            return
        if self.keys[0].device.type == "cpu":
            from_slots, to_slots = np.array(source), np.array(target)
            for slots in self._bytes:
                slots[to_slots] = slots[from_slots]
            return
        for tensor in self.tensors:
            rows = tensor.view(-1, *tensor.shape[2:])
            rows[target] = rows[source]

    @cached_property
    def _bytes(self) -> list[npt.NDArray[np.uint8]]:
        """Return the tensors as numpy arrays [slots, bytes]: for a few slots torch has ten times the overhead."""
        return [tensor.view(-1, tensor[0, 0].numel()).view(torch.uint8).numpy() for tensor in self.tensors]

    @cached_property
    def _mover(self) -> Callable[[list[int], list[int]], None]:
        """Return a function that moves slots of all layers in one kernel launch."""
        from foretell.kernels.triton.kv_move import KVMover

        mover: Callable[[list[int], list[int]], None] = KVMover(self.tensors)
        return mover


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros: a masked key is still multiplied by 0, and NaN times 0 is NaN."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Memory of numpy's zeros is committed on first write; torch writes all of it at once.
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def slots_of(pages: list[int] | tuple[int, ...], page_size: int, start: int, stop: int) -> list[int]:
    """Return the slots of tokens `start` to `stop` of a sequence with these `pages`."""
    page = start // page_size
    if start < stop <= (page + 1) * page_size:  # the usual case: a token and its draft within a page
        shift = (pages[page] - page) * page_size
        return list(range(start + shift, stop + shift))
    slots: list[int] = []
    for page in pages[start // page_size : -(-stop // page_size)]:
        slots += range(page * page_size, (page + 1) * page_size)
    found = slots[start % page_size :][: stop - start]
    require(len(found) == stop - start, "pages for all tokens of a sequence")
    return found
