"""Checkpoints made of plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from foretell.hub import Checkpoint, LazyTensor

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GEMMA = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 8, "sliding_window": 8}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 24,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 64,
}


def gguf_values(arch: str, **values: Any) -> dict[str, Any]:
    """GGUF keys for an architecture; `__` stands for a dot."""
    own = {key.replace("llama.", f"{arch}."): value for key, value in GGUF.items()}
    return own | {"general.architecture": arch} | {f"{arch}.{key.replace('__', '.')}": v for key, v in values.items()}


def lazy(name: str, values: torch.Tensor) -> LazyTensor:
    return LazyTensor(name, tuple(values.shape), lambda: values)


def lazies(tensors: dict[str, torch.Tensor]) -> dict[str, LazyTensor]:
    return {name: lazy(name, values) for name, values in tensors.items()}


def folder(
    config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None, generation: dict[str, Any] | None = None
) -> Checkpoint:
    return Checkpoint(Path("folder"), "folder", config, generation or {}, {}, lazies(tensors or {}))


def gguf(values: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Checkpoint:
    found = {"token_embd.weight": torch.zeros(48, 16)} if tensors is None else tensors
    return Checkpoint(Path("file.gguf"), "gguf", values, {}, {}, lazies(found))
