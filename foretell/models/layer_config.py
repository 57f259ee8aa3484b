"""Reads the settings in which the layers of a model differ: sliding windows and RoPE."""

from __future__ import annotations

import math

from foretell.errors import UnsupportedModelError
from foretell.models.config import LayerSizes, Rope
from foretell.models.config_fields import ConfigFields

LAYER_TYPES = ("full_attention", "sliding_attention")
MOST_LAYERS = 10_000  # a corrupt number must not exhaust memory
# One layer in this many has full attention, unless the config states the layers.
PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "olmo3": 4, "exaone4": 4}
GGUF_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "exaone4": 4, "olmo2": 4}  # OLMo 3 is `olmo2` with a window
ALWAYS_SLIDING = ("mistral", "ministral3", "phi3")  # all layers slide if there is a window
NO_ROPE_INTERVAL = 4  # SmolLM3: one layer in this many has no RoPE; GGUF files do not state it

Windows = tuple[int | None, ...]  # one per layer


def hf_layer_types(config: ConfigFields, family: str) -> list[str]:
    """Return one of `LAYER_TYPES` for each layer, from the config or the default of the family."""
    layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    stated = ["full_attention" if name == "attention" else name for name in config.strings("layer_types")]
    stated = stated or [LAYER_TYPES[_slides(config, family, layer)] for layer in range(layers)]
    if len(stated) != layers:
        raise config.invalid("layer_types", f"a list of {layers} names")
    for name in stated:
        if name not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"layers of type {name!r} are not supported; supported are {', '.join(LAYER_TYPES)}"
            )
    return [*stated[:-1], "full_attention"] if family == "gemma4" else stated  # its last layer never slides


def _slides(config: ConfigFields, family: str, layer: int) -> bool:
    if _hf_window(config, family) is None:
        return False
    if family in PATTERNS:
        pattern = config.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern:  # EXAONE 4: "LLLG" is three local layers and a global one
            return pattern[layer % len(pattern)] == "L"
        return (layer + 1) % config.integer("sliding_window_pattern", PATTERNS[family]) != 0
    if family == "smollm3":
        return not _has_rope(config, layer)
    return family in ALWAYS_SLIDING or layer >= config.integer("max_window_layers", 28, least=0)


def _hf_window(config: ConfigFields, family: str) -> int | None:
    """Return the sliding window; None if there is none."""
    if family in ALWAYS_SLIDING or family in PATTERNS:
        return None if config.get("sliding_window") is None else config.integer("sliding_window")
    if family.startswith("qwen") and config.flag("use_sliding_window"):
        return config.integer("sliding_window", 4096)
    if family == "smollm3" and config.flag("use_sliding_window"):
        return None if config.get("sliding_window") is None else config.integer("sliding_window")
    return None


def hf_windows(config: ConfigFields, family: str, layer_types: list[str]) -> Windows:
    """Return the sliding window of each layer."""
    window = _hf_window(config, family)
    if window is None and "sliding_attention" in layer_types:
        raise config.invalid(
            "sliding_window", "an integer above 0 and in use, since layer_types has sliding_attention layers"
        )
    return tuple(window if name == "sliding_attention" else None for name in layer_types)


def gguf_windows(config: ConfigFields, family: str, layers: int) -> Windows:
    """Return the sliding window of each layer."""
    if not config.get("attention.sliding_window"):
        return (None,) * layers
    window = config.integer("attention.sliding_window")
    pattern = config.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        every = config.integer("attention.sliding_window_pattern", GGUF_PATTERNS.get(family, layers + 1))
        pattern = [(layer + 1) % every != 0 for layer in range(layers)]
    if len(pattern) != layers:
        raise config.invalid("attention.sliding_window_pattern", f"an integer or {layers} booleans")
    return tuple(window if slides else None for slides in pattern)


KINDS = ("default", "linear", "llama3", "yarn", "dynamic")
MOST_CONTEXT = 1 << 31  # tokens
LOCAL_THETA = 10_000.0  # default of Gemma's sliding layers
NO_ROPE = Rope(kind="none")


def hf_rope(config: ConfigFields, layer_type: str, theta: float, partial_dim: int | None = None) -> Rope:
    """Return the RoPE of layers of one type; `theta` is the default.

    `partial_dim` is the head dimension of a model that may rotate a part of it.
    """
    settings = rope_settings(config, layer_type)
    dims = _rotated_dims(config, settings, partial_dim)
    kind = settings.string("rope_type", settings.string("type", "default"))
    if partial_dim is not None and kind in ("longrope", "su", "yarn"):  # early Phi-3 files have other names for it
        return _longrope(config, settings, settings.number("rope_theta", theta), dims, partial_dim)
    if kind not in KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported are {', '.join(KINDS)}")
    theta = settings.number("rope_theta", theta)
    if kind == "linear":
        return Rope(theta, "linear", settings.number("factor"))
    if kind == "llama3":
        return _llama3(settings, theta, _original(config, settings))
    if kind == "yarn":
        return _yarn(settings, theta, _original(config, settings), config.integer("max_position_embeddings"))
    # Dynamic scaling starts beyond `max_position_embeddings`, where no sequence is served.
    return Rope(theta, dims=dims)


