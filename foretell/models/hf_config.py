"""Reads the config of a checkpoint, config.json or GGUF keys: architecture, end tokens, sampling defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.errors import ModelError, UnsupportedModelError
from foretell.models.config import ModelConfig, Rope
from foretell.models.config_fields import ConfigFields
from foretell.models.unsupported import check_supported

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint
    from foretell.hub.tensor import LazyTensor

LAYER_TYPES = ("full_attention", "sliding_attention")
MOST_LAYERS = 10_000  # a corrupt number must not exhaust memory
GEMMA_PATTERN = 6  # every sixth layer of Gemma has full attention

Windows = tuple[int | None, ...]  # one per layer


def hf_layer_types(config: ConfigFields, family: str) -> list[str]:
    """Return one of `LAYER_TYPES` for each layer, from the config or the default of the family."""
    layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    stated = config.strings("layer_types")
    if not stated:
        return [LAYER_TYPES[_slides(config, family, layer)] for layer in range(layers)]
    if len(stated) != layers:
        raise config.invalid("layer_types", f"a list of {layers} names")
    for name in stated:
        if name not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"layers of type {name!r} are not supported; supported are {', '.join(LAYER_TYPES)}"
            )
    return stated


def _slides(config: ConfigFields, family: str, layer: int) -> bool:
    if family == "gemma3":
        return (layer + 1) % config.integer("sliding_window_pattern", GEMMA_PATTERN) != 0
    if _hf_window(config, family) is None:
        return False
    return family == "mistral" or layer >= config.integer("max_window_layers", 28, least=0)


def _hf_window(config: ConfigFields, family: str) -> int | None:
    """Return the sliding window; defaults are those of transformers."""
    if family == "mistral" and config.values.get("sliding_window", 0) is None:
        return None
    if family in ("mistral", "gemma3") or (family.startswith("qwen") and config.flag("use_sliding_window")):
        return config.integer("sliding_window", 4096)
    return None


def hf_windows(config: ConfigFields, family: str, layer_types: list[str]) -> Windows:
    window = _hf_window(config, family)
    if window is None and "sliding_attention" in layer_types:
        raise config.invalid(
            "sliding_window", "an integer above 0 and in use, since layer_types has sliding_attention layers"
        )
    return tuple(window if name == "sliding_attention" else None for name in layer_types)


def gguf_windows(config: ConfigFields, family: str, layers: int) -> Windows:
    if not config.get("attention.sliding_window"):
        return (None,) * layers
    window = config.integer("attention.sliding_window")
    pattern = config.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        every = config.integer("attention.sliding_window_pattern", GEMMA_PATTERN if family == "gemma3" else layers + 1)
        pattern = [(layer + 1) % every != 0 for layer in range(layers)]
    if len(pattern) != layers:
        raise config.invalid("attention.sliding_window_pattern", f"an integer or {layers} booleans")
    return tuple(window if slides else None for slides in pattern)


KINDS = ("default", "linear", "llama3", "yarn")

MOST_CONTEXT = 1 << 31  # tokens
LOCAL_THETA = 10_000.0  # default of Gemma's sliding layers


def hf_rope(config: ConfigFields, layer_type: str, theta: float) -> Rope:
    """Return the RoPE of layers of one type; `theta` is the default."""
    settings = rope_settings(config, layer_type)
    for part in (config, settings):
        if part.get("partial_rotary_factor", 1) != 1:
            raise UnsupportedModelError("partial_rotary_factor: partial RoPE is not supported")
    kind = settings.string("rope_type", settings.string("type", "default"))
    if kind not in KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported are {', '.join(KINDS)}")
    theta = settings.number("rope_theta", theta)
    if kind == "linear":
        return Rope(theta, "linear", settings.number("factor"))
    if kind == "llama3":
        return _llama3(settings, theta, _original(config, settings))
    if kind == "yarn":
        return _yarn(settings, theta, _original(config, settings), config.integer("max_position_embeddings"))
    return Rope(theta)


def hf_ropes(config: ConfigFields, layer_types: list[str], local: bool) -> tuple[Rope, ...]:
    """Return the RoPE of each layer. With `local` sliding layers have their own theta and no scaling (Gemma)."""
    theta = config.number("rope_theta", 1_000_000.0 if local else 10_000.0)
    ropes = {"full_attention": hf_rope(config, "full_attention", theta)}
    ropes["sliding_attention"] = ropes["full_attention"]
    if local:
        near = config.number("rope_local_base_freq", LOCAL_THETA)
        settings = config if is_nested(config) else ConfigFields({})
        ropes["sliding_attention"] = hf_rope(settings, "sliding_attention", near)
    return tuple(ropes[layer_type] for layer_type in layer_types)


def is_nested(config: ConfigFields) -> bool:
    """Return whether the config has settings per layer type."""
    return any(name in config.section("rope_parameters").values for name in LAYER_TYPES)


def rope_settings(config: ConfigFields, layer_type: str) -> ConfigFields:
    """Return the RoPE settings. `rope_scaling` is the older name; `rope_parameters` includes theta."""
    if is_nested(config):
        return config.section("rope_parameters").section(layer_type)
    older = config.section("rope_scaling")
    return older if older.values else config.section("rope_parameters")


def _original(config: ConfigFields, settings: ConfigFields) -> int:
    inner = settings.integer("original_max_position_embeddings", config.integer("max_position_embeddings"))
    return config.integer("original_max_position_embeddings", inner)


def _llama3(settings: ConfigFields, theta: float, original: int) -> Rope:
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if low >= high:
        raise settings.invalid("low_freq_factor", "below high_freq_factor")
    return Rope(theta, "llama3", settings.number("factor"), original, low, high)


def _yarn(settings: ConfigFields, theta: float, original: int, context: int) -> Rope:
    factor = settings.number("factor", context / original)
    attention = _yarn_attention_factor(factor)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        attention = _yarn_attention_factor(factor, settings.number("mscale")) / _yarn_attention_factor(
            factor, settings.number("mscale_all_dim")
        )
    return Rope(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        attention_factor=settings.number("attention_factor", attention),
        truncate=settings.flag("truncate", True),
    )


def _yarn_attention_factor(factor: float, by: float = 1.0) -> float:
    """Return the attention factor of the YaRN paper."""
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def gguf_rope(config: ConfigFields, factors: tuple[float, ...]) -> Rope:
    """Return the RoPE of a GGUF file; `factors` divide the frequencies (tensor `rope_freqs.weight`)."""
    theta = config.number("rope.freq_base", 10_000.0)
    factor = config.number("rope.scaling.factor", config.number("rope.scale_linear", 1.0))
    kind = config.string("rope.scaling.type", "none" if factor == 1 else "linear")  # older files have only a factor
    if kind == "none":
        return Rope(theta, factors=factors)
    if kind == "linear":
        return Rope(theta, "linear", factor, factors=factors)
    if kind == "yarn":
        return _gguf_yarn(config, theta, factors)
    raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported are none, linear and yarn")


def _gguf_yarn(config: ConfigFields, theta: float, factors: tuple[float, ...]) -> Rope:
    factor = config.number("rope.scaling.factor", 1.0)
    # llama.cpp multiplies the factor of the file with that of YaRN.
    attention = config.number("rope.scaling.attn_factor", 1.0) * _yarn_attention_factor(factor)
    return Rope(
        theta,
        "yarn",
        factor,
        config.integer("rope.scaling.original_context_length", config.integer("context_length")),
        beta_fast=config.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=config.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention,
        factors=factors,
    )


def gguf_ropes(config: ConfigFields, windows: Windows, factors: tuple[float, ...], local: bool) -> tuple[Rope, ...]:
    """Return the RoPE of each layer; see `hf_ropes`."""
    far = gguf_rope(config, factors)
    near = Rope(config.number("rope.freq_base_swa", LOCAL_THETA)) if local else far
    return tuple(far if window is None else near for window in windows)


def stretched_context(ropes: tuple[Rope, ...], context: int) -> int:
    """Return the context length after YaRN; configs often state the original one."""
    stretched = (rope.factor * rope.original_context for rope in ropes if rope.kind == "yarn")
    return max([context, *(int(min(tokens, MOST_CONTEXT)) for tokens in stretched)])


Settings = dict[str, Any]  # fields of a ModelConfig

HF_FAMILIES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
HEAD_DIMS = {"qwen3": 128, "gemma3": 256}  # defaults; width / heads for other families
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# End tokens by name, in addition to the keys of the file: many chat models state only one of two.
END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>")
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
GEMMA_27B_LAYERS = 62  # this Gemma scales scores by width / heads, which GGUF files do not state


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the architecture of the checkpoint; raise an error with the reason if it is not supported."""
    if checkpoint.kind == "gguf":
        return from_gguf(checkpoint.config, dict(checkpoint.tensors()))
    return from_hf(checkpoint.config)


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture of a config.json."""
    config = ConfigFields(values)
    name = config.string("model_type", "")
    check_supported(config, name, (*HF_FAMILIES, "gemma3"))
    if name == "gemma3":  # the wrapper of the multimodal model around its text model
        config, name = config.section("text_config"), "gemma3_text"
        check_supported(config, name, tuple(HF_FAMILIES))
    family = HF_FAMILIES[name]
    layer_types = hf_layer_types(config, family)
    settings = _hf_sizes(config, family) | _hf_traits(config, family)
    settings["windows"] = hf_windows(config, family, layer_types)
    settings["ropes"] = hf_ropes(config, layer_types, local=family == "gemma3")
    return _make(settings, family)


def _hf_sizes(config: ConfigFields, family: str) -> Settings:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return {
        "vocab": config.integer("vocab_size"),
        "width": width,
        "layers": config.integer("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": config.integer("num_key_value_heads", heads),
        "head_dim": config.integer("head_dim", HEAD_DIMS.get(family, _default_head_dim(width, heads))),
        "ffn": config.integer("intermediate_size"),
        "context": config.integer("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
    }


def _hf_traits(config: ConfigFields, family: str) -> Settings:
    """Return the fields in which families differ; defaults are those of transformers."""
    bias = family in ("llama", "qwen3", "gemma3") and config.flag("attention_bias")
    traits: Settings = {
        "tied": config.flag("tie_word_embeddings", family == "gemma3"),
        "activation": _activation(config, "hidden_act", "silu"),
        "qkv_bias": bias or family == "qwen2",
        "out_bias": bias,
        "mlp_bias": family == "llama" and config.flag("mlp_bias"),
        "qk_norm": family in ("qwen3", "gemma3"),
    }
    if family == "gemma3":
        traits["activation"] = _activation(config, "hidden_activation", "gelu_pytorch_tanh")
        traits |= _gemma_traits(config.integer("hidden_size"))
        traits["attention_scale"] = config.number("query_pre_attn_scalar", 256) ** -0.5
    return traits


def _activation(config: ConfigFields, name: str, default: str) -> str:
    stated = config.string(name, default)
    if stated not in ACTIVATIONS:
        raise UnsupportedModelError(f"{name} {stated!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[stated]


def _gemma_traits(width: int) -> Settings:
    return {"sandwich_norms": True, "embed_scale": math.sqrt(width)}


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
    config = ConfigFields(values, f"{family}.")
    check_supported(config, family, GGUF_FAMILIES)
    settings = _gguf_sizes(config, tensors) | _gguf_traits(config, family, tensors)
    settings["windows"] = gguf_windows(config, family, settings["layers"])
    factors = _rope_factors(family, tensors, settings["head_dim"])
    settings["ropes"] = gguf_ropes(config, settings["windows"], factors, local=family == "gemma3")
    return _make(settings, family)


def _gguf_sizes(config: ConfigFields, tensors: Mapping[str, LazyTensor]) -> Settings:
    width, heads = config.integer("embedding_length"), config.integer("attention.head_count")
    head_dim = config.integer("attention.key_length", _default_head_dim(width, heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if config.integer(name, head_dim) != head_dim:
            raise UnsupportedModelError(f"{name} differs from the head dimension, {head_dim}, which is not supported")
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
    traits: Settings = {
        "tied": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "qk_norm": family in ("qwen3", "gemma3"),
    }
    if family == "gemma3":
        traits |= {"activation": "gelu_tanh", **_gemma_traits(config.integer("embedding_length"))}
        if config.integer("block_count") == GEMMA_27B_LAYERS:
            share = config.integer("embedding_length") / config.integer("attention.head_count")
            traits["attention_scale"] = share**-0.5
    return traits


def _rope_factors(family: str, tensors: Mapping[str, LazyTensor], head_dim: int) -> tuple[float, ...]:
    """Return the factors of Llama 3's RoPE scaling, stored as one number per pair of dimensions."""
    if family != "llama" or "rope_freqs.weight" not in tensors:
        return ()
    factors = tuple(tensors["rope_freqs.weight"].load().tolist())
    if len(factors) != head_dim // 2 or not all(0 < factor < math.inf for factor in factors):
        raise ModelError(
            f"tensor 'rope_freqs.weight' must hold {head_dim // 2} numbers above 0; download the file again"
        )
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
