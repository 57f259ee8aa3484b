"""Layers of a decoder. Parameters have the shapes of the checkpoint until `pack` converts them for the kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from foretell.kernels.linear import linear, prepare_linear
from foretell.kernels.native.huge_pages import HugePageArena
from foretell.kernels.native.packed import PackedLinear


class Linear(nn.Module):
    """A linear layer. After `pack` the weights are in the layout of the kernel and `weight` is None."""

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

    def pack(self, arena: HugePageArena) -> None:
        """Convert the weights to the layout of the fastest kernel, in `arena`, if there is one."""
        if self.weight is None:
            return
        bias = None if self.bias is None else self.bias.data
        if (packed := prepare_linear(self.weight.data, bias, arena)) is not None:
            self.packed, self.weight = packed, None

    @property
    def native(self) -> PackedLinear | None:
        """Return the weights packed for the native library; None if they are not."""
        return self.packed if isinstance(self.packed, PackedLinear) else None


class Norm(nn.Module):
    """The weight of an RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)
