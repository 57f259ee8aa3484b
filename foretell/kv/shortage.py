"""When memory does not suffice."""

from __future__ import annotations

import torch

WORDS = ("out of memory", "alloc_failed", "can't allocate memory")


def lacks_memory(error: Exception) -> bool:
    """Return whether an allocation failed: torch's allocators, the libraries and the driver each have their own words,
    and Python, numpy and the native kernels raise MemoryError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)
