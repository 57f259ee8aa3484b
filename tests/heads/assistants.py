"""Tiny assistants of Gemma 4 with random weights, as transformers writes them, and targets that they fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
)

from tests.folder import write_tiny_folder
from tests.models import families

TEXT: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 9,
    "max_position_embeddings": 128,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 4}


def sharing_modes(config: Gemma4TextConfig) -> list[str | None]:
    """Return which layers store the keys that others attend to, as `Gemma4TextConfig.kv_sharing_modes` should.

    In transformers 5.23 it raises for an assistant, all of whose layers attend to those of another model, and a target
    whose layers all have keys stores none.
    """
    first = config.num_hidden_layers - config.num_kv_shared_layers
    stores = {kind: layer for layer, kind in enumerate(config.layer_types[:first])}.values()
    return ["reuse" if i >= first else "store" if i in stores else None for i in range(config.num_hidden_layers)]


@contextmanager
def repaired() -> Iterator[None]:
    """Let transformers make assistants, and targets without shared layers for them."""
    modes = property(sharing_modes)
    with (
        patch.object(Gemma4TextConfig, "kv_sharing_modes", modes),
        patch.object(Gemma4UnifiedTextConfig, "kv_sharing_modes", modes),
    ):
        yield


def make(stated: Gemma4TextConfig, ordered: bool = False, **text: Any) -> Any:
    """Return an assistant for a target of this config; `ordered`: with clusters of its vocabulary."""
    text = TEXT | {"vocab_size": stated.vocab_size} | text
    if stated.attention_k_eq_v:
        text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    is_unified = stated.model_type == "gemma4_unified_text"
    kinds: Any = (Gemma4TextConfig, Gemma4AssistantConfig, Gemma4AssistantForCausalLM)
    if is_unified:
        kinds = (Gemma4UnifiedTextConfig, Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM)
        text = {name: value for name, value in text.items() if not name.endswith("per_layer_input")}
    text_kind, config_kind, model_kind = kinds
    inner = text_kind(**text)
    config = config_kind(text_config=inner, backbone_hidden_size=stated.hidden_size, **(ORDERED if ordered else {}))
    with repaired():
        return randomized(model_kind(config), seed=3)


def randomized(model: Any, seed: int) -> Any:
    """Return a model with weights large enough that logits differ by far more than float error."""
    torch.manual_seed(seed)
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer)))
    return model


def save(folder: Path, target: str, ordered: bool = False, **text: Any) -> Any:
    """Write an assistant to a folder and return it."""
    model = make(families.MODELS[target][1], ordered, **text)
    model.save_pretrained(folder)
    return model


def write_pair(into: Path, ordered: bool = False) -> tuple[Path, Path]:
    """Write a target with a tokenizer, and an assistant for it, and return their folders."""
    target = write_tiny_folder(into / "target")  # for the tokenizer
    vocab = 360  # more than the tokenizer's, and a multiple of the clusters
    stated = families.MODELS["gemma4"][1].to_dict() | {"vocab_size": vocab, "vocab_size_per_layer_input": vocab}
    config = Gemma4TextConfig(**stated)
    with repaired():
        model = randomized(Gemma4ForCausalLM(config), seed=0)
    model.save_pretrained(target)
    make(config, ordered).save_pretrained(into / "assistant")
    return target, into / "assistant"