def _rotated_dims(config: ConfigFields, settings: ConfigFields, dim: int | None) -> int:
    """Return how many dimensions of a head are rotated; 0 for all."""
    shares = [part.number("partial_rotary_factor", 1.0) for part in (settings, config)]
    share = next((each for each in shares if each != 1), 1.0)
    if share == 1:
        return 0
    if dim is None:
        raise UnsupportedModelError("partial_rotary_factor: partial RoPE is not supported")
    dims = int(dim * share)
    if not 0 < dims < dim or dims % 2:
        raise config.invalid("partial_rotary_factor", f"a share of the head's {dim} dimensions that is even")
    return dims


def hf_ropes(config: ConfigFields, family: str, layer_types: list[str], head_dim: int) -> tuple[Rope, ...]:
    """Return the RoPE of each layer."""
    if family == "gemma4":
        return _gemma4_ropes(config, layer_types)
    local = family == "gemma3"
    theta = config.number("rope_theta", 1_000_000.0 if local else 10_000.0)
    full = hf_rope(config, "full_attention", theta, head_dim if family == "phi3" else None)
    ropes = {"full_attention": full, "sliding_attention": full}
    if local or family == "olmo3":  # sliding layers have no scaling, and Gemma's have a theta of their own
        near = config.number("rope_local_base_freq", LOCAL_THETA) if local else theta
        settings = config if is_nested(config) else ConfigFields({})
        ropes["sliding_attention"] = hf_rope(settings, "sliding_attention", near)
    if family == "exaone4" and _hf_window(config, family) is not None:
        ropes["full_attention"] = NO_ROPE
    by_type = [ropes[layer_type] for layer_type in layer_types]
    if family == "smollm3":
        by_type = [rope if _has_rope(config, layer) else NO_ROPE for layer, rope in enumerate(by_type)]
    is_hybrid = config.get("model_type") == "granitemoehybrid"  # Granite 4, where RoPE is stated
    if is_hybrid and config.get("position_embedding_type") != "rope":
        by_type = [NO_ROPE] * len(by_type)
    return tuple(by_type)


