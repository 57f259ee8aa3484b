"""Tiny random models of every family, as transformers has them: what ours is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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
}


def make(name: str) -> Model:
    """Weights large enough that logits differ by far more than float error."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            around = 1.0 if "norm" in key and not name.startswith("gemma") else 0.0
            parameter.normal_(around, 0.3)
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
