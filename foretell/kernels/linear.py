"""Linear layers in floats. The definition is `torch.nn.functional.linear`.

For float32 on a CPU there are two faster implementations: the native library and, without it, oneDNN's blocked weight
layout. With both, a few rows cost hardly more than one (measurements in docs/log/), and unlike plain `linear` the
result of a row does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kernels.native.huge_pages import HugePageArena

from .native.library import library
from .native.packed import PackedLinear

ROWS_HINT = 8  # rows that oneDNN optimizes the layout for; it is within a few percent of the best for 1 to 512 rows


def prepare_linear(weight: Tensor, bias: Tensor | None, arena: HugePageArena) -> Callable[[Tensor], Tensor] | None:
    """Return a faster `linear` with these weights, copied into `arena`; None if there is none."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    if (native := library()) is not None:
        return PackedLinear(native, weight, bias, arena)
    packed = pack_onednn(weight)
    return None if packed is None else lambda x: onednn_linear(x, packed, bias)


def pack_onednn(weight: Tensor) -> Tensor | None:
    """Return weight [out, in] in the layout of `onednn_linear`; None if it is not supported."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch._C._has_mkldnn:
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
    return packed


def onednn_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [rows, in] by packed weights and add bias."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [rows, in] by weight [out, in] and add bias."""
    return F.linear(x, weight, bias)
