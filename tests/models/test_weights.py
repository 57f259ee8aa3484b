"""Every tensor is used, every parameter is filled once, or the error names the tensor."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from foretell.errors import ModelError, UnsupportedModelError
from foretell.hub import Checkpoint, LazyTensor, open_checkpoint
from foretell.models.checkpoint_tensors import text_tensors
from foretell.models.decoder import Decoder
from foretell.models.hf_config import from_hf
from foretell.models.load import load_model, materialize, meta_model
from foretell.models.weights import map_parameters
from tests.hub.files import encoded, write_gguf

from . import families
from .checkpoints import GEMMA, GGUF, LLAMA, folder, gguf, lazies
from .families import MODELS

Q = "model.layers.1.self_attn.q_proj.weight"


def empty(config: Any) -> Decoder:
    return materialize(meta_model(from_hf(config), torch.float32), torch.device("cpu"))


def tensors_for(config: dict[str, Any], is_gguf: bool = False) -> dict[str, torch.Tensor]:
    decoder = empty(config)
    prefix = "" if is_gguf else "model."
    return {f"{prefix}{name}": torch.randn(slot.rows.shape) for name, slot in map_parameters(decoder, is_gguf).items()}


@pytest.mark.parametrize("is_gguf", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_slots_cover_every_parameter_once(name: str, is_gguf: bool) -> None:
    decoder = empty(MODELS[name][1].to_dict())
    if is_gguf and decoder.config.layer_sizes:
        pytest.skip("GGUF files of Gemma 4 are not read")
    for parameter in decoder.parameters():
        parameter.zero_()
    for slot in map_parameters(decoder, is_gguf).values():
        slot.rows.add_(1)
    assert all((parameter == 1).all() for parameter in decoder.parameters())


def test_names_are_transformers_own() -> None:
    for name in MODELS:
        model = families.make(name)
        decoder = empty(model.config.to_dict())
        lazy = folder(model.config.to_dict(), dict(model.state_dict()))
        theirs = {name for name, _ in text_tensors(lazy, decoder.config)}
        tied = {"lm_head.weight"} if decoder.config.tied else set()
        assert theirs - tied == map_parameters(decoder, False).keys()


@pytest.mark.parametrize("name", list(tensors_for(LLAMA)))
def test_missing_tensor(name: str) -> None:
    tensors = tensors_for(LLAMA)
    del tensors[name]
    fails(LLAMA, tensors, name.removeprefix("model."), "missing")


@pytest.mark.parametrize("name", ["model.layers.2.input_layernorm.weight", Q.replace("weight", "bias"), "visual.proj"])
def test_tensor_without_a_place(name: str) -> None:
    fails(LLAMA, tensors_for(LLAMA) | {name: torch.zeros(16)}, name, "does not belong")


def test_adapter() -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(UnsupportedModelError, match="adapter"):
        load_model(folder(LLAMA, tensors_for(LLAMA) | {name: torch.zeros(2, 16)}))


@pytest.mark.parametrize("shape", [(16, 8), (8, 16), (16,), (32, 16)])
def test_wrong_shape(shape: tuple[int, ...]) -> None:
    fails(LLAMA, tensors_for(LLAMA) | {Q: torch.zeros(shape)}, Q, "[16, 16]")


PHI = LLAMA | {"model_type": "phi3"}
PHI_QKV, PHI_UP = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"


def phi_tensors() -> dict[str, torch.Tensor]:
    return {f"model.{n}" if n != "lm_head.weight" else n: v for n, v in fused(tensors_for(PHI)).items()}


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with the projections of each layer stacked, as Phi-3 stores them."""
    found = dict(tensors)
    for layer in range(2):
        first = f"model.layers.{layer}."
        parts = [found.pop(f"{first}self_attn.{name}_proj.weight") for name in "qkv"]
        found[f"{first}self_attn.qkv_proj.weight"] = torch.cat(parts)
        parts = [found.pop(f"{first}mlp.{name}_proj.weight") for name in ("gate", "up")]
        found[f"{first}mlp.gate_up_proj.weight"] = torch.cat(parts)
    return {name.removeprefix("model."): values for name, values in found.items()}


def test_fused_tensors_are_named_in_errors() -> None:
    load_model(folder(PHI, phi_tensors()))
    fails(PHI, phi_tensors() | {PHI_QKV: torch.zeros(31, 16)}, PHI_QKV, "[31, 16]", "requires [32, 16]")
    fails(PHI, phi_tensors() | {PHI_UP: torch.zeros(48, 15)}, PHI_UP)
    fails(
        PHI, {name: each for name, each in phi_tensors().items() if name != PHI_QKV}, PHI_QKV[6:], "missing", "1 in all"
    )
    fails(PHI, phi_tensors() | {"model.layers.1.self_attn.q_proj.weight": torch.zeros(16, 16)}, "twice")
    fails(PHI, phi_tensors() | {PHI_QKV: spoiled(torch.zeros(32, 16), 300, BAD[0])}, PHI_QKV, "damaged")


def test_keys_that_a_layer_shares_may_be_stored_and_no_others() -> None:
    config, model = MODELS["gemma4"][1].to_dict(), families.make("gemma4")
    tensors = dict(model.state_dict())
    tensors.pop("lm_head.weight")
    shared, own = "model.layers.4.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.bias"
    load_model(folder(config, tensors | {shared: torch.zeros(16, 32)}))
    fails(config, tensors | {own: torch.zeros(16)}, own, "does not belong")


