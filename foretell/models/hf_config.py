"""Reads the config of a checkpoint, config.json or GGUF keys: architecture, end tokens, sampling defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foretell.errors import ModelError, UnsupportedModelError
from foretell.models.checkpoint_tensors import plain_name
from foretell.models.config import ModelConfig
from foretell.models.config_fields import ConfigFields
from foretell.models.families import BY_GGUF, BY_MODEL_TYPE, DEFAULT_TEXT, FAMILIES, MULTIMODAL
from foretell.models.gguf_gemma4 import gemma4_entries, gemma4_factors
from foretell.models.layer_config import (
    MOST_LAYERS,
    gemma4_layer_sizes,
    gguf_rope,
    gguf_ropes,
    gguf_windows,
    hf_layer_types,
    hf_ropes,
    hf_windows,
    stretched_context,
)
from foretell.models.unsupported import check_supported

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint
    from foretell.hub.tensor import LazyTensor

Settings = dict[str, Any]  # fields of a ModelConfig

HEAD = "lm_head.weight"
# Traits of families; `_hf_traits` has those that the config states.
STATED_BIAS = ("llama", "qwen3", "gemma2", "gemma3", "gemma4", "smollm3", "granite", "olmo2", "olmo3", "seed_oss")
STATED_MLP_BIAS = ("llama", "smollm3", "granite", "seed_oss")
QK_NORM = ("qwen3", "gemma3", "gemma4", "exaone4")
FULL_QK_NORM = ("olmo2", "olmo3")
NO_PRE_NORMS = ("olmo2", "olmo3", "exaone4")
GEMMA = ("gemma2", "gemma3", "gemma4")
# Entries of which null means none, not the default.
NULLABLE = (
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
)
ROPE_FREQS = ("llama", "ministral3", "smollm3", "exaone4", "phi3")  # GGUF files may divide their frequencies
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# End tokens by name, in addition to the keys of the file: many chat models state only one of two.
END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<turn|>")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SAMPLING_KEYS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# Far above any model, and low enough that no product overflows: larger numbers are corrupt.
MOST = {"width": 1 << 20, "ffn": 1 << 24, "vocab": 1 << 24, "heads": 1 << 14, "head_dim": 1 << 14, "layers": 1024}
LABELS = {
    "width": "a hidden size of",
    "ffn": "a feed-forward size of",
    "vocab": "a vocabulary of",
    "heads": "a number of heads of",
    "head_dim": "a head dimension of",
    "layers": "a number of layers of",
}
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # these scale scores by width / heads, which GGUF does not state


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the architecture of the checkpoint; raise an error with the reason if it is not supported."""
    if checkpoint.kind == "gguf":
        return from_gguf(checkpoint.config, dict(checkpoint.tensors()))
    return from_hf(checkpoint.config, lambda: any(plain_name(name) == HEAD for name, _ in checkpoint.tensors()))


def from_hf(values: Mapping[str, Any], has_head: Callable[[], bool] = lambda: False) -> ModelConfig:
    """Return the architecture of a config.json; `has_head` settles whether a multimodal model's embedding is tied.

    It is asked unless the outer config states it. transformers reads only the outer config, too: the value of
    `text_config` counts for a text model alone, and a stored head that differs from the embedding is not tied.
    """
    config = ConfigFields(values)
    name = config.string("model_type", "")
    check_supported(config, name, (*BY_MODEL_TYPE, *MULTIMODAL))
    if name in MULTIMODAL:
        is_stated = config.get("tie_word_embeddings") is not None
        tied = config.flag("tie_word_embeddings") if is_stated else not has_head()
        config = ConfigFields({**config.section("text_config").values, "tie_word_embeddings": tied})
        name = config.string("model_type", DEFAULT_TEXT.get(name, f"{name}_text"))
        check_supported(config, name, tuple(BY_MODEL_TYPE))
    family = BY_MODEL_TYPE[name]
    stated = {name: value for name, value in config.values.items() if value is not None or name in NULLABLE}
    config = ConfigFields({**FAMILIES[family].defaults, **FAMILIES[family].variants.get(name, {}), **stated})
    layer_types = hf_layer_types(config, family)
    settings = _hf_sizes(config, family) | _hf_traits(config, family)
    settings["windows"] = hf_windows(config, family, layer_types)
    settings["ropes"] = hf_ropes(config, family, layer_types, settings["head_dim"])
    if family == "gemma4":
        settings |= _gemma4_layers(config, layer_types)
    return _make(settings, family)


