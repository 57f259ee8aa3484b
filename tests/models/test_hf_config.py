"""Configs in each style are read as transformers and llama.cpp read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from foretell.errors import ModelError
from foretell.models.config import ModelConfig, Rope
from foretell.models.hf_config import eos_token_ids, from_hf, read_config, sampling_defaults

from .checkpoints import GEMMA, GGUF, LLAMA, folder, gguf, gguf_values

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLDER = [
    LLAMA | {"rope_theta": 500_000.0},
    LLAMA | {"rope_theta": 500_000.0, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}},
    LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
    LLAMA | {"model_type": "mistral"},
    LLAMA | {"model_type": "mistral", "sliding_window": None},
    LLAMA | {"model_type": "mistral", "sliding_window": 9, "head_dim": 8},
    LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1},
    LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    LLAMA | {"model_type": "qwen3", "head_dim": 8, "rope_theta": 1_000_000},
    LLAMA | {"model_type": "qwen3"},
    GEMMA,
    {key: value for key, value in GEMMA.items() if key != "head_dim"},
    GEMMA | {"sliding_window_pattern": 3},
    GEMMA | {"rope_theta": 1e5, "rope_local_base_freq": 1e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
]


@pytest.mark.parametrize("config", OLDER)
def test_older_and_newer_style_are_one(config: dict[str, Any]) -> None:
    newer = AutoConfig.for_model(**config).to_dict()
    assert "rope_theta" not in newer and "rope_parameters" in newer
    assert from_hf(newer) == from_hf(config)


def test_sizes() -> None:
    config = from_hf(LLAMA | {"rms_norm_eps": 1e-4, "num_key_value_heads": None})
    assert config == ModelConfig(
        vocab=48, width=16, layers=2, heads=4, kv_heads=4, head_dim=4, ffn=24, context=64, norm_eps=1e-4, tied=False
    )


def test_gemma() -> None:
    config = from_hf(GEMMA | {"query_pre_attn_scalar": 16})
    assert config.windows == (8, 8, 8, 8, 8, None, 8)
    assert (config.embed_scale, config.scale, config.tied) == (4.0, 0.25, True)
    assert (config.sandwich_norms, config.qk_norm, config.activation) == (True, True, "gelu_tanh")
    assert {rope.theta for rope, window in zip(config.ropes, config.windows, strict=True) if window} == {10_000.0}
    assert config.ropes[5].theta == 1_000_000.0


def test_gemma_wrapper_without_vision() -> None:
    assert from_hf({"model_type": "gemma3", "text_config": GEMMA}) == from_hf(GEMMA)


def test_the_text_of_mistral_3_is_mistral_unless_it_says_otherwise() -> None:
    text = LLAMA | {"model_type": "mistral", "sliding_window": None}
    stated, silent = ({"model_type": "mistral3", "text_config": each} for each in (text, without_type(text)))
    assert from_hf(silent) == from_hf(stated) and from_hf(silent).family == "mistral"
    theirs = AutoConfig.for_model("mistral3", text_config=without_type(text)).text_config
    assert theirs.model_type == "mistral"


def without_type(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "model_type"}


TYING = [(outer, inner) for outer in (None, True, False) for inner in (None, True, False)]


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize(("outer", "inner"), TYING)
@pytest.mark.parametrize(("name", "text"), [("gemma3", GEMMA), ("mistral3", LLAMA | {"model_type": "mistral"})])
def test_only_the_outer_config_says_whether_the_embedding_is_tied(
    name: str, text: dict[str, Any], outer: bool | None, inner: bool | None, has_head: bool
) -> None:
    """As in transformers, where the value of text_config changes nothing. A head that is there is used."""
    config = {"model_type": name, "text_config": text | ({} if inner is None else {"tie_word_embeddings": inner})}
    config |= {} if outer is None else {"tie_word_embeddings": outer}
    theirs = AutoConfig.for_model(**config).tie_word_embeddings
    ours = from_hf(config, lambda: has_head).tied
    assert ours == (theirs if outer is not None or not has_head else False)


def test_stated_layer_types() -> None:
    sliding = LLAMA | {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 5, "head_dim": 4}
    assert from_hf(sliding | {"layer_types": ["sliding_attention", "full_attention"]}).windows == (5, None)


def test_yarn_stretches_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert from_hf(LLAMA | {"rope_scaling": yarn}).context == 256
    assert from_hf(LLAMA | {"rope_scaling": yarn | {"original_max_position_embeddings": 16}}).context == 64


def test_dynamic_rope_is_the_default_within_the_context() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 6.0}
    assert from_hf(LLAMA | {"model_type": "internlm3", "rope_scaling": dynamic}).ropes == (Rope(), Rope())


def test_no_entry_of_a_multimodal_config_is_needed_that_transformers_has_a_default_for() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    stated = text | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = from_hf({"model_type": "gemma3", "text_config": stated, "vision_config": {"hidden_size": 1152}})
    assert (config.vocab, config.heads, config.kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.windows.count(1024) == 29 and config.tied and config.context == 131_072
    assert {rope.kind for rope in config.ropes} == {"default", "linear"}


def test_a_multimodal_embedding_is_tied_unless_there_is_a_head() -> None:
    mistral = {"model_type": "mistral3", "text_config": LLAMA | {"model_type": "mistral"}}
    assert from_hf(mistral).tied and not from_hf(mistral, lambda: True).tied
    assert from_hf(mistral | {"tie_word_embeddings": True}, has_head=True).tied


def test_gemma4_layers() -> None:
    text = {"model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 10}
    stated = text | {"num_key_value_heads": 1, "num_kv_shared_layers": 4, "use_double_wide_mlp": True}
    config = from_hf({"model_type": "gemma4", "text_config": stated, "audio_config": {"hidden_size": 8}})
    assert [each.head_dim for each in config.layer_sizes] == [256] * 5 + [512] + [256] * 3 + [512]
    assert [each.kv_layer for each in config.layer_sizes] == [None] * 6 + [4, 4, 4, 5]
    assert [each.ffn for each in config.layer_sizes] == [6144] * 6 + [12288] * 4
    assert (config.per_layer_width, config.scale, config.windows[5], config.windows[9]) == (256, 1.0, None, None)
    assert config.ropes[9].factors == (1.0,) * 64 + (float("inf"),) * 192 and config.windows.count(512) == 8
    with pytest.raises(ModelError, match="num_kv_shared_layers"):
        from_hf(stated | {"num_kv_shared_layers": 5})


def test_null_is_none_where_it_means_none() -> None:
    gemma = LLAMA | {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": None}
    assert (from_hf(gemma).logit_softcap, from_hf(gemma).attention_softcap) == (30.0, 50.0)
    assert from_hf(gemma | {"final_logit_softcapping": None}).logit_softcap is None
    assert from_hf(LLAMA | {"model_type": "ministral3", "rope_parameters": None}).ropes[0].kind == "yarn"


def test_exaone_pattern_by_letters() -> None:
    exaone = LLAMA | {"model_type": "exaone4", "num_hidden_layers": 8, "sliding_window_pattern": "LLLG"}
    config = from_hf(exaone | {"sliding_window": 5})
    assert config.windows == (5, 5, 5, None) * 2
    assert [rope.kind for rope in config.ropes] == ["default", "default", "default", "none"] * 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "long_factor": [1.0, 2.0]}}, "short_factor"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0]}}, "short_factor"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.7, "head_dim": 10}, "partial_rotary_factor"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -16}, "hidden_size"),
        ({"hidden_size": 18}, "head_dim"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 5}, "head dimension"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"model_type": 3}, "model_type"),
        ({"model_type": None}, "no model_type"),
    ],
)
def test_nonsense_names_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError, match=field):
        from_hf(LLAMA | change)


@pytest.mark.parametrize("key", [key for key in GGUF if key != "llama.attention.head_count_kv"])
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        read_config(gguf({name: value for name, value in GGUF.items() if name != key}))


def test_gguf_sizes() -> None:
    config = read_config(gguf(GGUF))
    assert config == ModelConfig(vocab=48, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24, context=64)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope__freq_base": 500.0}, Rope(500.0)),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, Rope()),
        ({"rope__scaling__factor": 4.0}, Rope(kind="linear", factor=4.0)),
        ({"rope__scale_linear": 2.0}, Rope(kind="linear", factor=2.0)),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, Rope(kind="linear", factor=4.0)),
    ],
)
def test_gguf_ropes(keys: dict[str, Any], rope: Rope) -> None:
    assert read_config(gguf(gguf_values("llama", **keys))).ropes == (rope, rope)


def test_gguf_yarn() -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.5, "yarn_beta_fast": 16.0}
    values = gguf_values("qwen2", **{f"rope__scaling__{key}": value for key, value in keys.items()})
    config = read_config(gguf(values))
    assert config.ropes[0] == Rope(10_000.0, "yarn", 4.0, 32, beta_fast=16.0, attention_factor=0.5 * 1.1386294361119891)
    assert config.context == 128


def test_gguf_gemma() -> None:
    config = read_config(gguf(gguf_values("gemma3", block_count=7, attention__sliding_window=8, rope__freq_base=1e6)))
    assert config.windows == (8, 8, 8, 8, 8, None, 8)
    assert [rope.theta for rope in config.ropes] == [1e4] * 5 + [1e6, 1e4]
    assert (config.scale, config.embed_scale, config.activation) == (0.5, 4.0, "gelu_tanh")
    largest = read_config(gguf(gguf_values("gemma3", block_count=62, attention__key_length=8)))
    assert largest.scale == 0.5, "by width / heads, not by the head's 8"


@pytest.mark.parametrize("pattern", [2, [True, False]])
def test_gguf_windows(pattern: Any) -> None:
    values = gguf_values("llama", attention__sliding_window=8, attention__sliding_window_pattern=pattern)
    assert read_config(gguf(values)).windows == (8, None)


def test_gguf_wrong_pattern() -> None:
    values = gguf_values("llama", attention__sliding_window=8, attention__sliding_window_pattern=[True])
    with pytest.raises(ModelError, match="sliding_window_pattern"):
        read_config(gguf(values))


def test_gguf_rope_factors() -> None:
    tensors = {"token_embd.weight": torch.zeros(48, 16), "rope_freqs.weight": torch.tensor([1.0, 8.0])}
    assert read_config(gguf(GGUF, tensors)).ropes[0].factors == (1.0, 8.0)
    with pytest.raises(ModelError, match="rope_freqs.weight"):
        read_config(gguf(GGUF, tensors | {"rope_freqs.weight": torch.tensor([1.0])}))


def test_end_ids() -> None:
    assert eos_token_ids(folder({"eos_token_id": 2}, generation={"eos_token_id": [3, 4]})) == {2, 3, 4}
    assert eos_token_ids(folder({"eos_token_id": None})) == frozenset()
    tokens = ["a", "<|im_end|>", "b", "<end_of_turn>", "c", "d"]
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 5}
    assert eos_token_ids(gguf(values)) == {1, 3, 4, 5}


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
        ),
        ({"do_sample": True, "temperature": -1, "top_k": 2.5, "top_p": 0, "min_p": True}, {"temperature": 1.0}),
    ],
)
def test_sampling_defaults(generation: dict[str, Any], defaults: dict[str, Any]) -> None:
    assert sampling_defaults(folder({}, generation=generation)) == defaults


def test_gguf_sampling_defaults() -> None:
    values = {"general.sampling.temp": 0.7, "general.sampling.top_k": 40, "general.sampling.top_p": 1.5}
    assert sampling_defaults(gguf(values)) == {"temperature": 0.7, "top_k": 40}
    assert sampling_defaults(gguf({})) == {}
