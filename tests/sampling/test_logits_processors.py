"""What looks back or at long lists, against its plain definition."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from foretell.build.engine_builder import Assembly, build_engine
from foretell.config import EngineConfig, SpeculationConfig
from foretell.sampling.logits_processors import TokenHistory, changes_logits, process_row
from foretell.sampling.sampling import SamplingRow, process_logits
from foretell.sampling_params import SamplingParams

WORDS = ["fox", "the quick", " brown fox", "quick", "quick brown", "o", "lazy dog"]


@pytest.fixture(scope="module")
def assembly(tiny_folder: Any) -> Assembly:
    return build_engine(EngineConfig(model=str(tiny_folder)), SpeculationConfig(drafter="none"))


def reference(scores: torch.Tensor, text: list[int], params: SamplingParams, banned: list[list[int]]) -> torch.Tensor:
    """Entry by entry."""
    scores = scores.clone()
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for words in banned:
        if words[:-1] == text[len(text) - len(words) + 1 :]:
            scores[words[-1]] = float("-inf")
    if params.allowed_token_ids is not None:
        for token in set(range(len(scores))) - set(params.allowed_token_ids):
            scores[token] = float("-inf")
    return scores


@pytest.mark.parametrize("seed", range(8))
def test_scores_are_those_of_the_plain_definition(assembly: Assembly, seed: int) -> None:
    rng, encode = random.Random(seed), assembly.tokenizer.encode
    vocab = assembly.requests.limits.vocab
    params = SamplingParams(
        bad_words=rng.sample(WORDS, 4),
        logit_bias={rng.randrange(vocab): rng.uniform(-100, 100) for _ in range(50)},
        allowed_token_ids=tuple(rng.sample(range(vocab), vocab - 9)) if seed % 2 else None,
    )
    spelt = [encode(form, add_special=False) for word in params.bad_words for form in (word, " " + word.lstrip())]
    hits = 0
    for run in spelt:
        prompt = [rng.randrange(vocab) for _ in range(3)]
        (request,) = assembly.requests.make("a", [*prompt, *run[:-1]], params)
        cut = rng.randrange(len(run))  # some of the run is in the output, the rest on the path of a draft
        text, path = [*prompt, *run[:-1][:cut]], tuple(run[:-1][cut:])
        scores = torch.randn(vocab)
        found = process_row(scores, TokenHistory(request, text, vocab), path, None)
        assert torch.equal(found, reference(scores, [*text, *path], params, spelt))
        hits += bool(found[run[-1]] == float("-inf"))
    assert hits == len(spelt)


@pytest.mark.parametrize("least", [0, 1, 3, 6])
def test_ends_are_kept_out_until_enough_is_written_and_looked_at_no_longer(assembly: Assembly, least: int) -> None:
    vocab = assembly.requests.limits.vocab
    params = SamplingParams(min_tokens=least, max_tokens=8, stop_token_ids=[5])
    (request,) = assembly.requests.make("a", [1, 2, 3], params)
    ends, scores = {5, *request.end_ids}, torch.randn(vocab)
    for written in range(8):
        for drafted in range(3):
            text, path = [1, 2, 3, *[7] * written], (7,) * drafted
            found = process_row(scores, TokenHistory(request, text, vocab), path, None)
            barred = set((found == float("-inf")).nonzero()[:, 0].tolist())
            assert barred == (ends if written + drafted < least else set())
            assert not barred or changes_logits(request, written)
        assert changes_logits(request, written) == (written < least)


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_adjusted_together_as_each_alone(assembly: Assembly, seed: int) -> None:
    """Where single tokens are forbidden and where more is changed, side by side."""
    rng, vocab = random.Random(seed), assembly.requests.limits.vocab
    settings = [
        SamplingParams(min_tokens=3, max_tokens=8, stop_token_ids=[5]),
        SamplingParams(bad_words=WORDS[:3]),
        SamplingParams(bad_words=WORDS[3:], min_tokens=2, max_tokens=8, presence_penalty=0.5),
        SamplingParams(min_tokens=2, max_tokens=8, logit_bias={4: 9.0}),
    ]
    rows = []
    for params in rng.choices(settings, k=9):
        (request,) = assembly.requests.make("a", [1, 2, 3], params)
        text, path = [1, 2, 3, *rng.choices(range(vocab), k=rng.randrange(4))], (7,) * rng.randrange(3)
        allowed = torch.rand(vocab) < 0.5 if rng.random() < 0.3 else None
        rows.append(SamplingRow(params, 0, len(text), TokenHistory(request, text, vocab), path, allowed))
    logits = torch.randn(len(rows), vocab)
    alone = [process_row(each, row.history, row.path, row.allowed) for each, row in zip(logits, rows, strict=True)]
    assert torch.equal(process_logits(logits, rows), torch.stack(alone))
