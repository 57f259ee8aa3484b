"""The tensors behind the pages."""

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


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of one layer; layers of one cache may differ. A drafter's may have one of both only."""

    kv_heads: int
    head_dim: int
    has_values: bool = True
    scratch_slots: int = 0  # slots behind all pages, for what is dropped again at once

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return (1 + self.has_values) * self.kv_heads * self.head_dim * dtype.itemsize


class KVCache:
    """For each layer keys and values, [pages, page_size, kv_heads, head_dim]; the model's layers come first."""

    def __init__(
        self, shapes: tuple[LayerShape, ...], pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty(shape: LayerShape) -> Tensor:
            behind = -(-shape.scratch_slots // page_size)
            return _zeros((pages + behind, page_size, shape.kv_heads, shape.head_dim), dtype, device)

        self.shapes, self.page_size = shapes, page_size
        self.keys = [empty(shape) for shape in shapes]
        self.values = [empty(shape) if shape.has_values else torch.empty(0, device=device) for shape in shapes]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All there are."""
        return (*self.keys, *(tensor for tensor in self.values if len(tensor)))

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy whole slots, in every layer: what accepting a branch of a tree needs. Both rise, each target first."""
        if source == target:
            return
        require(len(source) == len(target), "as many source slots as target slots")
        if self.keys[0].is_cuda and find_spec("triton") is not None:
            self._mover(source, target)
            return
        if self.keys[0].device.type == "cpu":
            given, taken = np.array(source), np.array(target)
            for slots in self._bytes:
                slots[taken] = slots[given]
            return
        for tensor in self.tensors:
            rows = tensor.view(-1, *tensor.shape[2:])
            rows[target] = rows[source]

    @cached_property
    def _bytes(self) -> list[npt.NDArray[np.uint8]]:
        """The tensors as numpy sees them, [slots, bytes]: for a few slots torch takes ten times as long to begin."""
        return [tensor.view(-1, tensor[0, 0].numel()).view(torch.uint8).numpy() for tensor in self.tensors]

    @cached_property
    def _mover(self) -> Callable[[list[int], list[int]], None]:
        """Does the same in one launch."""
        from foretell.kernels.triton.kv_move import KVMover

        mover: Callable[[list[int], list[int]], None] = KVMover(self.tensors)
        return mover


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not garbage: a masked key still meets a product, and NaN times zero is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros take memory only when they are written to; torch's write them all at once.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def slots_of(pages: list[int] | tuple[int, ...], page_size: int, start: int, stop: int) -> list[int]:
    """The slots of tokens `start` to `stop` of a sequence that holds `pages`."""
    page = start // page_size
    if start < stop <= (page + 1) * page_size:  # as a row and its guesses mostly are
        away = (pages[page] - page) * page_size
        return list(range(start + away, stop + away))
    slots: list[int] = []
    for page in pages[start // page_size : -(-stop // page_size)]:
        slots += range(page * page_size, (page + 1) * page_size)
    found = slots[start % page_size :][: stop - start]
    require(len(found) == stop - start, "pages for all tokens of a sequence")
    return found
