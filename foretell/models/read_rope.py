"""How a checkpoint's config says that positions turn queries and keys."""

from __future__ import annotations

import math

from foretell.errors import UnsupportedModelError

from .config import Rope
from .fields import Fields
from .read_windows import LAYER_TYPES, Windows

KINDS = ("default", "linear", "llama3", "yarn")

MOST_CONTEXT = 1 << 31  # tokens
LOCAL_THETA = 10_000.0  # of Gemma's sliding layers, where the file does not say


def hf_rope(config: Fields, layer_type: str, theta: float) -> Rope:
    """For layers of one type; `theta` is what the family takes where the config does not say."""
    settings = rope_settings(config, layer_type)
    for part in (config, settings):
        if part.get("partial_rotary_factor", 1) != 1:
            raise UnsupportedModelError("partial_rotary_factor: heads that turn only in part are not served")
    kind = settings.text("rope_type", settings.text("type", "default"))
    if kind not in KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not served; served are {', '.join(KINDS)}")
    theta = settings.number("rope_theta", theta)
    if kind == "linear":
        return Rope(theta, "linear", settings.number("factor"))
    if kind == "llama3":
        return _llama3(settings, theta, _original(config, settings))
    if kind == "yarn":
        return _yarn(settings, theta, _original(config, settings), config.count("max_position_embeddings"))
    return Rope(theta)


def hf_ropes(config: Fields, layer_types: list[str], local: bool) -> tuple[Rope, ...]:
    """One a layer. `local`: the sliding layers turn by a theta of their own and are never stretched (Gemma)."""
    theta = config.number("rope_theta", 1_000_000.0 if local else 10_000.0)
    ropes = {"full_attention": hf_rope(config, "full_attention", theta)}
    ropes["sliding_attention"] = ropes["full_attention"]
    if local:
        near = config.number("rope_local_base_freq", LOCAL_THETA)
        settings = config if is_nested(config) else Fields({})
        ropes["sliding_attention"] = hf_rope(settings, "sliding_attention", near)
    return tuple(ropes[layer_type] for layer_type in layer_types)


def is_nested(config: Fields) -> bool:
    """Whether the config gives settings for each type of layer, not one for all."""
    return any(name in config.part("rope_parameters").values for name in LAYER_TYPES)


def rope_settings(config: Fields, layer_type: str) -> Fields:
    """`rope_scaling` is the older name; `rope_parameters` holds theta, too."""
    if is_nested(config):
        return config.part("rope_parameters").part(layer_type)
    older = config.part("rope_scaling")
    return older if older.values else config.part("rope_parameters")


def _original(config: Fields, settings: Fields) -> int:
    inner = settings.count("original_max_position_embeddings", config.count("max_position_embeddings"))
    return config.count("original_max_position_embeddings", inner)


def _llama3(settings: Fields, theta: float, original: int) -> Rope:
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if low >= high:
        raise settings.wrong("low_freq_factor", "below high_freq_factor")
    return Rope(theta, "llama3", settings.number("factor"), original, low, high)


def _yarn(settings: Fields, theta: float, original: int, context: int) -> Rope:
    factor = settings.number("factor", context / original)
    attention = _stretch(factor)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        attention = _stretch(factor, settings.number("mscale")) / _stretch(factor, settings.number("mscale_all_dim"))
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


def _stretch(factor: float, by: float = 1.0) -> float:
    """Yarn's scale of the attention scores, as its paper has it."""
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def gguf_rope(config: Fields, factors: tuple[float, ...]) -> Rope:
    """`factors` are those of the tensor `rope_freqs.weight`: each turn is divided by its own."""
    theta = config.number("rope.freq_base", 10_000.0)
    factor = config.number("rope.scaling.factor", config.number("rope.scale_linear", 1.0))
    kind = config.text("rope.scaling.type", "none" if factor == 1 else "linear")  # older files have a factor alone
    if kind == "none":
        return Rope(theta, factors=factors)
    if kind == "linear":
        return Rope(theta, "linear", factor, factors=factors)
    if kind == "yarn":
        return _gguf_yarn(config, theta, factors)
    raise UnsupportedModelError(f"rope scaling {kind!r} is not served; served are none, linear and yarn")


def _gguf_yarn(config: Fields, theta: float, factors: tuple[float, ...]) -> Rope:
    factor = config.number("rope.scaling.factor", 1.0)
    # llama.cpp takes the file's factor times yarn's own, not in its place.
    attention = config.number("rope.scaling.attn_factor", 1.0) * _stretch(factor)
    return Rope(
        theta,
        "yarn",
        factor,
        config.count("rope.scaling.original_context_length", config.count("context_length")),
        beta_fast=config.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=config.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention,
        factors=factors,
    )


def gguf_ropes(config: Fields, windows: Windows, factors: tuple[float, ...], local: bool) -> tuple[Rope, ...]:
    """One a layer, as `hf_ropes`."""
    far = gguf_rope(config, factors)
    near = Rope(config.number("rope.freq_base_swa", LOCAL_THETA)) if local else far
    return tuple(far if window is None else near for window in windows)


def stretched_context(ropes: tuple[Rope, ...], context: int) -> int:
    """Return the context after YaRN: configs often give the one before."""
    stretched = (rope.factor * rope.original_context for rope in ropes if rope.kind == "yarn")
    return max([context, *(int(min(tokens, MOST_CONTEXT)) for tokens in stretched)])
