"""Whatever stands in a config, it is read or refused in words."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import ModelError
from foretell.models.config import ModelConfig
from foretell.models.hf_config import eos_token_ids, read_config, sampling_defaults

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


def read_or_refused(checkpoint: Any) -> None:
    try:
        assert isinstance(read_config(checkpoint), ModelConfig)
        eos_token_ids(checkpoint)
        sampling_defaults(checkpoint)
    except ModelError as error:
        assert "\n" not in str(error)
