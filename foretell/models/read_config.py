"""What a checkpoint says of itself, in config.json or in GGUF keys: its decoder, its ends, its way of sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.errors import ModelError, UnsupportedModelError

from .config import ModelConfig
from .fields import Fields
from .read_rope import gguf_ropes, hf_ropes, stretched_context
from .read_windows import MOST_LAYERS, gguf_windows, hf_layer_types, hf_windows
from .refuse import refuse

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint
    from foretell.hub.tensor import LazyTensor

Settings = dict[str, Any]  # fields of a ModelConfig

HF_FAMILIES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
HEAD_DIMS = {"qwen3": 128, "gemma3": 256}  # where config.json does not say; of the others, width / heads
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Tokens that end a text or a turn, whatever the file's own keys say: many chat models name only one of two.
END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SAMPLING_KEYS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# Far above any model's, and low enough that no product of them overflows: such a number is damage.
MOST = {"width": 1 << 20, "ffn": 1 << 24, "vocab": 1 << 24, "heads": 1 << 14, "head_dim": 1 << 14, "layers": 1024}
LABELS = {
    "width": "a hidden size of",
    "ffn": "a feed-forward size of",
    "vocab": "a vocabulary of",
    "heads": "a number of heads of",
    "head_dim": "a head dimension of",
    "layers": "a number of layers of",
}
GEMMA_27B_LAYERS = 62  # the Gemma that scales scores by width / heads, which its GGUF files do not say


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """What the checkpoint's decoder is made of, or an error that says why it is not served."""
    if checkpoint.kind == "gguf":
        return from_gguf(checkpoint.config, dict(checkpoint.tensors()))
    return from_hf(checkpoint.config)


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The config in a config.json."""
    config = Fields(values)
    name = config.text("model_type", "")
    refuse(config, name, (*HF_FAMILIES, "gemma3"))
    if name == "gemma3":  # the wrapper of a vision model, here without its eyes
        config, name = config.part("text_config"), "gemma3_text"
        refuse(config, name, tuple(HF_FAMILIES))
    family = HF_FAMILIES[name]
    layer_types = hf_layer_types(config, family)
    settings = _hf_sizes(config, family) | _hf_traits(config, family)
    settings["windows"] = hf_windows(config, family, layer_types)
    settings["ropes"] = hf_ropes(config, layer_types, local=family == "gemma3")
    return _make(settings, family)


def _hf_sizes(config: Fields, family: str) -> Settings:
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    return {
        "vocab": config.count("vocab_size"),
        "width": width,
        "layers": config.count("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", heads),
        "head_dim": config.count("head_dim", HEAD_DIMS.get(family, _even_share(width, heads))),
        "ffn": config.count("intermediate_size"),
        "context": config.count("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
    }


def _hf_traits(config: Fields, family: str) -> Settings:
    """What the families differ in; the defaults are transformers'."""
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
        traits |= _gemma_traits(config.count("hidden_size"))
        traits["attention_scale"] = config.number("query_pre_attn_scalar", 256) ** -0.5
    return traits


