"""What is not served is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3_5Config, Qwen3_5MoeConfig, Qwen3_5TextConfig

from foretell.errors import UnsupportedModelError
from foretell.models.hf_config import read_config

from .checkpoints import GEMMA, LLAMA, folder, gguf, gguf_values

EXPERTS, RECURRENT, VISION = "mixture-of-experts", "recurrent or hybrid", "vision or audio"
TYPES = {
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "deepseek_v3": EXPERTS,
    "gpt_oss": EXPERTS,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "jamba": RECURRENT,
    "rwkv": RECURRENT,
    "qwen3_next": RECURRENT,
    "falcon_h1": RECURRENT,
    "lfm2": RECURRENT,
    "recurrent_gemma": RECURRENT,
    "qwen2_vl": VISION,
    "qwen2_5_vl": VISION,
    "llava": VISION,
    "whisper": VISION,
    "gemma3n": VISION,
    "gemma4_assistant": "--drafter assistant:FOLDER",
    "diffusion_gemma": "diffusion_gemma",
    "t5": "encoder",
    "bart": "encoder",
    "modernbert": "encoder",
    "granitemoehybrid": RECURRENT,
    "qwen4": "did you mean 'qwen",
    "gpt2": "known: ",
}
FIELDS: list[tuple[dict[str, Any], str]] = [
    (LLAMA | {"num_local_experts": 8}, EXPERTS),
    (LLAMA | {"n_routed_experts": 64}, EXPERTS),
    (LLAMA | {"layer_types": ["linear_attention", "full_attention"]}, RECURRENT),
    (LLAMA | {"layer_types": ["conv", "full_attention"]}, RECURRENT),
    (LLAMA | {"layer_types": ["chunked_attention", "full_attention"]}, "'chunked_attention'"),
    (LLAMA | {"vision_config": {"hidden_size": 4}}, VISION),
    (LLAMA | {"audio_config": {"hidden_size": 4}}, VISION),
    (LLAMA | {"architectures": ["LlavaForConditionalGeneration"]}, VISION),
    (LLAMA | {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, RECURRENT),
    (LLAMA | {"model_type": "granitemoehybrid", "num_local_experts": 8, "layer_types": ["attention"] * 2}, EXPERTS),
    (LLAMA | {"model_type": "mellum", "num_experts": 8}, EXPERTS),
    ({"model_type": "gemma4", "text_config": LLAMA | {"model_type": "gemma4_text", "enable_moe_block": True}}, EXPERTS),
    (LLAMA | {"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "bidirectional"),
    ({"model_type": "mistral3", "text_config": LLAMA | {"num_experts": 8}}, EXPERTS),
    ({"model_type": "mistral3", "text_config": LLAMA | {"model_type": "gpt2"}}, "known: "),
    (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, "'hqq' of this checkpoint is not supported"),
    (LLAMA | {"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "'gemv'"),
    (LLAMA | {"quantization": {"bits": 4}}, "MLX-quantized"),
    ({"peft_type": "LORA", "base_model_name_or_path": "a/b"}, "adapter"),
    (LLAMA | {"is_encoder_decoder": True}, "encoder-decoder"),
    (LLAMA | {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, "'longrope'"),
    (LLAMA | {"rope_parameters": {"rope_type": "proportional"}}, "'proportional'"),
    (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (LLAMA | {"final_logit_softcapping": 30.0}, "softcapping"),
    (LLAMA | {"attn_logit_softcapping": 50.0}, "softcapping"),
    (GEMMA | {"use_bidirectional_attention": True}, "bidirectional attention"),
    (LLAMA | {"hidden_act": "relu"}, "'relu'"),
    (GEMMA | {"hidden_activation": "gelu"}, "'gelu'"),
]
DELTA = "layers of linear attention (Gated DeltaNet)"
HYBRID_LAYERS = {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}
QWEN35: list[dict[str, Any]] = [
    Qwen3_5Config().to_dict() | {"architectures": ["Qwen3_5ForConditionalGeneration"]},
    Qwen3_5MoeConfig().to_dict() | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]},
    Qwen3_5TextConfig().to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]},
    # as a file may be: without what has a default
    {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {"depth": 1}},
    {"model_type": "qwen3_5", "text_config": {"full_attention_interval": 4}, "vision_config": {"depth": 1}},
    {"model_type": "qwen3_5_moe", "text_config": {"num_experts": 256}, "vision_config": {"depth": 1}},
    {"model_type": "qwen3_next", **HYBRID_LAYERS},
]
# A text part is named by what it is, not by what the whole can see.
SEES: dict[str, Any] = {"model_type": "other_vl", "vision_config": {"depth": 1}}
INNER: list[tuple[dict[str, Any], str]] = [
    (SEES | {"text_config": LLAMA | HYBRID_LAYERS}, f"{RECURRENT} kind, with layers of linear attention, which"),
    (SEES | {"text_config": LLAMA | {"layer_types": ["conv", "full_attention"]}}, f"{RECURRENT} kind, which"),
    (SEES | {"text_config": LLAMA | {"num_experts": 8}}, EXPERTS),
    (SEES | {"model_type": "qwen3_vl_moe", "text_config": {"num_experts": 128}}, EXPERTS),
    (SEES | {"text_config": LLAMA | {"num_experts": 0}}, VISION),
    (SEES | {"model_type": "deepseek_vl", "text_config": LLAMA}, VISION),
    (SEES | {"text_config": [1]}, VISION),
]
FILES: list[tuple[dict[str, Any], str]] = [
    (gguf_values("qwen3moe"), EXPERTS),
    (gguf_values("deepseek2"), EXPERTS),
    (gguf_values("llama", expert_count=8), EXPERTS),
    (gguf_values("mamba"), RECURRENT),
    (gguf_values("qwen35"), DELTA),
    (gguf_values("qwen35moe", expert_count=8), DELTA),
    (gguf_values("qwen3next"), DELTA),
    (gguf_values("falcon-h1"), RECURRENT),
    (gguf_values("clip"), VISION),
    (gguf_values("qwen2vl"), VISION),
    (gguf_values("t5"), "encoder"),
    (gguf_values("gemma-embedding"), "encoder"),
    (gguf_values("gemma3", final_logit_softcapping=30.0), "softcapping"),
    (gguf_values("qwen2", attention__causal=False), "bidirectional attention"),
    (gguf_values("llama", rope__scaling__type="longrope"), "'longrope'"),
    (gguf_values("llama", rope__dimension_count=2), "rope.dimension_count"),
    (gguf_values("llama", attention__value_length=8), "attention.value_length"),
    (gguf_values("llama", attention__head_count_kv=[1, 2]), "differs between layers"),
    (gguf_values("starcoder2"), "known: "),
    (gguf_values("llama") | {"general.type": "adapter"}, "adapter"),
]


@pytest.mark.parametrize("name", TYPES)
def test_by_type(name: str) -> None:
    refused(folder({"model_type": name}), TYPES[name], name)


@pytest.mark.parametrize(("config", "words"), FIELDS)
def test_by_field(config: dict[str, Any], words: str) -> None:
    refused(folder(config), words)


@pytest.mark.parametrize("config", QWEN35)
def test_qwen_3_5_is_a_hybrid(config: dict[str, Any]) -> None:
    refused(folder(config), RECURRENT, DELTA, config["model_type"])


@pytest.mark.parametrize(("config", "words"), INNER)
def test_by_field_of_the_text_part(config: dict[str, Any], words: str) -> None:
    refused(folder(config), words)


@pytest.mark.parametrize(("values", "words"), FILES)
def test_gguf(values: dict[str, Any], words: str) -> None:
    refused(gguf(values), words)


def refused(checkpoint: Any, *words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(checkpoint)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message
