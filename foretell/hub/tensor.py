"""Tensors of a checkpoint that are loaded when they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoredFormat:
    """The quantized format in which a tensor is stored."""

    name: str
    fits_int4: bool = False  # symmetric int4 in groups that hold whole groups of our own int4


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk: name and shape, [out, in] as in torch; values are read on demand."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor] = field(repr=False, compare=False)
    read_rows: Callable[[int, int], torch.Tensor] | None = field(default=None, repr=False, compare=False)
    dtype: str = ""  # as safetensors names it; empty for quantized tensors of GGUF files
    stored: StoredFormat | None = None  # None: floats

    def load(self) -> torch.Tensor:
        """Read the values: as stored, or float32 if they were quantized."""
        return self.read()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read some rows; the others are not read if the format allows it."""
        return self.read()[start:stop] if self.read_rows is None else self.read_rows(start, stop)
