"""Stores of new keys and values in the KV cache."""

from __future__ import annotations

from torch import Tensor


def store(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store each row of new [n, kv_heads, dim] in its slot of cache [pages, page_size, kv_heads, dim]."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)
