"""The stored tensors of one quantized linear layer, checked before they are read, and its weight decoded by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.errors import ModelError
from foretell.hub.tensor import LazyTensor, StoredFormat

if TYPE_CHECKING:
    import torch

VALUES = 1 << 18  # values decoded at a time, so that intermediate tensors are small and stay in the CPU cache
ALIGNED = 8  # rows that share a word in the layouts packed along the outputs
FLOATS = ("F32", "F16", "BF16", "F64")
FP8 = ("F8_E4M3", "F8_E5M2")
WORDS = ("I32",)  # packed values
INT4_GROUP = 32  # inputs that share a scale in our own int4
ADVICE = "download the checkpoint again, or quantize the model again"

Decode = Callable[[int, int], "torch.Tensor"]  # rows from start to stop -> float32 [rows, in]


@dataclass(frozen=True)
class Parts:
    """The tensors of a linear layer by the last part of their names, such as `qweight` and `scales`."""

    module: str
    tensors: Mapping[str, LazyTensor]

    def get(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> LazyTensor | None:
        """Return a tensor, or None if the layer has none; raise unless it has one of the types and shapes."""
        tensor = self.tensors.get(part)
        if tensor is None:
            return None
        if tensor.dtype not in dtypes:
            raise self.wrong(part, f"has type {tensor.dtype or 'unknown'}, but must have {' or '.join(dtypes)}")
        if shapes and tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.wrong(part, f"has shape {list(tensor.shape)}, but must have {wanted}")
        return tensor

    def need(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> LazyTensor:
        """Return a tensor as `get` does; raise if it is missing."""
        tensor = self.get(part, dtypes, *shapes)
        if tensor is None:
            raise ModelError(f"tensor '{self.module}.{part}' is missing from the checkpoint; {ADVICE}")
        return tensor

    def matrix(self, part: str, dtypes: tuple[str, ...]) -> tuple[LazyTensor, int, int]:
        """Return a matrix with its numbers of rows and columns, neither of which is 0."""
        tensor = self.need(part, dtypes)
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise self.wrong(part, f"has shape {list(tensor.shape)}, but must be a matrix")
        return tensor, *tensor.shape

    def group_size(self, part: str, inputs: int, groups: int) -> int:
        """Return the inputs per group; raise if the groups do not divide the inputs evenly."""
        if groups < 1 or inputs % groups:
            raise self.wrong(part, f"has {groups} groups, which do not divide {inputs} inputs")
        return inputs // groups

    def wrong(self, part: str, reason: str) -> ModelError:
        return ModelError(f"tensor '{self.module}.{part}' {reason}; {ADVICE}")

    def weight(self, shape: tuple[int, ...], stored: str, decode: Decode, fits_int4: bool = False) -> LazyTensor:
        """Return the layer's weight, which is decoded a few rows at a time into a float32 tensor."""

        def read_rows(start: int, stop: int) -> torch.Tensor:
            import torch

            start, stop, _ = slice(start, stop).indices(shape[0])
            values = torch.empty(max(0, stop - start), *shape[1:])
            rows = max(1, VALUES // (math.prod(shape[1:]) * ALIGNED)) * ALIGNED
            for at in range(start, stop, rows):
                end = min(at + rows, stop)
                values[at - start : end - start] = decode(at, end)
            return values

        def read() -> torch.Tensor:
            return read_rows(0, shape[0])

        stored_as = StoredFormat(stored, fits_int4)
        return LazyTensor(f"{self.module}.weight", shape, read, read_rows, dtype="F32", stored=stored_as)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack integers of `bits` bits, lowest bits first, from the last dimension of int32 or uint8 words."""
    import torch

    shifts = torch.arange(0, words.dtype.itemsize * 8, bits, dtype=torch.int32)
    return ((words.to(torch.int32)[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)