def _activation(config: Fields, name: str, default: str) -> str:
    stated = config.text(name, default)
    if stated not in ACTIVATIONS:
        raise UnsupportedModelError(f"{name} {stated!r} is not served; served are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[stated]


def _gemma_traits(width: int) -> Settings:
    return {"sandwich_norms": True, "embed_scale": math.sqrt(width)}


def _even_share(width: int, heads: int) -> int | None:
    """The heads' dimension where the config leaves it to be worked out."""
    return width // heads if width % heads == 0 else None


def from_gguf(values: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> ModelConfig:
    """The config in a GGUF file; what its keys leave out, its tensors show."""
    general = Fields(values, "general.")
    family = general.text("architecture")
    if general.text("type", "model") != "model":
        raise UnsupportedModelError(f"this GGUF file holds a model's {general.get('type')}; give the model's own file")
    config = Fields(values, f"{family}.")
    refuse(config, family, GGUF_FAMILIES)
    settings = _gguf_sizes(config, tensors) | _gguf_traits(config, family, tensors)
    settings["windows"] = gguf_windows(config, family, settings["layers"])
    factors = _rope_factors(family, tensors, settings["head_dim"])
    settings["ropes"] = gguf_ropes(config, settings["windows"], factors, local=family == "gemma3")
    return _make(settings, family)


def _gguf_sizes(config: Fields, tensors: Mapping[str, LazyTensor]) -> Settings:
    width, heads = config.count("embedding_length"), config.count("attention.head_count")
    head_dim = config.count("attention.key_length", _even_share(width, heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if config.count(name, head_dim) != head_dim:
            raise UnsupportedModelError(f"{name} differs from the heads' dimension, {head_dim}, which is not served")
    if "token_embd.weight" not in tensors:
        raise ModelError("tensor 'token_embd.weight' is missing; is this the whole GGUF file?")
    return {
        "vocab": tensors["token_embd.weight"].shape[0],
        "width": width,
        "layers": config.count("block_count", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": config.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "ffn": config.count("feed_forward_length"),
        "context": config.count("context_length"),
        "norm_eps": config.number("attention.layer_norm_rms_epsilon"),
    }


def _gguf_traits(config: Fields, family: str, tensors: Mapping[str, LazyTensor]) -> Settings:
    traits: Settings = {
        "tied": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "qk_norm": family in ("qwen3", "gemma3"),
    }
    if family == "gemma3":
        traits |= {"activation": "gelu_tanh", **_gemma_traits(config.count("embedding_length"))}
        if config.count("block_count") == GEMMA_27B_LAYERS:
            share = config.count("embedding_length") / config.count("attention.head_count")
            traits["attention_scale"] = share**-0.5
    return traits


def _rope_factors(family: str, tensors: Mapping[str, LazyTensor], head_dim: int) -> tuple[float, ...]:
    """How Llama 3's stretching is stored: worked out, a number for each pair of dimensions."""
    if family != "llama" or "rope_freqs.weight" not in tensors:
        return ()
    factors = tuple(tensors["rope_freqs.weight"].load().tolist())
    if len(factors) != head_dim // 2 or not all(0 < factor < math.inf for factor in factors):
        raise ModelError(f"tensor 'rope_freqs.weight' must hold {head_dim // 2} numbers above 0; fetch the file again")
    return factors


def _make(settings: Settings, family: str) -> ModelConfig:
    for name, most in MOST.items():
        if settings[name] > most:
            raise ModelError(f"the model's config has {LABELS[name]} {settings[name]}; at most {most} is served")
    if settings["heads"] % settings["kv_heads"]:
        raise ModelError(
            f"{settings['heads']} heads cannot share {settings['kv_heads']} key heads evenly: see the config"
        )
    if settings["head_dim"] % 2:
        raise ModelError(f"the config's head dimension is {settings['head_dim']}; it must be even to be turned")
    settings["context"] = stretched_context(settings["ropes"], settings["context"])
    return ModelConfig(**settings, family=family)


def end_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """The tokens after which the model wants no more."""
    if checkpoint.kind == "gguf":
        return _gguf_end_ids(checkpoint.config)
    sources = (checkpoint.generation, checkpoint.config, Fields(checkpoint.config).part("text_config").values)
    return _ids([source.get("eos_token_id") for source in sources])


def _gguf_end_ids(values: Mapping[str, Any]) -> frozenset[int]:
    tokens = Fields(values, "tokenizer.ggml.").names("tokens")
    named = [token for token, text in enumerate(tokens) if text in END_TOKENS]
    return _ids([named, *(values.get(f"tokenizer.ggml.{key}") for key in END_KEYS)])


def _ids(stated: list[Any]) -> frozenset[int]:
    """Ids or lists of ids, in one set; None and what is no id left out."""
    flat = [token for entry in stated for token in (entry if isinstance(entry, list) else [entry])]
    return frozenset(token for token in flat if _is_whole(token) and token >= 0)


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, float | int]:
    """The model's own temperature, top_k, top_p and min_p, as far as it has them; empty means greedy."""
    if checkpoint.kind == "gguf":
        return _fitting({name: checkpoint.config.get(f"general.sampling.{key}") for name, key in SAMPLING_KEYS.items()})
    if checkpoint.generation.get("do_sample") is not True:
        return {}
    return {"temperature": 1.0} | _fitting(checkpoint.generation)


def _fitting(stated: Mapping[str, Any]) -> dict[str, float | int]:
    return {name: stated[name] for name in SAMPLING_KEYS if _fits(name, stated.get(name))}


def _fits(name: str, value: Any) -> bool:
    if name == "top_k":
        return _is_whole(value) and value >= 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    bounds = {"temperature": 0 <= value < math.inf, "top_p": 0 < value <= 1, "min_p": 0 <= value <= 1}
    return bounds[name]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
