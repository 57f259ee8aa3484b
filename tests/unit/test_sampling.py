"""Sampling."""

from __future__ import annotations

import math

import pytest
import torch

from foretell.sampling import noise
from foretell.sampling.sampling import SamplingRow, probabilities, sample, sample_from_probs, truncate_probs
from foretell.sampling_params import SamplingParams

LOGITS = torch.tensor([1.0, 2.0, 0.0, -1.0, 0.5, 2.0])


def frequencies(params: SamplingParams, trials: int = 40_000) -> torch.Tensor:
    rows = [SamplingRow(params, seed, 3) for seed in range(trials)]
    tokens = torch.tensor(sample(LOGITS.repeat(trials, 1), rows))
    return torch.bincount(tokens, minlength=len(LOGITS)) / trials


SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "warm": SamplingParams(temperature=1.7),
    "top k": SamplingParams(temperature=1.0, top_k=3),
    "top p": SamplingParams(temperature=1.0, top_p=0.6),
    "min p": SamplingParams(temperature=1.0, min_p=0.3),
}


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_sampled_with_their_probability(params: SamplingParams) -> None:
    wanted = probabilities(LOGITS[None], [params])[0]
    seen = frequencies(params, 20_000)
    assert wanted.sum() == pytest.approx(1, abs=1e-6)
    assert (seen[wanted == 0] == 0).all()
    assert (seen - wanted).abs().max() < 4.5 * math.sqrt(0.25 / 20_000)


def test_top_k_top_p_and_min_p_keep_the_right_tokens() -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    kept = lambda **params: (truncate_probs(probs, SamplingParams(temperature=1.0, **params)) > 0).tolist()  # noqa: E731
    assert kept(top_k=2) == [True, True, False, False, False]
    assert kept(top_p=0.7) == [True, True, False, False, False]
    assert kept(top_p=0.71) == [True, True, True, False, False]
    assert kept(top_p=0.01) == [True, False, False, False, False]
    assert kept(min_p=0.5) == [True, True, True, False, False]
    assert kept(top_k=3, top_p=0.5) == [True, True, False, False, False], "top-p applies to what top-k left"
    assert kept(top_k=99) == [True] * 5


def test_a_top_p_search_that_needs_a_full_sort_gives_the_same() -> None:
    torch.manual_seed(0)
    flat = torch.randn(5000).mul(0.01).softmax(-1)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    kept = truncate_probs(flat, params) > 0
    order = flat.sort(descending=True).values.double().cumsum(0)
    assert kept.sum() == (order < 0.9).sum() + 1


def test_zero_temperature_is_the_argmax_and_a_tie_goes_to_the_first() -> None:
    greedy = SamplingParams()
    assert sample(LOGITS[None], [SamplingRow(greedy, 5, 0)]) == [1]
    assert probabilities(LOGITS[None], [greedy])[0].tolist() == [0, 1, 0, 0, 0, 0]


def test_a_row_samples_the_same_in_any_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(12, 200)
    kinds = list(SETTINGS.values()) + [SamplingParams()]
    rows = [SamplingRow(kinds[i % len(kinds)], i * 7, i * 3) for i in range(12)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def test_noise_computed_only_where_it_can_win_samples_the_same_token() -> None:
    """Lanes are token ids: leaving out lanes of probability 0 must not shift the others."""
    probs = torch.zeros(64)
    probs[[3, 17, 40]] = torch.tensor([0.2, 0.5, 0.3])
    for seed in range(50):
        row = SamplingRow(SamplingParams(temperature=1.0), seed, 11)
        few = SamplingRow(SamplingParams(temperature=1.0, top_k=3), seed, 11)
        assert sample_from_probs(probs[None], [row]).tolist() == sample_from_probs(probs[None], [few]).tolist()


def test_noise_depends_on_seed_position_stream_and_lane() -> None:
    lanes = torch.arange(1000)
    base = noise.uniform(torch.tensor([1]), torch.tensor([2]), 0, lanes)
    assert ((base > 0) & (base < 1)).all()
    assert base.equal(noise.uniform(torch.tensor([9, 1]), torch.tensor([9, 2]), 0, lanes)[1:])
    for seed, position, stream in ((2, 2, 0), (1, 3, 0), (1, 2, 1), (-1, 2, 0)):
        other = noise.uniform(torch.tensor([seed]), torch.tensor([position]), stream, lanes)
        assert abs(float(torch.corrcoef(torch.cat([base, other]))[0, 1])) < 0.12
    assert abs(float(base.mean()) - 0.5) < 0.03


def test_noise_is_a_number_in_the_open_interval_even_at_the_edges() -> None:
    seeds = torch.tensor([-(2**63), 2**63 - 1, 0, -1])
    numbers = noise.uniform(seeds, torch.tensor([0, 2**31, 0, 5]), 3, torch.arange(5000))
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert noise.exponential(seeds, seeds * 0, 0, torch.arange(9)).isfinite().all()


def test_derived_seeds_keep_the_seed_for_choice_0_and_differ_otherwise() -> None:
    assert noise.derive_seed(123, 0) == 123
    seeds = {noise.derive_seed(seed, choice) for seed in (-5, 0, 1, 2**62) for choice in range(1, 50)}
    assert len(seeds) == 4 * 49
    assert all(-(2**63) <= value < 2**63 for value in seeds)
