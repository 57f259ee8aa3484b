"""Which layers see only the last so many tokens, as a checkpoint's config says."""

from __future__ import annotations

from foretell.errors import UnsupportedModelError

from .fields import Fields

LAYER_TYPES = ("full_attention", "sliding_attention")
MOST_LAYERS = 10_000  # a damaged number must not fill the memory
GEMMA_PATTERN = 6  # every sixth layer of a Gemma sees everything

Windows = tuple[int | None, ...]  # one a layer


def hf_layer_types(config: Fields, family: str) -> list[str]:
    """One of `LAYER_TYPES` for each layer, stated or as the family has it."""
    layers = config.count("num_hidden_layers", most=MOST_LAYERS)
    stated = config.names("layer_types")
    if not stated:
        return [LAYER_TYPES[_slides(config, family, layer)] for layer in range(layers)]
    if len(stated) != layers:
        raise config.wrong("layer_types", f"a list of {layers} names")
    for name in stated:
        if name not in LAYER_TYPES:
            raise UnsupportedModelError(f"layers of type {name!r} are not served; served are {', '.join(LAYER_TYPES)}")
    return stated


def _slides(config: Fields, family: str, layer: int) -> bool:
    if family == "gemma3":
        return (layer + 1) % config.count("sliding_window_pattern", GEMMA_PATTERN) != 0
    if _hf_window(config, family) is None:
        return False
    return family == "mistral" or layer >= config.count("max_window_layers", 28, least=0)


def _hf_window(config: Fields, family: str) -> int | None:
    """The defaults are transformers'."""
    if family == "mistral" and config.values.get("sliding_window", 0) is None:
        return None
    if family in ("mistral", "gemma3") or (family.startswith("qwen") and config.flag("use_sliding_window")):
        return config.count("sliding_window", 4096)
    return None


def hf_windows(config: Fields, family: str, layer_types: list[str]) -> Windows:
    window = _hf_window(config, family)
    if window is None and "sliding_attention" in layer_types:
        raise config.wrong(
            "sliding_window", "a whole number above 0 and in use, since layer_types has layers that slide"
        )
    return tuple(window if name == "sliding_attention" else None for name in layer_types)


def gguf_windows(config: Fields, family: str, layers: int) -> Windows:
    if not config.get("attention.sliding_window"):
        return (None,) * layers
    window = config.count("attention.sliding_window")
    pattern = config.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        every = config.count("attention.sliding_window_pattern", GEMMA_PATTERN if family == "gemma3" else layers + 1)
        pattern = [(layer + 1) % every != 0 for layer in range(layers)]
    if len(pattern) != layers:
        raise config.wrong("attention.sliding_window_pattern", f"a whole number or {layers} of true and false")
    return tuple(window if slides else None for slides in pattern)
