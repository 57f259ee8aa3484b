"""Drawing tokens on a CPU in one call. The definition is `choose` in sampling.py, but for rounding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretell.kernels.native.library import DRAW, Library, library
from foretell.params import SamplingParams

from . import noise


def chooser(logits: Tensor) -> Library | None:
    """The library, where it can choose among these."""
    return library() if logits.is_cpu and logits.dtype == torch.float32 else None


def choose_natively(
    native: Library, logits: Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]
) -> list[int]:
    """The token of each row of logits [rows, vocab]; -1 where the best score is no number."""
    keys = noise.keys(seeds, positions)
    draws = np.array(
        [(p.temperature, p.top_p, p.min_p, p.top_k, key) for p, key in zip(params, keys, strict=True)], DRAW
    )
    return native.choose(logits, draws)
