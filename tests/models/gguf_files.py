"""transformers' models as GGUF files and back, by llama.cpp's rules as other packages have them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from foretell.hub import Checkpoint

from .families import Model

PROCESSORS: dict[str, Any] = TENSOR_PROCESSORS
ARCHS = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def write_gguf(model: Model, path: Path, extra: dict[str, np.ndarray] | None = None) -> None:
    """The model as llama.cpp's converter writes it, in float32."""
    config: Any = model.config
    arch = ARCHS[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    write_sizes(writer, config)
    names = gguf.get_tensor_name_map(architecture(arch), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            known = names.get_name(name, (".weight", ".bias"))
            assert known is not None, name
            writer.add_tensor(known, converted(name, tensor, config, arch))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def write_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    write_rope(writer, config.rope_parameters.get("full_attention", config.rope_parameters))


def write_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def converted(name: str, tensor: torch.Tensor, config: Any, arch: str) -> np.ndarray:
    values: np.ndarray = tensor.numpy()
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
    return values + np.float32(1) if arch == "gemma3" and name.endswith("norm.weight") else values


def llama3_factors(rope: dict[str, Any], dim: int) -> np.ndarray:
    """What llama.cpp's converter stores as `rope_freqs.weight`."""
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def read_gguf(checkpoint: Checkpoint, kind: Model, config: Any) -> Model:
    """transformers' model filled from a GGUF file by transformers' names and rules, without its slow parser."""
    arch = ARCHS[config.model_type]
    processor: Any = PROCESSORS.get(arch, TensorProcessor)(config=config.to_dict())
    with torch.device("meta"):
        sketch = kind(config)
    names = get_gguf_hf_weights_map(sketch, processor)
    state = {}
    for name, tensor in checkpoint.tensors():
        values = processor.process(weights=tensor.load().numpy(), name=name).weights
        state[names[name]] = torch.from_numpy(np.array(values))
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32).eval()
