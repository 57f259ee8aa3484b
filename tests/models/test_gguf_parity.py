"""A model as a GGUF file is the model as a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretell.hub import open_checkpoint
from foretell.models.families import BY_GGUF
from foretell.models.load import load_model

from . import families, test_multimodal
from .gguf_files import ARCHS, llama3_factors, write_gguf
from .running import Reader, gap, greedy, logits

NAMES = (
    "llama",
    "llama tied, with biases",
    "llama, heads of another size",
    "linear",
    "yarn",
    "mistral, sliding",
    "qwen2",
    "qwen3",
    "gemma3",
    "gemma3, stretched, untied",
    "internlm3",
    "phi3",
    "phi3, short factors",
    "phi3, long factors",
    "granite",
    "granite 4",
    "granite 4, no RoPE",
    "gemma2",
    "gemma4",
    "gemma4, values are keys",
    "gemma4 unified",
    "smollm3",
    "olmo2",
    "olmo3",
    "exaone4",
    "exaone4, no window",
    "seed_oss",
    "ministral3",
)


@pytest.mark.parametrize("name", NAMES)
def test_same_weights_and_logits(name: str, tmp_path: Path) -> None:
    model, tokens = families.make(name), families.text()
    if name.startswith(("gemma2", "gemma3")):
        scale_as_llama_cpp(model)
    model.save_pretrained(tmp_path / "folder")
    write_gguf(model, tmp_path / "file.gguf")
    folder = load_model(open_checkpoint(tmp_path / "folder"))
    file = load_model(open_checkpoint(tmp_path / "file.gguf"))
    assert same_weights(folder, file)
    reader = Reader(file)
    assert gap(logits(reader, tokens), families.theirs(model, tokens)) < 2e-5
    assert greedy(reader, tokens, 8) == families.their_text(model, tokens, 8)
    same = replace(file.config, norm_eps=folder.config.norm_eps)  # a float32 in the file
    assert not name.startswith("gemma4") or folder.config == same, "its layers differ in many ways"


def test_the_text_of_qwen3_vl(tmp_path: Path) -> None:
    """As llama.cpp's converter writes it: the text in a file of its own, with the sections of its RoPE."""
    model, tokens = test_multimodal.make_random("qwen3_vl"), families.text(vocab=90)
    config = model.config.get_text_config()
    config.tie_word_embeddings = True
    weights = {
        name.replace("language_model.", ""): values
        for name, values in model.state_dict().items()
        if "visual" not in name
    }
    text = SimpleNamespace(config=config, state_dict=lambda: weights)
    model.save_pretrained(tmp_path / "folder")
    write_gguf(text, tmp_path / "file.gguf")
    folder, file = (load_model(open_checkpoint(tmp_path / name)) for name in ("folder", "file.gguf"))
    assert same_weights(folder, file)
    reader = Reader(file)
    assert gap(logits(reader, tokens), families.theirs(model, tokens)) < 2e-5
    assert greedy(reader, tokens, 8) == families.their_text(model, tokens, 8)


def test_every_architecture_of_the_table_is_compared() -> None:
    assert {*ARCHS.values()} == BY_GGUF.keys()
    assert {families.MODELS[name][1].model_type for name in NAMES} >= ARCHS.keys() - {"qwen3_vl_text"}


def test_llama3_stretching_as_a_tensor(tmp_path: Path) -> None:
    model, tokens = families.make("llama3"), families.text()
    factors = llama3_factors(families.LLAMA3, 16)
    assert 1 in factors and 8 in factors and len(set(factors)) > 2, "short, long and blended waves"
    write_gguf(model, tmp_path / "file.gguf", {"rope_freqs.weight": factors})
    reader = Reader(load_model(open_checkpoint(tmp_path / "file.gguf")))
    assert gap(logits(reader, tokens), families.theirs(model, tokens)) < 2e-5
    assert greedy(reader, tokens, 8) == families.their_text(model, tokens, 8)


def scale_as_llama_cpp(model: families.Model) -> None:
    """GGUF files do not carry Gemma's score scale; all but one size use the head's."""
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5
    model.config.query_pre_attn_scalar = model.config.head_dim


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
