"""Drawing tokens on a CPU in one call. The definition is `choose` in sampling.py, but for rounding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.kernels.native.library import DRAW, Library, library
from foretell.params import SamplingParams

from . import noise
from .alike import distinct


def chooser(logits: Tensor) -> Library | None:
    """The library, where it can choose among these."""
    return library() if logits.is_cpu and logits.dtype == torch.float32 else None


def choose_natively(
    native: Library, logits: Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]
) -> list[int]:
    """The token of each row of logits [rows, vocab]; -1 where the best score is no number."""
    return native.choose(logits, draw_rows(params, noise.keys(seeds, positions)))


def draw_rows(params: list[SamplingParams], keys: npt.ArrayLike) -> npt.NDArray[np.void]:
    """How rows are drawn, as the library wants it; `keys` are those of their noise."""
    kinds, places = distinct(params)
    rows = np.array([(p.temperature, p.top_p, p.min_p, p.top_k, 0) for p in kinds], DRAW)[places]
    rows["key"] = keys
    return rows
