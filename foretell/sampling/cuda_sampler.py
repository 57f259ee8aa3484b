"""Sampling on a CUDA device: sampling settings go to the device, token ids come back."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.sampling import noise
from foretell.sampling_params import SamplingParams


def unique_params(params: list[SamplingParams]) -> tuple[list[SamplingParams], list[int]]:
    """Return the distinct params and, for each row, the index of its own."""
    indices: dict[int, int] = {}
    found: list[SamplingParams] = []
    for each in params:
        if id(each) not in indices:  # by identity: comparing fields would take longer than it saves
            indices[id(each)] = len(found)
            found.append(each)
    return found, [indices[id(each)] for each in params]


MIN_TEMPERATURE = 1e-6


@cache
def available() -> bool:
    """Return whether the kernel is available. Without Triton the torch definition runs on the device."""
    return find_spec("triton") is not None


class SamplingBatch(NamedTuple):
    """Sampling params, seeds and positions of the rows of a batch."""

    params: list[SamplingParams]
    seeds: list[int]
    positions: list[int]


def sample_on_device(logits: Tensor, batch: SamplingBatch) -> list[int]:
    """Return the sampled token of each row of logits [rows, vocab], as `sampling.sample` defines it."""
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    sample_into(logits, batch, tokens)
    chosen: list[int] = tokens.tolist()
    return chosen


def sample_into(logits: Tensor, batch: SamplingBatch, tokens: Tensor) -> None:
    """Sample into `tokens` [rows], int32, without waiting for the device."""
    from foretell.kernels.triton.sample import sample_tokens

    host = torch.from_numpy(pack_settings(batch))
    if logits.is_cuda:
        host = host.pin_memory()
    sample_tokens(logits, host.to(logits.device, non_blocking=True), tokens)


def pack_settings(batch: SamplingBatch) -> npt.NDArray[np.int64]:
    """Return the settings of the rows, [rows, FIELDS], in the format of the kernel."""
    kinds, indices = unique_params(batch.params)
    floats = np.array([_floats(each) for each in kinds], np.float32).view(np.int64)
    return np.concatenate([noise.keys(batch.seeds, batch.positions)[:, None], floats[indices]], 1)


def _floats(params: SamplingParams) -> tuple[float, float, float, float]:
    temperature = max(params.temperature, MIN_TEMPERATURE) if params.temperature > 0 else 0.0
    return temperature, params.top_p, params.min_p, float(max(params.top_k, 0))