def _gemma4_layers(config: ConfigFields, layer_types: list[str]) -> Settings:
    width = config.integer("hidden_size_per_layer_input", 0, least=0)
    words = config.integer("vocab_size")
    vocab = config.integer("vocab_size_per_layer_input", words, least=0)
    if width and vocab < words:
        raise config.invalid("vocab_size_per_layer_input", f"at least the vocabulary, {words}")
    return {
        "layer_sizes": gemma4_layer_sizes(config, layer_types),
        "per_layer_width": width,
        "per_layer_vocab": vocab if width else 0,
        "v_norm": True,
        "layer_scales": True,
        "attention_scale": 1.0,
    }


def _hf_sizes(config: ConfigFields, family: str) -> Settings:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    ffn = "shared_intermediate_size" if config.get("model_type") == "granitemoehybrid" else "intermediate_size"
    return {
        "vocab": config.integer("vocab_size"),
        "width": width,
        "layers": config.integer("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": config.integer("num_key_value_heads", heads),
        "head_dim": config.integer("head_dim", _default_head_dim(width, heads)),
        "ffn": config.integer(ffn),
        "context": config.integer("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
    }


def _hf_traits(config: ConfigFields, family: str) -> Settings:
    """Return the fields in which families differ; defaults are those of transformers."""
    other_names = config.get("model_type") == "internlm3"
    bias = family in STATED_BIAS and config.flag("attention_bias", other_names and config.flag("qkv_bias"))
    mlp_bias = family in STATED_MLP_BIAS and config.flag("mlp_bias", other_names and config.flag("bias"))
    traits: Settings = _norm_traits(family) | {
        "tied": config.flag("tie_word_embeddings"),
        "activation": _activation(config, "hidden_act", "silu"),
        "qkv_bias": bias or family == "qwen2",
        "out_bias": config.flag("attention_out_bias") if family == "seed_oss" else bias,
        "mlp_bias": mlp_bias,
    }
    if family in GEMMA:
        traits["activation"] = _activation(config, "hidden_activation", "gelu_pytorch_tanh")
        traits["embed_scale"] = math.sqrt(config.integer("hidden_size"))
        traits["attention_scale"] = config.number("query_pre_attn_scalar", 256) ** -0.5
        traits |= _softcaps(config)
    if family == "granite":
        traits["embed_scale"] = config.number("embedding_multiplier", 1.0)
        traits["residual_scale"] = config.number("residual_multiplier", 1.0)
        traits["logit_scale"] = 1 / config.number("logits_scaling", 1.0)
        traits["attention_scale"] = config.number("attention_multiplier", 1.0)
    return traits


def _norm_traits(family: str) -> Settings:
    return {
        "qk_norm": family in QK_NORM or family in FULL_QK_NORM,
        "full_qk_norm": family in FULL_QK_NORM,
        "pre_norms": family not in NO_PRE_NORMS,
        "sandwich_norms": family in NO_PRE_NORMS or family in GEMMA,
    }


def _softcaps(config: ConfigFields) -> Settings:
    names = {"logit_softcap": "final_logit_softcapping", "attention_softcap": "attn_logit_softcapping"}
    return {field: config.number(name) for field, name in names.items() if config.get(name)}


def _activation(config: ConfigFields, name: str, default: str) -> str:
    stated = config.string(name, default)
    if stated not in ACTIVATIONS:
        raise UnsupportedModelError(f"{name} {stated!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[stated]


def _default_head_dim(width: int, heads: int) -> int | None:
    """Return the default head dimension."""
    return width // heads if width % heads == 0 else None


def from_gguf(values: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> ModelConfig:
    """Return the architecture of a GGUF file; what its keys omit is inferred from its tensors."""
    general = ConfigFields(values, "general.")
    family = general.string("architecture")
    if general.string("type", "model") != "model":
        raise UnsupportedModelError(
            f"this GGUF file is a model's {general.get('type')}; use the file of the model itself"
        )
    name = family
    config = ConfigFields(values, f"{name}.")
    check_supported(config, name, tuple(BY_GGUF))
    family = BY_GGUF[name]
    if family == "gemma4":
        return _gemma4_from_gguf(config, tensors)
    dims = _gguf_rotated_dims(config, family)
    settings = _gguf_sizes(config, tensors) | _gguf_traits(config, family, tensors)
    settings["windows"] = gguf_windows(config, family, settings["layers"])
    if family == "phi3" and config.get("attention.sliding_window"):
        settings["windows"] = (config.integer("attention.sliding_window"),) * settings["layers"]
    pairs = (dims or settings["head_dim"]) // 2
    names = ("rope_factors_short", "rope_factors_long") if family == "phi3" else ("rope_freqs", "")
    short, long = (_rope_factors(tensors, f"{each}.weight", pairs) for each in names)
    factors = short if family in ROPE_FREQS else ()
    settings["ropes"] = gguf_ropes(config, family, settings["windows"], gguf_rope(config, factors, long, dims))
    return _make(settings, family)


def _gemma4_from_gguf(config: ConfigFields, tensors: Mapping[str, LazyTensor]) -> ModelConfig:
    entries = gemma4_entries(config, tensors)
    factors = gemma4_factors(_rope_factors(tensors, "rope_freqs.weight", entries["global_head_dim"] // 2))
    found = from_hf(entries)
    ropes = zip(found.ropes, found.windows, strict=True)
    return replace(
        found, ropes=tuple(rope if window is not None else replace(rope, factors=factors) for rope, window in ropes)
    )


def _gguf_rotated_dims(config: ConfigFields, family: str) -> int:
    """Return how many dimensions of a head are rotated; 0 for all."""
    head_dim = _gguf_head_dim(config)
    dims = config.integer("rope.dimension_count", head_dim)
    if dims == head_dim:
        return 0
    if family != "phi3" or dims > head_dim or dims % 2:
        raise UnsupportedModelError(
            f"rope.dimension_count differs from the head dimension, {head_dim}, which is not supported"
        )
    return dims


def _gguf_head_dim(config: ConfigFields) -> int:
    width, heads = config.integer("embedding_length"), config.integer("attention.head_count")
    return config.integer("attention.key_length", _default_head_dim(width, heads))


def _gguf_sizes(config: ConfigFields, tensors: Mapping[str, LazyTensor]) -> Settings:
    width, heads, head_dim = (
        config.integer("embedding_length"),
        config.integer("attention.head_count"),
        _gguf_head_dim(config),
    )
    if config.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"attention.value_length differs from the head dimension, {head_dim}, which is not supported"
        )
    if "token_embd.weight" not in tensors:
        raise ModelError("tensor 'token_embd.weight' is missing; is this the whole GGUF file?")
    return {
        "vocab": tensors["token_embd.weight"].shape[0],
        "width": width,
        "layers": config.integer("block_count", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": config.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "ffn": config.integer("feed_forward_length"),
        "context": config.integer("context_length"),
        "norm_eps": config.number("attention.layer_norm_rms_epsilon"),
    }


def _gguf_traits(config: ConfigFields, family: str, tensors: Mapping[str, LazyTensor]) -> Settings:
    traits: Settings = _norm_traits(family) | {
        "tied": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }
    if family in GEMMA:
        width = config.integer("embedding_length")
        traits |= {"activation": "gelu_tanh", "embed_scale": math.sqrt(width)}
        if config.integer("block_count") == GEMMA_27B_LAYERS[family]:
            traits["attention_scale"] = (width / config.integer("attention.head_count")) ** -0.5
    if family == "gemma2":
        defaults = FAMILIES[family].defaults
        traits["logit_softcap"] = config.number("final_logit_softcapping", defaults["final_logit_softcapping"])
        traits["attention_softcap"] = config.number("attn_logit_softcapping", defaults["attn_logit_softcapping"])
    if family == "granite":
        traits["embed_scale"] = config.number("embedding_scale", 1.0)
        traits["residual_scale"] = config.number("residual_scale", 1.0)
        traits["logit_scale"] = 1 / config.number("logit_scale", 1.0)
        traits["attention_scale"] = config.number("attention.scale") if config.get("attention.scale") else None
    return traits


def _rope_factors(tensors: Mapping[str, LazyTensor], name: str, pairs: int) -> tuple[float, ...]:
    """Return divisors of the frequencies, one per pair of dimensions; empty if there is no such tensor."""
    if name not in tensors:
        return ()
    factors = tuple(tensors[name].load().tolist())
    if len(factors) != pairs or not all(0 < factor < math.inf for factor in factors):
        raise ModelError(f"tensor {name!r} must hold {pairs} numbers above 0; download the file again")
    return factors


def _make(settings: Settings, family: str) -> ModelConfig:
    for name, most in MOST.items():
        if settings[name] > most:
            raise ModelError(f"the model's config has {LABELS[name]} {settings[name]}; at most {most} is supported")
    if settings["heads"] % settings["kv_heads"]:
        raise ModelError(
            f"{settings['heads']} heads are not a multiple of {settings['kv_heads']} KV heads; check the config"
        )
    if settings["head_dim"] % 2:
        raise ModelError(f"the config's head dimension is {settings['head_dim']}; RoPE requires an even one")
    for sizes in settings.get("layer_sizes", ()):
        if settings["heads"] % sizes.kv_heads or sizes.head_dim % 2 or max(sizes.ffn, sizes.head_dim) > MOST["ffn"]:
            raise ModelError("the config's layers with full attention have impossible KV heads or head dimensions")
    settings["context"] = stretched_context(settings["ropes"], settings["context"])
    return ModelConfig(**settings, family=family)


def eos_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the end-of-sequence tokens of the model."""
    if checkpoint.kind == "gguf":
        return _gguf_end_ids(checkpoint.config)
    sources = (checkpoint.generation, checkpoint.config, ConfigFields(checkpoint.config).section("text_config").values)
    return _ids([source.get("eos_token_id") for source in sources])


def _gguf_end_ids(values: Mapping[str, Any]) -> frozenset[int]:
    tokens = ConfigFields(values, "tokenizer.ggml.").strings("tokens")
    named = [token for token, text in enumerate(tokens) if text in END_TOKENS]
    return _ids([named, *(values.get(f"tokenizer.ggml.{key}") for key in END_KEYS)])


def _ids(stated: list[Any]) -> frozenset[int]:
    """Return ids and lists of ids as one set, without None and invalid ids."""
    flat = [token for entry in stated for token in (entry if isinstance(entry, list) else [entry])]
    return frozenset(token for token in flat if _is_integer(token) and token >= 0)


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, float | int]:
    """Return the model's default temperature, top_k, top_p and min_p; empty means greedy."""
    if checkpoint.kind == "gguf":
        return _valid_defaults(
            {name: checkpoint.config.get(f"general.sampling.{key}") for name, key in SAMPLING_KEYS.items()}
        )
    if checkpoint.generation.get("do_sample") is not True:
        return {}
    return {"temperature": 1.0} | _valid_defaults(checkpoint.generation)


def _valid_defaults(stated: Mapping[str, Any]) -> dict[str, float | int]:
    return {name: stated[name] for name in SAMPLING_KEYS if _is_valid(name, stated.get(name))}


def _is_valid(name: str, value: Any) -> bool:
    if name == "top_k":
        return _is_integer(value) and value >= 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    bounds = {"temperature": 0 <= value < math.inf, "top_p": 0 < value <= 1, "min_p": 0 <= value <= 1}
    return bounds[name]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
