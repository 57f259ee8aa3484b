"""Token ids of a tokenizer that the model's vocabulary does not have cost no request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams
from foretell.tokenizer.reasoning_tags import THINK
from foretell.train.sampler import Sampler
from foretell.types import Request
from tests.tiny import CONTEXT, VOCAB, World, run, tiny_decoder

ENDS = frozenset({0, VOCAB, VOCAB + 7})
SPELLED = {"a": [5], "b": [6, VOCAB + 1], "c": [VOCAB + 1, 6], "<think>": [9], "</think>": [VOCAB + 2]}


class LargerTokenizer:
    """Encodes some words by ids that the model does not have."""

    longest_token = 8
    reasoning_tags = THINK

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return SPELLED[text.strip()]

    def decode(self, tokens: Any) -> str:
        return ""


def made(tokenizer: Any = None, **params: Any) -> Request:
    maker = RequestBuilder(RequestLimits(CONTEXT, ENDS, VOCAB), tokenizer, MixDrafter([NGramDrafter()]))
    (request,) = maker.make("0", [1, 2, 3], SamplingParams(max_tokens=24, seed=0, **params))
    return request


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_ids_outside_the_vocabulary_cost_nothing(temperature: float) -> None:
    engine = World().engine(NGramDrafter())
    state = engine.add(made(min_tokens=20, temperature=temperature))
    run(engine)
    assert 20 <= state.seq.num_output_tokens <= 24 and state.seq.finish_reason in ("stop", "length")


def test_banned_ids_outside_the_vocabulary_cost_nothing() -> None:
    request = made(LargerTokenizer(), bad_words=["a", "b", "c"], logit_bias={5: 50.0})
    assert request.bad_words == {1: {(): (5,)}}, "the others are never generated"
    engine = World().engine(NGramDrafter())
    state = engine.add(request)
    run(engine)
    assert state.seq.num_output_tokens and 5 not in state.seq.tokens


def test_a_thinking_budget_needs_its_end_in_the_vocabulary() -> None:
    with pytest.raises(RequestError, match="thinking_budget.*vocabulary"):
        made(LargerTokenizer(), thinking_budget=3)


def test_training_samples_with_end_ids_outside_the_vocabulary() -> None:
    sampler = Sampler(tiny_decoder(), 1, CONTEXT, ENDS, seed=0)
    assert torch.equal(sampler.is_end.nonzero().flatten(), torch.tensor([0]))
