"""Sampling on a CPU in one native call. `sampling.sample` defines it up to float rounding."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from foretell.kernels.native.library import Library, library
from foretell.sampling import noise
from foretell.sampling_params import SamplingParams

PARAMS, KEY = struct.Struct("=dddq"), struct.Struct("=Q")  # fields of SAMPLING_ROW: parameters, and the noise key
WORD = (1 << 64) - 1


def native_sampler_for(logits: Tensor) -> Library | None:
    """Return the native library if it can sample from these logits."""
    return library() if logits.is_cpu and logits.dtype == torch.float32 else None


def sample_native(
    native: Library, logits: Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]
) -> list[int]:
    """Return the token of each row of logits [rows, vocab]."""
    return native.sample(logits, pack_sampling_rows(params, noise.words(seeds, positions)))


def pack_sampling_rows(params: Iterable[SamplingParams], keys: Iterable[int]) -> bytes:
    """Return a SAMPLING_ROW per row, with the noise `keys`. For few rows this is faster than a numpy array."""
    found: list[bytes] = []
    previous, packed = None, b""
    for each, key in zip(params, keys, strict=True):
        if each is not previous:  # rows of one sequence share their params
            previous, packed = each, PARAMS.pack(each.temperature, each.top_p, each.min_p, each.top_k)
        found += (packed, KEY.pack(key & WORD))
    return b"".join(found)
