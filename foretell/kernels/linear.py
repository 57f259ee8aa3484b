"""A row times a matrix. The definition is `torch.nn.functional.linear`.

On a CPU in float32 there are two faster ways, which make a few rows cost hardly more than one and give a row the same
bits whatever rows stand beside it, which plain `linear` does not: the native library's, and oneDNN's blocked layout
where there is no library (measured; see docs/log/).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kernels.native.huge_pages import HugePageArena

from .native.library import library
from .native.packed import PackedLinear

ROWS_HINT = 8  # the row count oneDNN lays the weights out for; it serves 1 to 512 rows within a few percent of the best


def prepare_linear(weight: Tensor, bias: Tensor | None, room: HugePageArena) -> Callable[[Tensor], Tensor] | None:
    """`linear` with these weights, which are copied into `room`; None where there is no faster way."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    if (native := library()) is not None:
        return PackedLinear(native, weight, bias, room)
    packed = pack_onednn(weight)
    return None if packed is None else lambda x: onednn_linear(x, packed, bias)


def pack_onednn(weight: Tensor) -> Tensor | None:
    """`weight`, [out, in], laid out for `onednn_linear`; None where there is no such layout."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch._C._has_mkldnn:
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
    return packed


def onednn_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] times packed weights, as `linear` defines it."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] times weight [out, in], plus bias."""
    return F.linear(x, weight, bias)
