"""Model shapes add up to the published numbers of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import ForetellError
from foretell.plan.devices import catalog
from foretell.plan.model_shape import ExpertShape, find_model_shape, from_hf, plain_name
from tests.plan.deployments import LLAMA

PUBLISHED = {  # billions of weights, as published
    "llama-2-70b": 68.98,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.21,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.62,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "mistral-7b": 7.25,
    "mistral-nemo-12b": 12.25,
    "mistral-small-24b": 23.57,
    "mistral-large-123b": 122.6,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "gemma-2-9b": 9.24,
    "gemma-2-27b": 27.23,
    "gemma-3-1b": 1.0,
    "gemma-3-27b": 27.0,
    "smollm2-135m": 0.1345,
    "smollm2-360m": 0.3618,
    "smollm2-1.7b": 1.711,
    "phi-3-mini": 3.82,
    "phi-4": 14.66,
    "deepseek-v3": 671.0,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_weights_is_the_published_one(name: str) -> None:
    assert find_model_shape(name, "target").weights / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.parametrize(
    ("name", "active"),
    [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22.2), ("deepseek-v3", 37.6)],
)
def test_a_row_uses_a_part_of_a_mixture(name: str, active: float) -> None:
    shape = find_model_shape(name, "target")
    with_embeddings = shape.active_weights + shape.head_weights
    assert with_embeddings / 1e9 == pytest.approx(active, rel=0.02)
    assert shape.weights_read(1) == pytest.approx(shape.active_weights)
    assert shape.weights_read(1) < shape.weights_read(8) < shape.weights_read(512) < shape.weights


def test_the_number_of_active_experts_grows_with_rows() -> None:
    experts = ExpertShape(count=8, used=2, ffn=1)
    assert experts.active_experts(1) == pytest.approx(2)
    assert experts.active_experts(2) == pytest.approx(2 + 2 * 6 / 8)
    assert experts.active_experts(1000) == pytest.approx(8)


def test_kv_cache_values_per_token() -> None:
    assert find_model_shape("llama-3-8b", "target").kv_values_per_token == 32 * 2 * 8 * 128
    assert find_model_shape("deepseek-v3", "target").kv_values_per_token == 61 * (512 + 64)
    gemma = find_model_shape("gemma-3-1b", "target")  # 22 of 26 layers have a window of 512 tokens
    assert gemma.attended_tokens(8192) == 4 * 8192 + 22 * 512 and gemma.attended_tokens(100) == 26 * 100


def test_every_catalog_entry_is_complete() -> None:
    for name in catalog()["models"]:
        assert find_model_shape(name, "target").weights > 1e8, name


def test_a_config_agrees_with_the_catalog(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    for spec in (path, tmp_path):
        shape = find_model_shape(str(spec), "target")
        assert shape.weights == find_model_shape("llama-3.1-8b", "target").weights and shape.bits is None


CONFIGS: dict[str, tuple[dict[str, Any], float]] = {
    "gpt2": (
        {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
        0.124,
    ),
    "the text part of a vision model": (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": LLAMA}, 8.03,
    ),
    "a mixture": (
        LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "model_type": "mixtral"}, 46.7,
    ),
    "a mixture with dense first layers": (
        {
            "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840,
        },
        671.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_many_model_types(name: str) -> None:
    values, billions = CONFIGS[name]
    assert from_hf(name, values).weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_sliding_windows_and_quantization_of_a_config() -> None:
    assert from_hf("m", LLAMA | {"model_type": "mistral", "sliding_window": 4096}).windowed == 32
    assert from_hf("q", LLAMA | {"sliding_window": 4096, "use_sliding_window": False}).window is None
    layers = ["sliding_attention", "full_attention"] * 16
    assert from_hf("g", LLAMA | {"sliding_window": 512, "layer_types": layers}).windowed == 16
    assert from_hf("a", LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}).bits == 4
    assert from_hf("f", LLAMA | {"quantization_config": {"quant_method": "fp8"}}).bits == 8


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
    ],
)
def test_hugging_face_ids_are_found(spec: str, name: str) -> None:
    assert plain_name(spec) == name and find_model_shape(spec, "target").name == name


def test_built_in_names_and_gguf_files_are_found(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    assert find_model_shape("gemma3-270m", "draft").name == "gemma-3-270m"
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(2)
    writer.add_feed_forward_length(24)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tensor("token_embd.weight", np.zeros((48, 16), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = find_model_shape(str(path), "target")
    assert (shape.vocab, shape.layers, shape.kv_heads, shape.head_dim, shape.tied) == (48, 2, 2, 4, True)
    assert shape.bits == 16


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 8},
            "BertForMaskedLM is not a language",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is not a language model"),
        ({"model_type": "clip", "hidden_size": 8}, "clip is not a language model"),
        ({"image_size": 224}, "this is not a language model; give the config.json of a model that generates text"),
        (LLAMA | {"layer_types": ["linear_attention"] * 32}, "recurrent layers"),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "has no vocab_size"),
        (LLAMA | {"hidden_size": "wide"}, "it must be an integer"),
        ([1], "is not a model config"),
    ],
)
def test_models_that_are_not_generative_are_rejected(values: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ForetellError) as error:
        find_model_shape(str(path), "target")
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lama-3.1-8b", "did you mean 'llama-3.1-8b'"),
        ("nothing/like/it", "a config.json"),
        ("./none/config.json", "there is no ./none/config.json"),
        (" ", "is empty"),
    ],
)
def test_unknown_models_are_rejected_with_the_nearest_name(spec: str, words: str) -> None:
    with pytest.raises(ForetellError) as error:
        find_model_shape(spec, "target")
    assert words in str(error.value) and "target" in str(error.value)


KINDS = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text mixtral qwen3_moe olmoe deepseek_v3 gpt2 gpt_neox opt phi3 "
    "cohere falcon starcoder2 stablelm granite olmo2"
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.split())
def test_shapes_agree_with_transformers(kind: str) -> None:
    """Compare each model type with its default config on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(parameter.numel() for parameter in model.parameters())
    values = config.to_dict() | {"architectures": [type(model).__name__]}
    assert from_hf(kind, values).weights == pytest.approx(weights, rel=0.015)  # without learned position embeddings
