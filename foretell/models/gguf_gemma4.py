"""Reads the keys of Gemma 4's GGUF files as entries of config.json, by the rules of llama.cpp's converter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.errors import ModelError, UnsupportedModelError
from foretell.models.config_fields import ConfigFields
from foretell.models.layer_config import LOCAL_THETA, MOST_LAYERS, gguf_windows

if TYPE_CHECKING:
    from foretell.hub.tensor import LazyTensor

NO_ROTATION = 1e30  # the converter's divisor of frequencies that are zero
EMBEDDING, PER_LAYER_EMBEDDING = "token_embd.weight", "per_layer_token_embd.weight"


def gemma4_entries(config: ConfigFields, tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Return the config.json of a file; RoPE factors are in `gemma4_factors`."""
    if EMBEDDING not in tensors:
        raise ModelError(f"tensor {EMBEDDING!r} is missing; is this the whole GGUF file?")
    layers = config.integer("block_count", most=MOST_LAYERS)
    windows = gguf_windows(config, "gemma4", layers)
    shared = config.integer("attention.shared_kv_layers", 0, least=0, most=layers - 1)
    heads = _per_layer(config, "attention.head_count_kv", layers)
    sliding = [count for count, window in zip(heads, windows, strict=True) if window is not None]
    full = [layer for layer, window in enumerate(windows) if window is None]
    head_dim = _head_dim(config, "")
    own_values = any(f"blk.{layer}.attn_v.weight" in tensors for layer in full if layer < layers - shared)
    entries = {
        "model_type": "gemma4_text",
        "vocab_size": tensors[EMBEDDING].shape[0],
        "hidden_size": config.integer("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": config.integer("attention.head_count"),
        "num_key_value_heads": sliding[0] if sliding else heads[0],
        "head_dim": _head_dim(config, "_swa") if sliding else head_dim,
        "global_head_dim": head_dim,
        "per_layer_config": {str(layer): {"num_key_value_heads": heads[layer]} for layer in full},
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "num_kv_shared_layers": shared,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_k_eq_v": bool(full) and not own_values,
        "max_position_embeddings": config.integer("context_length"),
        "rms_norm_eps": config.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {"rope_theta": config.number("rope.freq_base", 1_000_000.0)},
            "sliding_attention": {"rope_theta": config.number("rope.freq_base_swa", LOCAL_THETA)},
        },
    }
    if sliding:
        entries["sliding_window"] = config.integer("attention.sliding_window")
        if len(set(sliding)) > 1:
            raise config.invalid("attention.head_count_kv", "the same for all layers with sliding attention")
    return entries | _feed_forward(config, layers, shared) | _per_layer_inputs(config, tensors)


def gemma4_factors(factors: tuple[float, ...]) -> tuple[float, ...]:
    """Return the divisors of the frequencies of full attention, infinite where nothing is rotated."""
    return tuple(math.inf if factor >= NO_ROTATION else factor for factor in factors)


def _head_dim(config: ConfigFields, suffix: str) -> int:
    head_dim = config.integer(f"attention.key_length{suffix}")
    for name in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        if config.integer(name, head_dim) != head_dim:
            raise UnsupportedModelError(f"{name} differs from the head dimension, {head_dim}, which is not supported")
    return head_dim


def _feed_forward(config: ConfigFields, layers: int, shared: int) -> dict[str, Any]:
    """Return the feed-forward size, which may double in the layers that attend to the keys of others."""
    sizes = _per_layer(config, "feed_forward_length", layers)
    is_double = bool(shared) and sizes[-1] != sizes[0]
    if sizes != [sizes[0]] * (layers - shared) + [sizes[0] * (1 + is_double)] * shared:
        raise config.invalid("feed_forward_length", "the same for all layers, or twice that for those that share keys")
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": is_double}


def _per_layer_inputs(config: ConfigFields, tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    width = config.integer("embedding_length_per_layer_input", 0, least=0)
    if width and PER_LAYER_EMBEDDING not in tensors:
        raise ModelError(f"tensor {PER_LAYER_EMBEDDING!r} is missing; download the file again")
    vocab = tensors[PER_LAYER_EMBEDDING].shape[0] if width else 0
    return {"hidden_size_per_layer_input": width, "vocab_size_per_layer_input": vocab}


def _per_layer(config: ConfigFields, name: str, layers: int) -> list[int]:
    """Return a value per layer of a key that has one value, or a list of them."""
    stated = config.get(name)
    if not isinstance(stated, list):
        return [config.integer(name)] * layers
    if len(stated) != layers:
        raise config.invalid(name, f"an integer or {layers} of them")
    return [ConfigFields({name: each}).integer(name) for each in stated]
