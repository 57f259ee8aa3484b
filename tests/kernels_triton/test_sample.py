"""Tokens chosen on the device are those of the definition: the same noise, the same edges, the first of equals."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from foretell.sampling.cuda_sampler import SamplingBatch, sample_on_device
from foretell.sampling.sampling import SamplingRow, sample
from foretell.sampling_params import SamplingParams
from tests.kernels_triton.test_forward import DEVICE

SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.3},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-k of one": {"temperature": 2.0, "top_k": 1},
    "top-k of all": {"temperature": 1.0, "top_k": 100_000},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "a narrow top-p": {"temperature": 3.0, "top_p": 0.05},
    "a top-p of next to nothing": {"temperature": 1.0, "top_p": 1e-50},  # in float32 it is 0
    "min-p": {"temperature": 1.5, "min_p": 0.2},
    "all": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


def both(logits: torch.Tensor, params: list[SamplingParams]) -> tuple[list[int], list[int]]:
    """By the kernel and by the definition."""
    seeds = [-(7**i) for i in range(len(params))]
    positions = [3 * i for i in range(len(params))]
    rows = [SamplingRow(*each) for each in zip(params, seeds, positions, strict=True)]
    return sample_on_device(logits.to(DEVICE), SamplingBatch(params, seeds, positions)), sample(logits.cpu(), rows)


@pytest.mark.parametrize("vocab", [32, 300, 5000])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_the_definition(name: str, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = 3 * torch.randn(12, vocab)
    mine, defined = both(logits, [SamplingParams(**SETTINGS[name])] * 12)  # type: ignore[arg-type]
    assert mine == defined


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_at_an_edge_stay_in_and_the_forbidden_stay_out(name: str) -> None:
    torch.manual_seed(2)
    logits = (2 * torch.randn(12, 500)).bfloat16().float()  # many are equal
    logits[:, ::3] = float("-inf")
    mine, defined = both(logits, [SamplingParams(**SETTINGS[name])] * 12)  # type: ignore[arg-type]
    assert mine == defined
    assert all(token % 3 for token in mine)


def test_rows_of_one_step_are_asked_for_differently() -> None:
    torch.manual_seed(3)
    params = [SamplingParams(**each) for each in SETTINGS.values()]  # type: ignore[arg-type]
    mine, defined = both(torch.randn(len(params), 700), params)
    assert mine == defined
