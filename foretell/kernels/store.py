"""Stores of new keys and values in the KV cache."""

from __future__ import annotations

from torch import Tensor

from foretell.kernels.kv_types import encode_kv


def store(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store each row of new [n, kv_heads, dim] in its slot of cache [pages, page_size, kv_heads, stored width]."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, encode_kv(new, cache.dtype))
