"""The likeliest tokens of a row. The definition is `torch.topk`; which of equals comes first is left open."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

BLOCK = 128  # what is looked through at once; about the root of a vocabulary is best


def top(logits: Tensor, count: int) -> list[list[int]]:
    """The `count` likeliest of each row of logits [rows, vocab], best first."""
    count = min(count, logits.shape[-1])
    if logits.device.type != "cpu" or logits.shape[-1] // BLOCK < 2 * count:
        found: list[list[int]] = logits.topk(count).indices.tolist()
        return found
    return [_top_of_blocks(row, count) for row in logits.numpy()]


def _top_of_blocks(row: npt.NDArray[np.float32], count: int) -> list[int]:
    """The `count` likeliest lie in the `count` blocks with the likeliest peaks: numpy sees each token once."""
    whole = len(row) // BLOCK * BLOCK
    blocks = row[:whole].reshape(-1, BLOCK)
    places = np.argpartition(blocks.max(-1), -count)[-count:]
    ids = (places[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    if whole < len(row):
        ids = np.append(ids, np.arange(whole, len(row)))
    values = row[ids]
    best = np.argpartition(values, -count)[-count:]
    found: list[int] = ids[best[np.argsort(-values[best])]].tolist()
    return found
