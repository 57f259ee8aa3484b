"""When memory does not suffice."""

from __future__ import annotations

import torch

WORDS = ("out of memory", "alloc_failed")


def lacks_memory(error: RuntimeError) -> bool:
    """Whether that is what failed: torch's allocator, the libraries and the driver each have their own words."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error).lower() for words in WORDS)
