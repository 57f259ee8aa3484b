"""The likeliest tokens of a row. The definition is `torch.topk`; which of equals comes first is left open."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.kernels.native.library import library

MOST = 64  # that the library finds


def top(logits: Tensor, count: int) -> list[list[int]]:
    """The `count` likeliest of each row of logits [rows, vocab], best first. Nothing may be NaN."""
    count = min(count, logits.shape[-1])
    native = library() if logits.is_cpu and logits.dtype == torch.float32 and count <= MOST else None
    if native is not None:
        return native.top(logits, count)
    found: list[list[int]] = logits.topk(count).indices.tolist()
    return found
