"""A head's matrices in a byte a weight, for its file: each row on a grid of its own. It is served as ever after."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = ".scale"  # what is added to a tensor's name for the size of its rows' steps
STEPS = 127


def pack_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 with a scale a row, the rest in float16, ids in 32 bits."""
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            packed[name] = tensor.to(torch.int32)
        elif tensor.dim() < 2:
            packed[name] = tensor.to(torch.float16)
        else:
            scale = (tensor.float().abs().amax(-1, keepdim=True) / STEPS).clamp_min(1e-12)
            packed[name] = (tensor.float() / scale).round().to(torch.int8)
            packed[name + SCALE] = scale[..., 0]
    return packed


def unpack_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `pack_state` was given, within half a step; what is not packed stays as it is."""
    names = (name for name in state if not name.endswith(SCALE))
    return {name: unpacked(state[name], state.get(name + SCALE)) for name in names}


def unpacked(tensor: Tensor, scale: Tensor | None) -> Tensor:
    """One of them."""
    return tensor if scale is None else tensor.float() * scale[..., None]
