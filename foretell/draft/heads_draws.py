"""How a head's guesses are drawn where its logits are; `drawing.draw_nodes` is the definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretell.sampling import noise
from foretell.sampling.native_choice import draw_rows
from foretell.types import Sequence

from .choosing import must_draw


def noise_keys(seq: Sequence, depth: int) -> npt.NDArray[np.int64]:
    """Of the noise that draws the token of each depth."""
    seed, root = seq.request.seed, len(seq.tokens)
    if must_draw(seq):
        streams = range(noise.DRAFT_STREAM, noise.DRAFT_STREAM + depth)
        return np.concatenate([noise.keys([seed], [root], stream) for stream in streams])
    return noise.keys([seed] * depth, list(range(root, root + depth)))


def draws_of(seqs: list[Sequence], depth: int) -> npt.NDArray[np.void] | None:
    """As the native library wants them, [depth, texts]; None where nothing is drawn for any text."""
    if all(seq.request.params.temperature == 0 for seq in seqs):
        return None
    keys = np.stack([noise_keys(seq, depth) for seq in seqs], 1)
    return draw_rows([seq.request.params for seq in seqs] * depth, keys.ravel()).reshape(depth, len(seqs))
