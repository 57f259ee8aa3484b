"""The bulk sampler generates the same tokens as the engine."""

from __future__ import annotations

from foretell.train.sampler import AnswerRequest, Sampler
from tests.tiny import CONTEXT, PROMPTS, generate, tiny_decoder


def test_greedy_outputs_equal_those_of_the_engine() -> None:
    expected = generate()
    sampler = Sampler(tiny_decoder(), 3, CONTEXT, frozenset({0}), 0)  # fewer slots than prompts, so slots are reused
    requests = [AnswerRequest(i, list(prompt), 0.0, 24) for i, prompt in enumerate(PROMPTS)]
    found = {request.index: tokens for request, tokens in sampler.generate(requests)}
    assert [found[i] for i in range(len(PROMPTS))] == expected


def test_temperature_samples_and_max_tokens_holds() -> None:
    sampler = Sampler(tiny_decoder(), 4, CONTEXT, frozenset({0}), 0)
    found = [tokens for _, tokens in sampler.generate([AnswerRequest(i, [1, 2, 3], 5.0, 9) for i in range(4)])]
    assert len({tuple(tokens) for tokens in found}) > 1
    assert all(len(tokens) <= 9 for tokens in found)
