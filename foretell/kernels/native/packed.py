"""Weights in the packed layouts of the native library."""

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

BLOCK = 32  # outputs that are computed together
STEP = 4  # consecutive inputs of one output in memory


@dataclass(frozen=True)
class PackedWeights:
    """A packed matrix with `bits` bits per weight (32, 8 or 4). `scales` are those not interleaved with the values."""

    bits: int
    outputs: int
    inputs: int
    values: Tensor
    scales: Tensor | None


class PackedLinear:
    """A linear layer with float32, int8 or int4 weights, computed by the native library."""

    def __init__(
        self,
        library: Library,
        weights: Tensor | Int8Weights | Int4Weights | PackedWeights,
        bias: Tensor | None = None,
        arena: HugePageArena | None = None,
        level: int | None = None,
    ) -> None:
        """Pack the weights into `arena`. `level` selects a lower instruction set than the best, for tests."""
        packed = weights if isinstance(weights, PackedWeights) else pack(weights)
        values = packed.values.contiguous() if arena is None else arena.put(packed.values)
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
        """Return the bytes of the weights, scales included."""
        scales = self.weights.scales
        return self.weights.values.nbytes + (0 if scales is None else scales.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply float32 rows x [rows, in] on the CPU -> [rows, out]."""
        fits = x.is_cpu and x.dtype == torch.float32 and x.shape[1] == self.inputs
        require(fits, f"float32 rows of {self.inputs} inputs on the CPU")
        return self._library.linear(self.address, x, self.outputs)


def pack(weights: Tensor | Int8Weights | Int4Weights) -> PackedWeights:
    """Return the weights in the layout of the library; `values` may be a view."""
    outputs, inputs = (weights if isinstance(weights, Tensor) else weights.values).shape
    if isinstance(weights, Int8Weights):
        scales = F.pad(weights.scales.float(), (0, -outputs % BLOCK))
        return PackedWeights(8, outputs, inputs, pack_int8(weights), scales)
    if isinstance(weights, Int4Weights):
        return PackedWeights(4, outputs, inputs, pack_int4(weights), None)
    return PackedWeights(32, outputs, inputs, pack_float(weights), None)


def packed_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Return the bytes of a packed matrix, scales included."""
    outputs, inputs = outputs + -outputs % BLOCK, inputs + -inputs % GROUP_SIZE
    return outputs * inputs + outputs * 4 if bits == 8 else outputs * inputs // 2 + outputs * (inputs // GROUP_SIZE) * 2


def pack_float(weight: Tensor) -> Tensor:
    """Return float32 weights as [blocks, in, BLOCK], a view if no padding is needed."""
    return _padded(weight.float(), 1).view(-1, BLOCK, weight.shape[1]).transpose(1, 2)


def pack_int8(weights: Int8Weights) -> Tensor:
    """Return [blocks, steps, BLOCK, STEP] plus 128: the instruction multiplies unsigned by signed bytes."""
    values = _padded(weights.values)
    blocks = values.view(-1, BLOCK, values.shape[1] // STEP, STEP).transpose(1, 2).contiguous()
    return blocks.view(torch.uint8).bitwise_xor_(128)


def pack_int4(weights: Int4Weights) -> Tensor:
    """Return [blocks, groups, bytes]: scales of a group, then its values plus 8, the second half in high nibbles."""
    values = _padded(weights.values).add(8).view(torch.uint8)
    halves = values.view(-1, BLOCK, values.shape[1] // GROUP_SIZE, 2, GROUP_SIZE // 2 // STEP, STEP).permute(
        0, 2, 3, 4, 1, 5
    )
    nibbles = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(*halves.shape[:2], -1)
    scales = F.pad(weights.scales, (0, 0, 0, -weights.scales.shape[0] % BLOCK))
    groups = scales.view(-1, BLOCK, scales.shape[1]).transpose(1, 2).contiguous()
    return torch.cat([groups.view(torch.uint8), nibbles], -1)


def _padded(values: Tensor, group: int = GROUP_SIZE) -> Tensor:
    """Pad with zeros to full blocks of outputs and groups of inputs; no copy if none is needed."""
    outputs, inputs = values.shape
    missing = (0, -inputs % group, 0, -outputs % BLOCK)
    return F.pad(values, missing) if any(missing) else values


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
