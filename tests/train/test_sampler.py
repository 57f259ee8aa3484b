"""The sampler writes what the engine writes."""

from __future__ import annotations

from foretell.train.sampler import GenerationRequest, Sampler
from tests.tiny import CONTEXT, PROMPTS, generate, tiny_decoder


def test_greedy_texts_are_the_engines() -> None:
    wanted = generate()
    sampler = Sampler(tiny_decoder(), 3, CONTEXT, frozenset({0}), 0)  # fewer slots than texts: they are used again
    wishes = [GenerationRequest(i, list(prompt), 0.0, 24) for i, prompt in enumerate(PROMPTS)]
    found = {wish.index: tokens for wish, tokens in sampler.generate(wishes)}
    assert [found[i] for i in range(len(PROMPTS))] == wanted


def test_a_temperature_draws_and_a_limit_holds() -> None:
    sampler = Sampler(tiny_decoder(), 4, CONTEXT, frozenset({0}), 0)
    found = [tokens for _, tokens in sampler.generate([GenerationRequest(i, [1, 2, 3], 5.0, 9) for i in range(4)])]
    assert len({tuple(tokens) for tokens in found}) > 1
    assert all(len(tokens) <= 9 for tokens in found)
