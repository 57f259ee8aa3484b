"""The parts a decoder is built from. Parameters have the shapes checkpoints give them; `pack` readies them to run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from foretell.kernels.linear import linear, prepare_linear
from foretell.kernels.native.huge_pages import HugePageArena
from foretell.kernels.native.packed import PackedLinear


class Linear(nn.Module):
    """Rows times a matrix. After `pack_onednn` the weights lie as the kernel wants them and `weight` is gone."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs), requires_grad=False) if bias else None
        self.packed: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        assert self.weight is not None, "an unpacked layer has its weight"
        return linear(x, self.weight, self.bias)

    def pack(self, room: HugePageArena) -> None:
        """Lay the weights out for speed, in `room`, where there is a way to."""
        if self.weight is None:
            return
        bias = None if self.bias is None else self.bias.data
        if (packed := prepare_linear(self.weight.data, bias, room)) is not None:
            self.packed, self.weight = packed, None

    @property
    def native(self) -> PackedLinear | None:
        """The weights as the native library has them, if it does."""
        return self.packed if isinstance(self.packed, PackedLinear) else None


class Norm(nn.Module):
    """The weight of a root-mean-square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)
