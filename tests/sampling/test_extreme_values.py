"""Extreme sampling settings and extreme scores: the native library and the definition agree on them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.draft.heads.sampling import draft_params
from foretell.kernels.native.library import library
from foretell.sampling import noise
from foretell.sampling.logits_processors import TokenHistory
from foretell.sampling.native_sampler import pack_sampling_rows
from foretell.sampling.sampling import (
    SamplingRow,
    argmax_tokens,
    probabilities,
    process_logits,
    sample,
    sample_reference,
)
from foretell.sampling_params import SamplingParams
from foretell.types import Request

native = library()
needs_native = pytest.mark.skipif(native is None, reason="no native library here")
TEMPERATURES = (0.0, 5e-324, 1e-46, 1e-40, 1e-37, 1e-20, 1e-7, 1e-6, 1e-3, 0.7, 1.0, 50.0, 1e20, 1e38, 1e300)
TOP_P = (1.0, 1.0, 0.9, 0.5, 1e-3, 1e-30, 1e-300, 1 - 1e-16)
MIN_P = (0.0, 0.0, 1e-3, 0.5, 1.0, 1e-40, 1e-300)
TOP_K = (0, 0, 1, 2, 40, 2**31, 2**63 - 1)
REPETITION = (1.0, 1.0, 1e-300, 1e-30, 0.5, 3.0, 1e30, 1e300)
PLAIN = SamplingParams(temperature=1.0)  # what a head's own confidence is taken from
WIDTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200, 1000)


def some_scores(chance: random.Random, width: int) -> Tensor:
    """A row of one of the kinds that a model, a penalty or a logits processor can produce."""
    x = torch.randn(width, generator=torch.Generator().manual_seed(chance.getrandbits(30)))
    some = torch.rand(width, generator=torch.Generator().manual_seed(chance.getrandbits(30)))
    kind = chance.randrange(12)
    if kind == 0:
        return x * 3
    if kind == 1:
        return torch.full((width,), chance.choice([0.0, -0.0, 1e-40, 7.5, -1e38]))
    if kind == 2:
        return torch.where(some < 0.5, -torch.inf, x * 10)
    if kind == 3:
        return torch.where(some < 0.1, torch.inf, x)
    if kind == 4:
        return torch.where(some < 0.2, torch.nan, x * 5)
    if kind == 5:
        return torch.full((width,), chance.choice([torch.nan, torch.inf, -torch.inf]))
    if kind == 6:
        return x * chance.choice([1e30, 1e33, 1e36, 3e38])
    if kind == 7:
        return x * chance.choice([1e-45, 1e-38, 1e-20])
    if kind == 8:
        return (x * 2).round()  # many ties
    if kind == 9:
        return torch.where(some < 0.3, torch.nan, torch.where(some < 0.6, -torch.inf, 3e38 * x.sign()))
    if kind == 10:
        return x * 1000
    return torch.where(some < 0.02, 200.0, x * 5)


def some_params(chance: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=chance.choice(TEMPERATURES),
        top_p=chance.choice(TOP_P),
        min_p=chance.choice(MIN_P),
        top_k=chance.choice(TOP_K),
    )


def with_penalties(chance: random.Random, params: SamplingParams, vocab: int) -> SamplingParams:
    return replace(
        params,
        repetition_penalty=chance.choice(REPETITION),
        presence_penalty=chance.choice((0.0, 2.0, -2.0)),
        frequency_penalty=chance.choice((0.0, 2.0, -2.0)),
        logit_bias={chance.randrange(vocab): chance.choice((-100.0, 100.0, 1e-300))},
    )


def some_rows(chance: random.Random, count: int, width: int) -> tuple[Tensor, list[SamplingRow]]:
    rows = []
    for position in range(count):
        params, history, seed = some_params(chance), None, chance.getrandbits(62)
        if chance.random() < 0.3:
            params = with_penalties(chance, params, width)
            tokens = [chance.randrange(width) for _ in range(12)]
            history = TokenHistory(Request("r", tuple(tokens[:4]), params, seed, 9), tokens, width)
        rows.append(SamplingRow(params, seed, position, history))
    return torch.stack([some_scores(chance, width) for _ in range(count)]), rows


def same_or_a_tie(mine: int, theirs: int, probs: Tensor, row: SamplingRow) -> bool:
    """Whether two tokens are the same, or so close in their exponential race that rounding decides."""
    if mine == theirs:
        return True
    lanes = torch.tensor([mine, theirs])
    waits = noise.exponential(torch.tensor([row.seed]), torch.tensor([row.position]), noise.TOKEN_STREAM, lanes)[0]
    first, second = (probs[lanes].double() / waits.double()).tolist()
    return first > 0 and second > 0 and abs(first - second) <= 1e-4 * max(first, second)


@needs_native
@pytest.mark.parametrize("seed", range(6))
def test_the_library_samples_what_the_definition_samples(seed: int) -> None:
    chance = random.Random(seed)
    for width in WIDTHS:
        logits, rows = some_rows(chance, 24, width)
        found, scores = sample(logits, rows), process_logits(logits, rows)
        defined, probs = sample_reference(scores, rows), probabilities(scores, [row.params for row in rows])
        for i, row in enumerate(rows):
            assert same_or_a_tie(found[i], defined[i], probs[i], row), (width, i, row.params, scores[i])


@pytest.mark.parametrize("seed", range(6))
def test_every_distribution_is_one_and_holds_the_sampled_token(seed: int) -> None:
    """Rejection and block verification use these distributions: each sums to 1 and excludes what cannot be sampled."""
    chance = random.Random(seed)
    for width in WIDTHS:
        logits, rows = some_rows(chance, 24, width)
        scores = process_logits(logits, rows)
        probs = probabilities(scores, [row.params for row in rows])
        assert bool(((probs >= 0) & (probs <= 1)).all())
        assert probs.sum(-1).tolist() == pytest.approx([1.0] * len(rows), rel=1e-4)
        tokens, best = sample(logits, rows), argmax_tokens(scores)
        for i, row in enumerate(rows):
            assert probs[i, tokens[i]] > 0, (width, i, row.params, scores[i])
            finite = bool(scores[i].isfinite().any())
            assert not finite or not bool(probs[i][scores[i].isnan() | (scores[i] == -torch.inf)].any())
            if row.params.temperature == 0:
                assert tokens[i] == best[i] and probs[i, best[i]] == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-40, 1e-37, 1e-20])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)) * 5
    logits[:, 777] = 200.0
    rows = [SamplingRow(SamplingParams(temperature=temperature), seed, 5) for seed in range(2)]
    assert sample(logits, rows) == sample_reference(logits, rows) == [777, 777]


def test_a_top_k_beyond_64_bits_keeps_every_token() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    for seed in range(8):
        huge, every = (SamplingRow(SamplingParams(temperature=1.0, top_k=k), seed, 5) for k in (10**27, 0))
        assert sample(logits, [huge]) == sample_reference(logits, [huge]) == sample(logits, [every])


@needs_native
@pytest.mark.parametrize("seed", range(6))
def test_the_odds_of_a_head_are_those_of_the_definition(seed: int) -> None:
    """Scores as heads give them, with settings as extreme as a request may ask for."""
    assert native is not None
    chance = random.Random(seed)
    for width in WIDTHS:
        logits = torch.stack([some_scores(chance, width) for _ in range(16)])
        params, keys = [some_params(chance) for _ in range(16)], [noise.key(i, 3) for i in range(16)]
        ids, count = torch.arange(width), min(8, width)
        tokens, shares = native.race_topk(logits, ids, pack_sampling_rows(params, keys), count)
        probs = probabilities(
            logits, [each if each.temperature else SamplingParams(temperature=1.0) for each in params]
        )
        waits = noise.exponential(torch.arange(16), torch.full((16,), 3), noise.TOKEN_STREAM, ids)
        for i, each in enumerate(params):
            assert len(set(tokens[i])) == count and all(0 <= token < width for token in tokens[i])
            assert all(0 <= share <= 1 for share in shares[i])
            odds = probs[i].double() / waits[i].double() if each.temperature else probs[i].double()
            odds /= odds.sum()
            if bool(logits[i].isnan().any()) or not bool(logits[i].max().isfinite()):
                continue  # drafts of such rows are not compared: none of them is likely
            assert shares[i] == pytest.approx(odds[tokens[i]].tolist(), rel=1e-3, abs=1e-6), (width, i, each)


@pytest.mark.parametrize("seed", range(2))
def test_draft_temperatures_stay_valid(seed: int) -> None:
    chance = random.Random(seed)
    for width in WIDTHS:
        logits = torch.stack([some_scores(chance, width) for _ in range(16)])
        params = draft_params(logits, [some_params(chance) for _ in range(16)], "entropy")
        assert bool((probabilities(logits, params).sum(-1) - 1).abs().max() < 1e-4)
