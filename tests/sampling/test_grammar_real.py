"""Grammars over a real vocabulary."""

from __future__ import annotations

import json
import random
import time
from functools import cache

import pytest
import torch

from foretell.hub import open_checkpoint, resolve
from foretell.sampling.grammar import GrammarCompiler
from foretell.structured_output import GrammarSpec
from foretell.tokenizer import Tokenizer
from foretell.types import Draft
from tests.sampling.grammars import EXAMPLES, PERSON, is_person, text_of, write

pytestmark = pytest.mark.weights
MODELS = ["smollm2-135m", "gemma3-270m"]
NAMES = [name for name in EXAMPLES if name != "special token"]  # each model has other names for them


@cache
def reader(model: str) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(resolve(model)).config)


@cache
def compiler(model: str) -> GrammarCompiler:
    return GrammarCompiler(reader(model), reader(model).vocab_size + 64)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_output_under_the_masks_matches_the_grammar(model: str, name: str) -> None:
    for seed in range(3):
        follower = compiler(model).compile(EXAMPLES[name].spec).matcher(reader(model).end_ids)
        tokens = write(reader(model), follower, random.Random(seed))
        assert follower.finished
        assert EXAMPLES[name].is_valid(text_of(reader(model), tokens))


@pytest.mark.parametrize("model", MODELS)
def test_an_output_of_the_model_is_followed_and_forced_where_possible(model: str) -> None:
    grammar = compiler(model).compile(GrammarSpec.json_schema(PERSON, any_whitespace=False))
    text = json.dumps({"name": "Zoë 😀", "age": 36, "tags": ["red", "blue"]}, ensure_ascii=False)
    assert is_person(text)
    tokens = [*reader(model).encode(text, add_special=False), min(reader(model).end_ids)]
    follower = grammar.matcher(reader(model).end_ids)
    forced = 0
    while tokens:
        run = follower.forced_tokens(8)
        assert tokens[: len(run)] == run
        taken = max(1, len(run))
        forced += len(run)
        assert follower.advance(tokens[:taken]) == taken
        del tokens[:taken]
    assert follower.finished and forced >= 4


def test_a_mask_is_made_in_far_less_than_a_millisecond() -> None:
    torch.set_num_threads(1)
    grammar = compiler("smollm2-135m").compile(GrammarSpec.json_schema(PERSON))
    tokens = reader("smollm2-135m").encode('{"name": "Ada", "age": 36, "tags": ["red"]', add_special=False)
    times = []
    for _ in range(20):
        follower, start = grammar.matcher([2]), time.perf_counter()
        follower.masks(Draft.chain(tokens))
        times.append((time.perf_counter() - start) / (len(tokens) + 1))
    assert min(times) < 500e-6
