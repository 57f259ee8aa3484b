"""Which kernel multiplies: our own, or the library's where it was seen to give a row the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.kernels.triton.linear import FEW_ROWS, MOST_ROWS, linear
from foretell.models.layers import Linear

Shape = tuple[int, int, int]


class Products:
    """Where text is written a row's bits do not depend on the rows beside it; where it is read it goes fastest."""

    def __init__(self) -> None:
        self._trusted: dict[Shape, bool] = {}

    def __call__(self, layer: Linear, x: Tensor, reads: bool) -> Tensor:
        """[rows, in] -> [rows, out]"""
        if reads or _outside(layer, x) or (len(x) > FEW_ROWS and self._trusts(layer, x)):
            product: Tensor = layer(x)
            return product
        assert layer.weight is not None, "seen above"
        return linear(x, layer.weight, layer.bias)

    def in_parts(self, layer: Linear, x: Tensor, reads: bool) -> Tensor:
        """[rows, in] -> [parts, rows, out], for a reader that adds them up."""
        if reads or _outside(layer, x):
            product: Tensor = layer(x)
            return product[None]
        assert layer.weight is not None, "seen above"
        return linear(x, layer.weight, layer.bias, parts=True)

    def _trusts(self, layer: Linear, x: Tensor) -> bool:
        """Whether the library's kernel for this many rows adds up as ours does. Tried once, before any recording."""
        shape = (len(x), layer.inputs, layer.outputs)
        if shape not in self._trusted:
            assert layer.weight is not None, "asked for layers with weights"
            noise = torch.randn(x.shape, dtype=torch.float32, device=x.device).to(x.dtype)
            own = linear(noise[:FEW_ROWS].contiguous(), layer.weight, layer.bias)
            self._trusted[shape] = torch.equal(own, layer(noise)[:FEW_ROWS])
        return self._trusted[shape]


def _outside(layer: Linear, x: Tensor) -> bool:
    """Whether our kernel does not serve these."""
    return layer.weight is None or len(x) > MOST_ROWS or x.dtype == torch.float32
