"""transformers' models as GGUF files and back, by llama.cpp's rules as other packages have them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from foretell.hub import Checkpoint

from .families import Model

PROCESSORS: dict[str, Any] = TENSOR_PROCESSORS
ARCHS = {
    "llama": "llama",
    "mistral": "llama",
    "internlm3": "llama",
    "ministral3": "mistral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_vl_text": "qwen3vl",
    "phi3": "phi3",
    "granite": "granite",
    "granitemoehybrid": "granite",  # without state-space layers
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
}
INTERLEAVED = ("llama", "mistral3", "granite", "smollm3")  # llama.cpp rotates neighbouring dimensions


def arch_of(config: Any) -> str:
    return ARCHS[config.model_type]


def write_gguf(
    model: Model,
    path: Path,
    extra: dict[str, np.ndarray] | None = None,
    kind_of: Callable[[str], gguf.GGMLQuantizationType | None] = lambda name: None,
) -> None:
    """The model as llama.cpp's converter writes it, in float32, or each matrix in the type that `kind_of` names."""
    config: Any = copy.deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True  # else `head_dim` of a model whose layers differ raises
    arch = arch_of(config)
    writer = gguf.GGUFWriter(path, arch)
    write_sizes(writer, config)
    write_traits(writer, config, extra := dict(extra or {}))
    names = gguf.get_tensor_name_map(architecture(arch), config.num_hidden_layers)
    for name, tensor in unfused(model.state_dict()).items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            name += ".weight" * name.endswith("layer_scalar")
            known = names.get_name(name, (".weight", ".bias"))
            assert known is not None, name
            values, kind = converted(name, tensor, config, arch), kind_of(known) if tensor.dim() == 2 else None
            writer.add_tensor(known, values if kind is None else gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unfused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with the feed-forward of Granite 4 as the converter writes it."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("shared_mlp.input_linear.weight"):
            gate, up = tensor.chunk(2)
            found |= {
                name.replace("shared_mlp.input_linear", f"mlp.{part}_proj"): rows
                for part, rows in (("gate", gate), ("up", up))
            }
        else:
            found[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
    return found


def architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def write_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "shared_intermediate_size", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    write_rope(writer, config.rope_parameters.get("full_attention", config.rope_parameters))


def write_traits(writer: gguf.GGUFWriter, config: Any, extra: dict[str, np.ndarray]) -> None:
    """Write what only some families have; tensors go to `extra`."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if config.model_type == "phi3":
        head = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head * rope["partial_rotary_factor"]))
        if rope["rope_type"] == "longrope":
            original, stretch = rope["original_max_position_embeddings"], config.max_position_embeddings
            factor = math.sqrt(1 + math.log(stretch / original) / math.log(original)) if stretch > original else 1.0
            writer.add_rope_scaling_attn_factors(factor)
            writer.add_rope_scaling_orig_ctx_len(original)
            extra |= {f"rope_factors_{n}.weight": np.array(rope[f"{n}_factor"], np.float32) for n in ("short", "long")}
    if config.model_type == "qwen3_vl_text":
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        writer.add_num_deepstack_layers(1)
    if config.model_type == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_head_count_kv([config.num_key_value_heads] * config.num_hidden_layers)
    if config.model_type in ("granite", "granitemoehybrid"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_attention_scale(config.attention_multiplier)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch_of(config) == "gemma4":
        write_gemma4(writer, config, extra)
    if config.model_type in ("olmo3", "exaone4") and config.sliding_window:
        writer.add_sliding_window_pattern([name == "sliding_attention" for name in config.layer_types])
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "llama3":
        extra.setdefault("rope_freqs.weight", llama3_factors(rope, config.head_dim))


def write_gemma4(writer: gguf.GGUFWriter, config: Any, extra: dict[str, np.ndarray]) -> None:
    """What the converter's `Gemma4Model` writes; keys that were written before have their last value."""
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    slides = [name == "sliding_attention" for name in config.layer_types]
    full = config.per_layer_config[slides.index(False)].head_dim
    near = config.per_layer_config[slides.index(True)].head_dim
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(getattr(config, "hidden_size_per_layer_input", 0))
    writer.add_sliding_window_pattern(slides)
    for name, value in (("", full), ("_swa", near)):
        getattr(writer, f"add_key_length{name}")(value)
        getattr(writer, f"add_value_length{name}")(value)
        getattr(writer, f"add_rope_dimension_count{name}")(value)
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([config.intermediate_size * (1 + (i >= layers - shared)) for i in range(layers)])
    writer.add_head_count_kv([config.per_layer_config[i].num_key_value_heads for i in range(layers)])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rotated = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    extra["rope_freqs.weight"] = np.array([1.0] * rotated + [1e30] * (full // 2 - rotated), np.float32)


def write_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def converted(name: str, tensor: torch.Tensor, config: Any, arch: str) -> np.ndarray:
    values: np.ndarray = tensor.numpy()
    if arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
    return values + np.float32(1) if arch in ("gemma2", "gemma3") and name.endswith("norm.weight") else values


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
