"""Data types of the KV cache: how keys and values are stored and read, the torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

KV_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)  # in the order of `KVType` of the native library
SCALE_BYTES = 4  # float32 scale after the numbers of an int8 key or value
LARGEST = 127  # absolute value of an int8 number


def stored_width(head_dim: int, kv_dtype: torch.dtype) -> int:
    """Return the elements of one key or value of a head in the KV cache."""
    return head_dim + SCALE_BYTES if kv_dtype == torch.int8 else head_dim


def encode_kv(new: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """Convert keys or values [..., head_dim] to the type of the cache; int8 has a scale for each head and token."""
    if kv_dtype != torch.int8:
        return new.to(kv_dtype)
    new = new.float()
    highest = new.abs().amax(-1, keepdim=True)
    inverse = torch.where(highest > 0, LARGEST / highest, 0.0)
    numbers = (new * inverse).round().to(torch.int8)
    return torch.cat([numbers, (highest / LARGEST).view(torch.int8)], -1)


def decode_kv(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values of the cache to `dtype`."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    numbers, scale = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (numbers * scale).to(dtype)
