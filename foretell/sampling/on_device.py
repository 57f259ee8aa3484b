"""Tokens chosen where the logits are, on a CUDA device: a few settings travel there, and token ids come back."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.params import SamplingParams

from . import noise
from .alike import distinct

LEAST_TEMPERATURE = 1e-6


@cache
def works() -> bool:
    """Whether the kernel can be had; without Triton the definition runs, on the device too."""
    return find_spec("triton") is not None


def choose_there(logits: Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]) -> list[int]:
    """For each row of logits [rows, vocab] what `sampling.choose` defines."""
    from foretell.kernels.triton.choose import choose_tokens

    host = torch.from_numpy(settings(params, seeds, positions))
    if logits.is_cuda:
        host = host.pin_memory()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    choose_tokens(logits, host.to(logits.device, non_blocking=True), tokens)
    chosen: list[int] = tokens.tolist()
    return chosen


def settings(params: list[SamplingParams], seeds: list[int], positions: list[int]) -> npt.NDArray[np.int64]:
    """[rows, FIELDS] as the kernel reads them."""
    kinds, places = distinct(params)
    floats = np.array([_floats(each) for each in kinds], np.float32).view(np.int64)
    return np.concatenate([noise.keys(seeds, positions)[:, None], floats[places]], 1)


def _floats(params: SamplingParams) -> tuple[float, float, float, float]:
    warmth = max(params.temperature, LEAST_TEMPERATURE) if params.temperature > 0 else 0.0
    return warmth, params.top_p, params.min_p, float(max(params.top_k, 0))