def _gemma4_ropes(config: ConfigFields, layer_types: list[str]) -> tuple[Rope, ...]:
    ropes = {"sliding_attention": hf_rope(config, "sliding_attention", LOCAL_THETA)}
    settings = rope_settings(config, "full_attention")
    if settings.string("rope_type", "default") == "proportional":
        dim = _global_sizes(config, len(layer_types) - 1)[1]
        share = settings.number("partial_rotary_factor", 1.0)
        rotated = min(int(share * dim // 2), dim // 2)
        # The wavelengths are those of a head that is rotated in full; the other pairs have an infinite one.
        factors = (settings.number("factor", 1.0),) * rotated + (math.inf,) * (dim // 2 - rotated)
        ropes["full_attention"] = Rope(settings.number("rope_theta", 1_000_000.0), factors=factors)
    else:
        ropes["full_attention"] = hf_rope(config, "full_attention", 1_000_000.0)
    return tuple(ropes[layer_type] for layer_type in layer_types)


def _global_sizes(config: ConfigFields, layer: int) -> tuple[int, int]:
    """Return KV heads and head dimension of a layer of Gemma 4 with full attention."""
    own = config.section("per_layer_config").section(str(layer))
    kv_heads = config.integer("num_key_value_heads")
    if config.flag("attention_k_eq_v"):
        kv_heads = config.integer("num_global_key_value_heads", kv_heads)
    return own.integer("num_key_value_heads", kv_heads), own.integer("head_dim", config.integer("global_head_dim"))


def gemma4_layer_sizes(config: ConfigFields, layer_types: list[str]) -> tuple[LayerSizes, ...]:
    """Return the sizes of each layer of Gemma 4, whose last layers attend to the keys of earlier ones."""
    layers = len(layer_types)
    first_shared = layers - config.integer("num_kv_shared_layers", 0, least=0, most=layers - 1)
    sizes = []
    for layer, layer_type in enumerate(layer_types):
        is_full, is_shared = layer_type == "full_attention", layer >= first_shared
        kv_heads, head_dim = config.integer("num_key_value_heads"), config.integer("head_dim")
        if is_full:
            kv_heads, head_dim = _global_sizes(config, layer)
        kv_layer = None
        if is_shared:
            kv_layer = next((i for i in reversed(range(first_shared)) if layer_types[i] == layer_type), None)
            if kv_layer is None:
                raise config.invalid("num_kv_shared_layers", f"low enough to leave a {layer_type} layer with keys")
        ffn = config.integer("intermediate_size") * (2 if is_shared and config.flag("use_double_wide_mlp") else 1)
        sizes.append(LayerSizes(kv_heads, head_dim, ffn, kv_layer, not (is_full and config.flag("attention_k_eq_v"))))
    return tuple(sizes)


def _has_rope(config: ConfigFields, layer: int) -> bool:
    """Return whether a layer of SmolLM3 has RoPE; `no_rope_layers` has 1 for those that do."""
    stated = config.get("no_rope_layers")
    if stated is None:
        return (layer + 1) % config.integer("no_rope_layer_interval", NO_ROPE_INTERVAL) != 0
    if not isinstance(stated, list) or len(stated) <= layer or stated[layer] not in (0, 1):
        raise config.invalid("no_rope_layers", "a list with 0 or 1 for each layer")
    return bool(stated[layer])


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
        query_growth=settings.number("llama_4_scaling_beta") if settings.get("llama_4_scaling_beta") else 0.0,
    )


def _yarn_attention_factor(factor: float, by: float = 1.0) -> float:
    """Return the attention factor of the YaRN paper."""
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def _longrope(config: ConfigFields, settings: ConfigFields, theta: float, dims: int, head_dim: int) -> Rope:
    context, original = config.integer("max_position_embeddings"), _original(config, settings)
    factor = settings.number("factor", context / original)
    attention = settings.number("attention_factor", _longrope_attention_factor(factor, original))
    pairs = (dims or head_dim) // 2
    return Rope(
        theta,
        "longrope",
        factor,
        original,
        attention_factor=attention,
        factors=settings.numbers("short_factor", pairs),
        long_factors=settings.numbers("long_factor", pairs),
        dims=dims,
    )


def _longrope_attention_factor(factor: float, original: int) -> float:
    """Return the attention factor of the LongRoPE paper."""
    return 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def gguf_rope(config: ConfigFields, factors: tuple[float, ...], long_factors: tuple[float, ...], dims: int) -> Rope:
    """Return the RoPE of a GGUF file; `factors` divide the frequencies, `long_factors` those of long contexts."""
    theta = config.number("rope.freq_base", 10_000.0)
    factor = config.number("rope.scaling.factor", config.number("rope.scale_linear", 1.0))
    kind = config.string("rope.scaling.type", "none" if factor == 1 else "linear")  # older files have only a factor
    if long_factors:
        return _gguf_longrope(config, theta, factors, long_factors, dims)
    if kind == "none":
        return Rope(theta, factors=factors, dims=dims)
    if kind == "linear":
        return Rope(theta, "linear", factor, factors=factors)
    if kind == "yarn":
        return _gguf_yarn(config, theta, factors)
    raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported are none, linear and yarn")


def _gguf_longrope(
    config: ConfigFields, theta: float, factors: tuple[float, ...], long_factors: tuple[float, ...], dims: int
) -> Rope:
    context = config.integer("context_length")
    original = config.integer("rope.scaling.original_context_length", context)
    attention = config.number("rope.scaling.attn_factor", _longrope_attention_factor(context / original, original))
    return Rope(
        theta,
        "longrope",
        context / original,
        original,
        attention_factor=attention,
        factors=factors,
        long_factors=long_factors,
        dims=dims,
    )


def _gguf_yarn(config: ConfigFields, theta: float, factors: tuple[float, ...]) -> Rope:
    factor = config.number("rope.scaling.factor", 1.0)
    # llama.cpp multiplies the factor of the file with that of YaRN.
    attention = config.number("rope.scaling.attn_factor", 1.0) * _yarn_attention_factor(factor)
    if config.get("rope.scaling.yarn_log_multiplier"):  # `mscale_all_dim` of config.json
        attention /= _yarn_attention_factor(factor, config.number("rope.scaling.yarn_log_multiplier"))
    growth = config.get("attention.temperature_scale")
    return Rope(
        theta,
        "yarn",
        factor,
        config.integer("rope.scaling.original_context_length", config.integer("context_length")),
        beta_fast=config.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=config.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention,
        factors=factors,
        query_growth=config.number("attention.temperature_scale") if growth else 0.0,
    )


def gguf_ropes(config: ConfigFields, family: str, windows: Windows, far: Rope) -> tuple[Rope, ...]:
    """Return the RoPE of each layer; `far` is that of layers with full attention. See `hf_ropes`."""
    near = far
    if family == "gemma3":
        near = Rope(config.number("rope.freq_base_swa", LOCAL_THETA))
    if family == "olmo2":
        near = Rope(far.theta)
    if family == "exaone4" and any(windows):
        far = NO_ROPE
    if family == "granite" and not config.flag("rope.scaling.finetuned", True):  # llama.cpp's switch for RoPE
        near = far = NO_ROPE
    ropes = [far if window is None else near for window in windows]
    if family == "smollm3":
        ropes = [NO_ROPE if (layer + 1) % NO_ROPE_INTERVAL == 0 else rope for layer, rope in enumerate(ropes)]
    return tuple(ropes)


def stretched_context(ropes: tuple[Rope, ...], context: int) -> int:
    """Return the context length after YaRN; configs often state the original one."""
    stretched = (rope.factor * rope.original_context for rope in ropes if rope.kind == "yarn")
    return max([context, *(int(min(tokens, MOST_CONTEXT)) for tokens in stretched)])
