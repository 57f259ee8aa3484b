"""How a head's guesses are drawn where its logits are; `drawing.draw_nodes` is the definition."""

from __future__ import annotations

from itertools import chain

from foretell.sampling import noise
from foretell.sampling.native_choice import draw_rows
from foretell.types import Sequence

from .choosing import must_draw


def noise_keys(seq: Sequence, depth: int) -> list[int]:
    """Of the noise that draws the token of each depth."""
    seed, root = seq.request.seed, len(seq.tokens)
    if must_draw(seq):
        return [noise.key(seed, root, noise.DRAFT_STREAM + at) for at in range(depth)]
    return [noise.key(seed, root + at) for at in range(depth)]


def draws_of(seqs: list[Sequence], depth: int) -> bytes | None:
    """As the native library wants them, a DRAW for each depth and text; None where nothing is drawn for any text."""
    params = [seq.request.params for seq in seqs]
    if not any(each.temperature for each in params):
        return None
    keys = zip(*(noise_keys(seq, depth) for seq in seqs), strict=True)  # by depth
    return draw_rows(params * depth, chain.from_iterable(keys))
