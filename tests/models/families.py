"""Tiny random models of every family, as transformers has them: what ours is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    InternLM3Config,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from foretell.models.families import BY_MODEL_TYPE

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10_000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
GEMMA = SIZES | {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
FOUR = SIZES | {"num_hidden_layers": 4}
PHI = SIZES | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
# Pairs of a head of 8 dimensions, of which 6 are rotated.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.3, 1.7],
    "long_factor": [1.5, 4.0, 9.0],
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
}
GRANITE = SIZES | {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.2,
}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 96,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 8,
}
Model = Any  # of transformers, which is typed in part
MODELS: dict[str, tuple[Model, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, rms_norm_eps=1e-3)),
    "llama tied, with biases": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "llama, heads of another size": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=12)),
    "llama3": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3)),
    "linear": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}),
    ),
    "yarn": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=16, rope_parameters=YARN)),
    "yarn, every setting": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **SIZES,
            head_dim=32,
            rope_parameters=YARN
            | {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
        ),
    ),
    "yarn, attention factor": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, head_dim=16, rope_parameters=YARN | {"attention_factor": 0.8}),
    ),
    "mistral, sliding": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=8)),
    "mistral, not sliding": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    "ministral, stated layers": (
        MinistralForCausalLM,
        MinistralConfig(
            **SIZES,
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen2, sliding from layer 1": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1, tie_word_embeddings=True),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "qwen3, untied, with biases": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, attention_bias=True)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**GEMMA)),
    "gemma3, stretched, untied": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**GEMMA, tie_word_embeddings=False, rope_parameters=GEMMA_ROPES),
    ),
    "internlm3": (LlamaForCausalLM, InternLM3Config(**SIZES, head_dim=8, attention_bias=True, mlp_bias=True)),
    "phi3": (Phi3ForCausalLM, Phi3Config(**PHI, sliding_window=9)),
    "phi3, short factors": (
        Phi3ForCausalLM,
        Phi3Config(**PHI, rope_parameters=dict(LONGROPE), original_max_position_embeddings=128),
    ),
    "phi3, long factors": (
        Phi3ForCausalLM,
        Phi3Config(
            **PHI, rope_parameters=dict(LONGROPE), original_max_position_embeddings=20, tie_word_embeddings=True
        ),
    ),
    "granite": (GraniteForCausalLM, GraniteConfig(**GRANITE)),
    "granite 4": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **GRANITE,
            num_local_experts=0,
            shared_intermediate_size=40,
            mamba_n_heads=4,
            layer_types=["full_attention"] * 3,
            position_embedding_type="rope",
            tie_word_embeddings=True,
        ),
    ),
    "granite 4, no RoPE": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **GRANITE,
            num_local_experts=0,
            shared_intermediate_size=40,
            mamba_n_heads=4,
            layer_types=["full_attention"] * 3,
            position_embedding_type="nope",
        ),
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(**(GEMMA | {"num_hidden_layers": 3}), final_logit_softcapping=9.0, attn_logit_softcapping=5.0),
    ),
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **(SIZES | GEMMA4 | {"num_hidden_layers": 6}),
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            final_logit_softcapping=9.0,
        ),
    ),
    "gemma4, values are keys": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **(SIZES | GEMMA4 | {"hidden_size_per_layer_input": 0}),
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
        ),
    ),
    "gemma4 unified": (
        Gemma4UnifiedForCausalLM,
        Gemma4UnifiedTextConfig(
            **(SIZES | {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 9}),
            global_head_dim=16,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            attention_bias=True,
        ),
    ),
    "gemma4, stated sizes": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **(SIZES | GEMMA4 | {"num_hidden_layers": 4}),
            num_kv_shared_layers=2,
            layer_types=["full_attention", "sliding_attention"] * 2,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
            },
            tie_word_embeddings=False,
        ),
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**FOUR, pad_token_id=0)),
    "smollm3, stated layers": (
        SmolLM3ForCausalLM,
        SmolLM3Config(**SIZES, pad_token_id=0, no_rope_layers=[0, 1, 1], use_sliding_window=True, sliding_window=9),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SIZES)),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config(**FOUR, sliding_window=9, rope_scaling=YARN | {"rope_theta": 500_000.0}),
    ),
    "exaone4": (
        Exaone4ForCausalLM,
        Exaone4Config(**FOUR, head_dim=16, sliding_window=9, sliding_window_pattern=4, rope_parameters=LLAMA3),
    ),
    "exaone4, no window": (
        Exaone4ForCausalLM,
        Exaone4Config(**SIZES, head_dim=16, sliding_window=None, layer_types=["full_attention"] * 3),
    ),
    "seed_oss": (SeedOssForCausalLM, SeedOssConfig(**SIZES, head_dim=16)),
    "ministral3": (
        Ministral3ForCausalLM,
        Ministral3Config(
            **SIZES,
            head_dim=16,
            rope_parameters=YARN
            | {
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        ),
    ),
}


# A model of each family, by our name of it.
ONE_EACH = {BY_MODEL_TYPE[config.model_type]: name for name, (_, config) in reversed(MODELS.items())}


def make(name: str, **changes: Any) -> Model:
    """Weights large enough that logits differ by far more than float error; `changes` are of the config."""
    kind, config = MODELS[name]
    config = type(config).from_dict(config.to_dict() | changes) if changes else config
    torch.manual_seed(0)
    model = kind(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            around = 1.0 if "norm" in key and not name.startswith(("gemma2", "gemma3")) else 0.0
            parameter.normal_(around, 0.3)
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.fill_(0.7)
    return model


def save(name: str, folder: Path) -> Model:
    """The model, and the same in `folder`."""
    model = make(name)
    model.save_pretrained(folder)
    return model


def text(length: int = 40, vocab: int = 96) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.inference_mode()
def theirs(model: Model, tokens: list[int]) -> torch.Tensor:
    """transformers' logits after each token."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


@torch.inference_mode()
def their_text(model: Model, tokens: list[int], count: int) -> list[int]:
    """transformers' greedy continuation, worked out from the start at every token: no cache to be wrong."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]
