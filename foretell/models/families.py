"""The model families that are served: their names in checkpoints, and what their configs leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A family of dense decoders. `hf_config` and `layer_config` read its traits from the config of a checkpoint."""

    title: str
    model_types: tuple[str, ...] = ()  # in config.json
    gguf: tuple[str, ...] = ()  # general.architecture
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' values of absent config.json entries
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # other defaults of some model types
    gguf_of: str = ""  # the family whose architecture its GGUF files state
    interleaved: bool = False  # GGUF files pair neighbouring dimensions for RoPE
    norm_offset: bool = False  # safetensors store norm weights minus one
    real: str = ""  # the model that was run with its real weights
    tested: str = ""  # what is compared with transformers, on tiny random models
    torch_on: tuple[str, ...] = ()  # device types where it runs in torch for want of kernels; see `fast_paths.py`


GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
FAMILIES = {
    "llama": Family(
        "Llama 2, 3.x, SmolLM2, Yi, InternLM 3, Mellum 4B, DeepSeek-R1-Distill-Llama and other Llama-shaped models",
        ("llama", "internlm3"),
        ("llama",),
        interleaved=True,
        real="smollm2-135m",
        tested="RoPE default, linear, llama3 and YaRN; biases; tied embeddings",
    ),
    "mistral": Family(
        "Mistral, Ministral 8B",
        ("mistral", "ministral"),
        defaults={"sliding_window": 4096},
        gguf_of="llama",
        tested="with and without a window",
    ),
    "ministral3": Family(
        "Ministral 3",
        ("ministral3",),
        ("mistral3",),
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        interleaved=True,
        tested="YaRN, queries scaled by position",
        torch_on=("cuda",),
    ),
    "qwen2": Family(
        "Qwen 2, 2.5, DeepSeek-R1-Distill-Qwen", ("qwen2",), ("qwen2",), tested="with and without a window"
    ),
    "qwen3": Family(
        "Qwen 3 (dense), text part of Qwen3-VL",
        ("qwen3", "qwen3_vl_text"),
        ("qwen3", "qwen3vl"),
        {"head_dim": 128},
        tested="tied and untied, biases, YaRN",
    ),
    "phi3": Family(
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        ("phi3",),
        ("phi3",),
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        tested="fused projections, LongRoPE, partial RoPE, window",
    ),
    "granite": Family(
        "Granite 3, dense Granite 4",
        ("granite", "granitemoehybrid"),
        ("granite",),
        {"max_position_embeddings": 2048},
        interleaved=True,
        tested="all multipliers; fused feed-forward of Granite 4",
    ),
    "gemma2": Family(
        "Gemma 2",
        ("gemma2",),
        ("gemma2",),
        GEMMA | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        norm_offset=True,
        tested="softcapping of scores and logits, alternating windows",
        torch_on=("cpu", "cuda"),
    ),
    "gemma3": Family(
        "Gemma 3, text part of its larger sizes",
        ("gemma3_text",),
        ("gemma3",),
        GEMMA | {"vocab_size": 262_208, "max_position_embeddings": 131_072},
        norm_offset=True,
        real="gemma3-270m",
        tested="sliding and full layers, both RoPEs",
    ),
    "gemma4": Family(
        "Gemma 4 (dense), text part of its checkpoints",
        ("gemma4_text", "gemma4_unified_text"),
        ("gemma4",),
        GEMMA
        | {
            "vocab_size": 262_144,
            "max_position_embeddings": 131_072,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "global_head_dim": 512,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                },
            },
        },
        variants={
            "gemma4_unified_text": {
                "max_position_embeddings": 262_144,
                "sliding_window": 1024,
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
            }
        },
        tested="per-layer inputs, shared keys and values, layers of different sizes, values that are keys",
        torch_on=("cpu", "cuda"),
    ),
    "smollm3": Family(
        "SmolLM3",
        ("smollm3",),
        ("smollm3",),
        {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
        interleaved=True,
        tested="layers without RoPE, stated and by interval",
    ),
    "olmo2": Family(
        "OLMo 2",
        ("olmo2",),
        ("olmo2",),
        {"rms_norm_eps": 1e-5},
        tested="norms after the layers, query and key norms over all heads",
        torch_on=("cuda",),
    ),
    "olmo3": Family(
        "OLMo 3",
        ("olmo3",),
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0},
        gguf_of="olmo2",
        tested="windows; YaRN on full layers only",
        torch_on=("cuda",),
    ),
    "exaone4": Family(
        "EXAONE 4",
        ("exaone4",),
        ("exaone4",),
        {"sliding_window": 4096},
        tested="full layers without RoPE, llama3 RoPE; without a window",
        torch_on=("cuda",),
    ),
    "seed_oss": Family(
        "Seed-OSS",
        ("seed_oss",),
        ("seed_oss",),
        {"head_dim": 128, "attention_bias": True},
        tested="biases of queries, keys and values",
    ),
}
BY_MODEL_TYPE = {name: key for key, family in FAMILIES.items() for name in family.model_types}
BY_GGUF = {name: key for key, family in FAMILIES.items() for name in family.gguf}

# Models for images and text, by model type: the prefixes of the tensors that text does not need. Those are the only
# ones that are skipped; any other tensor without a place is an error.
MULTIMODAL = {
    "gemma3": ("vision_tower.", "multi_modal_projector."),
    "mistral3": ("vision_tower.", "multi_modal_projector."),
    "gemma4": ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    "gemma4_unified": ("vision_embedder.", "embed_vision.", "embed_audio."),
    "qwen3_vl": ("visual.",),
}
DEFAULT_TEXT = {"mistral3": "mistral"}  # the model type of a text_config that states none; else MODEL_text


def family_table() -> list[tuple[str, str, str, str, str, str]]:
    """Return a row per family: title, formats, kernels on a CPU and on CUDA, real weights, and what is tested."""
    rows = []
    for family in FAMILIES.values():
        formats = "safetensors, GGUF" if family.gguf or family.gguf_of else "safetensors"
        cpu = "torch" if "cpu" in family.torch_on else "native"
        cuda = "torch" if "cuda" in family.torch_on else "Triton"
        rows.append((family.title, formats, cpu, cuda, family.real or "no", family.tested))
    return rows
