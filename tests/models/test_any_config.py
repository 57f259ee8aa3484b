"""Whatever stands in a config, it is read or refused in words."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import ModelError
from foretell.models.config import ModelConfig
from foretell.models.draft_heads.formats import HeadFile, layout_of
from foretell.models.hf_config import eos_token_ids, from_hf, read_config, sampling_defaults

from .checkpoints import GEMMA, LLAMA, folder, gguf, gguf_values

NUMBERS = st.one_of(st.integers(-3, 70), st.floats(-3, 70), st.sampled_from([float("nan"), float("inf"), 0.0, 1e30]))
LEAVES = st.one_of(NUMBERS, st.none(), st.booleans(), st.sampled_from(["", "yarn", "linear", "full_attention", "silu"]))
ROPES = st.dictionaries(
    st.sampled_from(
        [
            *("type", "rope_type", "factor", "rope_theta", "mscale", "mscale_all_dim", "truncate", "beta_fast"),
            *("short_factor", "long_factor", "partial_rotary_factor", "llama_4_scaling_beta"),
        ]
    ),
    st.one_of(LEAVES, st.lists(LEAVES, max_size=2)),
)
JUNK = st.one_of(LEAVES, st.lists(LEAVES, max_size=3), ROPES, st.dictionaries(st.just("full_attention"), ROPES))
HF_KEYS = st.sampled_from(
    [
        *GEMMA,
        *("rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window", "sliding_window_pattern"),
        *(
            "use_sliding_window",
            "max_window_layers",
            "architectures",
            "text_config",
            "eos_token_id",
            "tie_word_embeddings",
        ),
        *("original_max_position_embeddings", "hidden_act", "rms_norm_eps", "num_experts", "quantization_config"),
        *("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier", "vision_config"),
        *("num_kv_shared_layers", "global_head_dim", "hidden_size_per_layer_input", "per_layer_config"),
        *("attn_logit_softcapping", "no_rope_layers", "no_rope_layer_interval", "partial_rotary_factor"),
    ]
)
GGUF_KEYS = st.sampled_from(
    [
        *gguf_values("gemma3"),
        *(f"gemma3.attention.{key}" for key in ("key_length", "sliding_window", "sliding_window_pattern", "causal")),
        *(f"gemma3.rope.{key}" for key in ("freq_base", "scaling.type", "scaling.factor", "freq_base_swa")),
        *(f"gemma3.{key}" for key in ("rope.dimension_count", "logit_scale", "attn_logit_softcapping")),
        *("tokenizer.ggml.tokens", "tokenizer.ggml.eos_token_id", "general.sampling.temp", "general.type"),
    ]
)
LONGROPE = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 4.0]}
TYPES = (
    "qwen2",
    "mistral",
    "ministral3",
    "granite",
    "gemma2",
    "smollm3",
    "olmo3",
    "exaone4",
    "seed_oss",
    "gemma4_text",
)
ARCHS = st.sampled_from(["llama", "gemma3", "phi3", "granite", "gemma2", "mistral3", "olmo2", "exaone4"])
BASES = st.sampled_from(
    [
        LLAMA,
        GEMMA,
        *(LLAMA | {"model_type": name} for name in TYPES),
        LLAMA | {"model_type": "phi3", "rope_scaling": LONGROPE},
        {"model_type": "mistral3", "text_config": LLAMA},
    ]
)


@settings(max_examples=300, deadline=None)
@given(BASES, st.dictionaries(HF_KEYS, JUNK, min_size=1, max_size=3), st.dictionaries(HF_KEYS, JUNK, max_size=2))
def test_folder(base: dict[str, Any], change: dict[str, Any], generation: dict[str, Any]) -> None:
    read_or_refused(folder(base | change, generation=generation | {"do_sample": True}))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["llama", "gemma3", "phi3", "granite", "gemma2", "mistral3", "olmo2", "exaone4"]),
    st.dictionaries(GGUF_KEYS, JUNK, min_size=1, max_size=3),
)
def test_gguf(arch: str, change: dict[str, Any]) -> None:
    named = {key.replace("gemma3", arch): value for key, value in change.items()}
    read_or_refused(gguf(gguf_values(arch) | named))


GEMMA4 = gguf_values(
    "gemma4",
    attention__key_length=8,
    attention__key_length_swa=4,
    attention__sliding_window=8,
    attention__sliding_window_pattern=[True, False],
)
GEMMA4_KEYS = st.sampled_from(
    [
        *GEMMA4,
        *(f"gemma4.attention.{key}" for key in ("shared_kv_layers", "value_length", "value_length_swa")),
        *(f"gemma4.{key}" for key in ("embedding_length_per_layer_input", "final_logit_softcapping", "expert_count")),
        *(f"gemma4.rope.{key}" for key in ("freq_base", "freq_base_swa", "dimension_count", "dimension_count_swa")),
    ]
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(GEMMA4_KEYS, st.one_of(JUNK, st.lists(st.integers(1, 48), max_size=2)), min_size=1, max_size=3),
    st.sampled_from([None, "rope_freqs.weight", "per_layer_token_embd.weight", "blk.1.attn_v.weight"]),
)
def test_gguf_of_gemma4(change: dict[str, Any], extra: str | None) -> None:
    tensors = {"token_embd.weight": torch.zeros(48, 16)}
    read_or_refused(gguf(GEMMA4 | change, tensors | ({} if extra is None else {extra: torch.ones(4)})))


def test_gguf_of_gemma4_as_it_should_be() -> None:
    assert read_config(gguf(GEMMA4)).layer_sizes[1].head_dim == 8


TARGET = from_hf(LLAMA | {"model_type": "gemma4_text", "head_dim": 8, "hidden_size_per_layer_input": 0})
TEXT = LLAMA | {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
ASSISTANT = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 16,
    "text_config": TEXT | {"model_type": "gemma4_text"},
}
ASSISTANT_KEYS = st.sampled_from(
    [*ASSISTANT, "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k", "tie_word_embeddings"]
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(ASSISTANT_KEYS, JUNK, max_size=2), st.dictionaries(HF_KEYS, JUNK, max_size=2))
def test_assistant(change: dict[str, Any], text: dict[str, Any]) -> None:
    config = ASSISTANT | {"text_config": ASSISTANT["text_config"] | text} | change  # type: ignore[operator]
    try:
        layout_of(HeadFile.of("folder", config, {}, TARGET))
    except ModelError as error:
        assert "\n" not in str(error)


def read_or_refused(checkpoint: Any) -> None:
    try:
        assert isinstance(read_config(checkpoint), ModelConfig)
        eos_token_ids(checkpoint)
        sampling_defaults(checkpoint)
    except ModelError as error:
        assert "\n" not in str(error)
