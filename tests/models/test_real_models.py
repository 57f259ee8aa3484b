"""The two models that can be fetched, against transformers in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from foretell.hub import Checkpoint, open_checkpoint, resolve
from foretell.models.load import load_model

from .families import Model, theirs
from .gguf_files import read_gguf
from .running import Reader, gap, greedy, logits

WORDS = "The sun rises in the east and sets in the west because the Earth turns once a day on its own"


@dataclass(frozen=True)
class Real:
    """A model and what its card says of it."""

    space: str  # how its vocabulary writes a space before a word
    start: tuple[int, ...]
    kind: Model
    config: Any


REAL = {
    "smollm2-135m": Real(
        "Ġ",
        (),
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            rms_norm_eps=1e-5,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=True,
        ),
    ),
    "gemma3-270m": Real(
        "▁",
        (2,),
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            sliding_window=512,
            max_position_embeddings=32768,
        ),
    ),
}


@pytest.mark.weights
@pytest.mark.parametrize("name", REAL)
def test_same_as_transformers(name: str) -> None:
    real, checkpoint = REAL[name], open_checkpoint(resolve(name))
    tokens = ids(checkpoint, real)
    model = read_gguf(checkpoint, real.kind, real.config)
    expected, continuation = theirs(model, tokens), continued(model, tokens)
    del model  # so that only one of the two is in memory
    reader = Reader(load_model(checkpoint))
    for piece in (None, 7):
        assert gap(logits(reader, tokens, piece), expected) < 2e-5
    assert greedy(reader, tokens, len(continuation)) == continuation


def ids(checkpoint: Checkpoint, real: Real) -> list[int]:
    vocabulary = checkpoint.config["tokenizer.ggml.tokens"]
    return [*real.start, *(vocabulary.index(real.space + word) for word in WORDS.split())]


def continued(model: Model, tokens: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None
    written = model.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False)
    result: list[int] = written[0, len(tokens) :].tolist()
    return result
