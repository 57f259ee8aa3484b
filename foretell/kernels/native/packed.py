"""Weights laid out for the library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kernels.quant import GROUP_SIZE, Int4Weights, Int8Weights

from ..bounds import require
from .huge_pages import HugePageArena
from .library import Library
from .records import WeightsRecord

BLOCK = 32  # outputs the library works on together
STEP = 4  # inputs of an output that lie side by side


@dataclass(frozen=True)
class PackedWeights:
    """A matrix as the library reads it, in so many bits a weight; `scales` are those that lie beside its values."""

    bits: int
    outputs: int
    inputs: int
    values: Tensor
    scales: Tensor | None


class PackedLinear:
    """`linear`, `int8_linear` or `int4_linear` with these weights, by the library."""

    def __init__(
        self,
        library: Library,
        weights: Tensor | Int8Weights | Int4Weights | PackedWeights,
        bias: Tensor | None = None,
        room: HugePageArena | None = None,
        level: int | None = None,
    ) -> None:
        """`room` is where the weights go; `level` picks lesser instructions than the best there are, for tests."""
        packed = weights if isinstance(weights, PackedWeights) else pack(weights)
        values = packed.values.contiguous() if room is None else room.put(packed.values)
        self.weights = replace(packed, values=values)
        self.outputs, self.inputs = packed.outputs, packed.inputs
        self._library = library
        self.bias = None if bias is None else bias.float().contiguous()
        self.level = library.best_level if level is None else level
        self._record = WeightsRecord(
            self.inputs,
            self.outputs,
            values.data_ptr(),
            _address(packed.scales),
            _address(self.bias),
            packed.bits,
            self.level,
        )
        self.address = ctypes.addressof(self._record)

    @property
    def bytes(self) -> int:
        """What the weights take, scales included."""
        scales = self.weights.scales
        return self.weights.values.nbytes + (0 if scales is None else scales.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], float32 on a CPU -> [rows, out]."""
        fits = x.is_cpu and x.dtype == torch.float32 and x.shape[1] == self.inputs
        require(fits, f"float32 rows of {self.inputs} inputs on the CPU")
        return self._library.linear(self.address, x, self.outputs)


def pack(weights: Tensor | Int8Weights | Int4Weights) -> PackedWeights:
    """The weights as the library reads them; `values` may be a view yet."""
    outputs, inputs = (weights if isinstance(weights, Tensor) else weights.values).shape
    if isinstance(weights, Int8Weights):
        scales = F.pad(weights.scales.float(), (0, -outputs % BLOCK))
        return PackedWeights(8, outputs, inputs, pack_int8(weights), scales)
    if isinstance(weights, Int4Weights):
        return PackedWeights(4, outputs, inputs, pack_int4(weights), None)
    return PackedWeights(32, outputs, inputs, pack_float(weights), None)


def packed_bytes(outputs: int, inputs: int, bits: int) -> int:
    """What a matrix takes when packed, scales included."""
    outputs, inputs = outputs + -outputs % BLOCK, inputs + -inputs % GROUP_SIZE
    return outputs * inputs + outputs * 4 if bits == 8 else outputs * inputs // 2 + outputs * (inputs // GROUP_SIZE) * 2


def pack_float(weight: Tensor) -> Tensor:
    """[blocks, in, BLOCK], as a view where whole blocks allow it: to copy it once is enough."""
    return _padded(weight.float(), 1).view(-1, BLOCK, weight.shape[1]).transpose(1, 2)


def pack_int8(weights: Int8Weights) -> Tensor:
    """[blocks, steps, BLOCK, STEP], each value 128 higher than it is: the instruction multiplies unsigned by signed."""
    values = _padded(weights.values)
    blocks = values.view(-1, BLOCK, values.shape[1] // STEP, STEP).transpose(1, 2).contiguous()
    return blocks.view(torch.uint8).bitwise_xor_(128)


def pack_int4(weights: Int4Weights) -> Tensor:
    """[blocks, groups, bytes]: a group's scales, then its values, 8 higher; the second half in the high four bits."""
    values = _padded(weights.values).add(8).view(torch.uint8)
    halves = values.view(-1, BLOCK, values.shape[1] // GROUP_SIZE, 2, GROUP_SIZE // 2 // STEP, STEP).permute(
        0, 2, 3, 4, 1, 5
    )
    nibbles = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(*halves.shape[:2], -1)
    scales = F.pad(weights.scales, (0, 0, 0, -weights.scales.shape[0] % BLOCK))
    groups = scales.view(-1, BLOCK, scales.shape[1]).transpose(1, 2).contiguous()
    return torch.cat([groups.view(torch.uint8), nibbles], -1)


def _padded(values: Tensor, group: int = GROUP_SIZE) -> Tensor:
    """With zeros to whole blocks of outputs and groups of inputs; where they are whole, no copy."""
    outputs, inputs = values.shape
    missing = (0, -inputs % group, 0, -outputs % BLOCK)
    return F.pad(values, missing) if any(missing) else values


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