def test_same_tensor_under_two_names() -> None:
    other = Q.removeprefix("model.")
    fails(LLAMA, tensors_for(LLAMA) | {other: torch.zeros(16, 16)}, other, "twice")


def test_turns_are_spare() -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    load_model(folder(LLAMA, tensors_for(LLAMA) | extra))


def test_an_output_layer_stored_next_to_its_embedding() -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    tensors = tensors_for(tied)
    embedding = tensors["model.embed_tokens.weight"]
    decoder = load_model(folder(tied, {"lm_head.weight": embedding.clone()} | tensors))
    assert decoder.head.weight is decoder.embed
    fails(tied, tensors | {"lm_head.weight": embedding + 1}, "lm_head.weight", "differs")


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_other_wrappings(prefix: str) -> None:
    tensors = tensors_for(GEMMA)
    wrapped = {prefix + name.removeprefix("model."): values for name, values in tensors.items()}
    plain, other = load_model(folder(GEMMA, tensors)), load_model(folder(GEMMA, wrapped))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))


def test_gguf_turns_without_a_reader() -> None:
    values = {key.replace("llama", "qwen2"): value for key, value in GGUF.items()} | {"general.architecture": "qwen2"}
    tensors = {"token_embd.weight": torch.zeros(48, 16), "rope_freqs.weight": torch.ones(2)}
    with pytest.raises(ModelError, match="rope_freqs.weight"):
        load_model(gguf(values, tensors))


def test_gguf_without_embedding() -> None:
    with pytest.raises(ModelError, match="token_embd.weight"):
        load_model(gguf(GGUF, {"output.weight": torch.zeros(48, 16)}))


BAD = (float("nan"), float("inf"), -float("inf"))


def spoiled(values: torch.Tensor, place: int, value: float) -> torch.Tensor:
    values.view(-1)[place] = value
    return values


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 77, -1])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_damaged_values(bad: float, place: int, stored: torch.dtype, dtype: str) -> None:
    tensors = tensors_for(LLAMA)
    tensors[Q] = spoiled(tensors[Q].to(stored), place, bad)
    with pytest.raises(ModelError) as caught:
        load_model(folder(LLAMA, tensors), dtype)
    damage = "has values that are not finite: the file is damaged; download it again"
    assert str(caught.value) == f"folder: tensor {Q!r} {damage}"


@pytest.mark.parametrize("name", list(tensors_for(GEMMA))[:12])
def test_damage_anywhere(name: str) -> None:
    tensors = tensors_for(GEMMA)
    spoiled(tensors[name], -1, BAD[0])
    fails(GEMMA, tensors, name, "damaged")


def test_a_damaged_output_layer_next_to_its_embedding() -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    tensors = tensors_for(tied)
    head = spoiled(tensors["model.embed_tokens.weight"].clone(), 5, BAD[0])
    fails(tied, tensors | {"lm_head.weight": head}, "lm_head.weight", "damaged")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_bytes_lost_from_a_gguf_file(tmp_path: Path, kind: Kind) -> None:
    """A stretch of ones, as a failing disk leaves them."""
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (encoded(kind, rows=24, columns=32), kind)})
    path.write_bytes(path.read_bytes()[:-400] + b"\xff" * 400)
    config = GGUF | {"llama.embedding_length": 32}
    tensors = lazies(tensors_for(LLAMA | {"hidden_size": 32}, is_gguf=True))
    whole = Checkpoint(path, "gguf", config, {}, {}, tensors)
    load_model(whole)
    with pytest.raises(ModelError, match=f"{path}: tensor 'blk.0.ffn_up.weight' .* damaged"):
        load_model(replace(whole, lazy_tensors=tensors | open_checkpoint(path).lazy_tensors))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_values_are_no_damage(dtype: str) -> None:
    """Their sum would be too large for the type, they are not."""
    tensors = tensors_for(LLAMA)
    tensors[Q].fill_(torch.finfo(getattr(torch, dtype)).max)
    assert load_model(folder(LLAMA, tensors), dtype).blocks[1].attention.qkv.weight[:16].equal(tensors[Q])


def test_values_too_large_for_the_type() -> None:
    tensors = tensors_for(LLAMA)
    spoiled(tensors[Q], 3, 1e5)
    with pytest.raises(ModelError, match="too large for float16; set dtype to float32"):
        load_model(folder(LLAMA, tensors), "float16")


def test_errors_come_before_the_reading() -> None:
    def read() -> torch.Tensor:
        raise AssertionError("read before all were checked")

    shapes = {name: values.shape for name, values in tensors_for(LLAMA).items()} | {"model.norm.weight": (15,)}
    tensors = {name: LazyTensor(name, tuple(shape), read) for name, shape in shapes.items()}
    with pytest.raises(ModelError, match="model.norm.weight"):
        load_model(Checkpoint(Path("folder"), "folder", LLAMA, {}, {}, tensors))


def fails(config: dict[str, Any], tensors: dict[str, torch.Tensor], *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(folder(config, tensors))
    assert all(re.search(re.escape(word), str(caught.value)) for word in words)
