"""Drawing tokens on a CPU in one call. The definition is `sample` in sampling.py, but for rounding."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from foretell.kernels.native.library import Library, library
from foretell.sampling import noise
from foretell.sampling_params import SamplingParams

HOW, KEY = struct.Struct("=dddq"), struct.Struct("=Q")  # of DRAW: how a row is drawn, and the key of its noise
WORD = (1 << 64) - 1


def native_sampler_for(logits: Tensor) -> Library | None:
    """The library, where it can choose among these."""
    return library() if logits.is_cpu and logits.dtype == torch.float32 else None


def sample_native(
    native: Library, logits: Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]
) -> list[int]:
    """Return the token of each row of logits [rows, vocab]."""
    return native.sample(logits, pack_sampling_rows(params, noise.words(seeds, positions)))


def pack_sampling_rows(params: Iterable[SamplingParams], keys: Iterable[int]) -> bytes:
    """How rows are drawn, as the library wants it, each a DRAW; `keys` are those of their noise. No array: few rows are
    sooner written down."""
    found: list[bytes] = []
    before, how = None, b""
    for each, key in zip(params, keys, strict=True):
        if each is not before:  # rows of one text have the same settings
            before, how = each, HOW.pack(each.temperature, each.top_p, each.min_p, each.top_k)
        found += (how, KEY.pack(key & WORD))
    return b"".join(found)
