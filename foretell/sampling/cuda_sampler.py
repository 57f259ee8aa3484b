"""Tokens chosen where the logits are, on a CUDA device: a few settings travel there, and token ids come back."""

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
    """The settings there are, and for each row which of them are its own."""
    places: dict[int, int] = {}
    found: list[SamplingParams] = []
    for each in params:
        if id(each) not in places:  # by identity: to compare all their fields would take longer than it saves
            places[id(each)] = len(found)
            found.append(each)
    return found, [places[id(each)] for each in params]


MIN_TEMPERATURE = 1e-6


@cache
def available() -> bool:
    """Whether the kernel can be had; without Triton the definition runs, on the device too."""
    return find_spec("triton") is not None


class SamplingBatch(NamedTuple):
    """How the token of each row is drawn."""

    params: list[SamplingParams]
    seeds: list[int]
    positions: list[int]


def sample_on_device(logits: Tensor, draws: SamplingBatch) -> list[int]:
    """For each row of logits [rows, vocab] what `sampling.sample` defines."""
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    sample_into(logits, draws, tokens)
    chosen: list[int] = tokens.tolist()
    return chosen


def sample_into(logits: Tensor, draws: SamplingBatch, tokens: Tensor) -> None:
    """The same left in `tokens` [rows], int32; nobody waits for it."""
    from foretell.kernels.triton.sample import sample_tokens

    host = torch.from_numpy(pack_settings(draws))
    if logits.is_cuda:
        host = host.pin_memory()
    sample_tokens(logits, host.to(logits.device, non_blocking=True), tokens)


def pack_settings(draws: SamplingBatch) -> npt.NDArray[np.int64]:
    """[rows, FIELDS] as the kernel reads them."""
    kinds, places = unique_params(draws.params)
    floats = np.array([_floats(each) for each in kinds], np.float32).view(np.int64)
    return np.concatenate([noise.keys(draws.seeds, draws.positions)[:, None], floats[places]], 1)


def _floats(params: SamplingParams) -> tuple[float, float, float, float]:
    warmth = max(params.temperature, MIN_TEMPERATURE) if params.temperature > 0 else 0.0
    return warmth, params.top_p, params.min_p, float(max(params.top_k, 0))
