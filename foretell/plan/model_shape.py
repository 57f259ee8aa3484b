"""Model shapes: weights, KV cache and operations from a name, a config.json or a GGUF file."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import ModelError, RequestError, UnknownModelError, UnsupportedModelError
from foretell.models.config_fields import ConfigFields
from foretell.options import nearest
from foretell.plan.devices import catalog

GATED, UNGATED = 3, 2  # weight matrices of a feed-forward layer


@dataclass(frozen=True)
class ExpertShape:
    """A mixture of experts: each row uses `used` of `count` experts and the shared one."""

    count: int
    used: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0  # layers with an ordinary feed-forward

    def active_experts(self, rows: float) -> float:
        """Return the expected number of experts that `rows` rows use, if each row chooses at random."""
        missed: float = (1 - self.used / self.count) ** rows
        return self.count * (1 - missed)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA, DeepSeek): keys and values are cached as one small vector per token."""

    rank: int  # of the compressed keys and values
    rope: int  # dimensions with RoPE
    plain: int  # dimensions without
    value: int  # dimensions of a value head
    query_rank: int = 0  # of compressed queries; 0 if they are not compressed


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer. The field names are the keys of known.json."""

    name: str
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    tied: bool = False
    matrices: int = GATED
    window: int | None = None  # sliding window of `windowed` of the layers, in tokens
    windowed: int = 0
    experts: ExpertShape | None = None
    latent: LatentAttention | None = None
    bits: float | None = None  # bits per weight in the file; None if not stated

    @property
    def head_weights(self) -> int:
        return self.vocab * self.width

    @property
    def attention_weights(self) -> int:
        """Return the attention weights of one layer."""
        if self.latent is not None:
            return self._latent_weights(self.latent)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.width * (2 * queries + 2 * keys)

    def _latent_weights(self, latent: LatentAttention) -> int:
        """Return the weights of latent attention, with low-rank projections of queries, keys and values."""
        query = self.heads * (latent.plain + latent.rope)
        through = latent.query_rank * (self.width + query) if latent.query_rank else self.width * query
        cached = self.width * (latent.rank + latent.rope) + latent.rank * self.heads * (latent.plain + latent.value)
        return through + cached + self.heads * latent.value * self.width

    def ffn_weights(self, experts: float) -> float:
        """Return the feed-forward weights of all layers, counting `experts` experts of each mixture."""
        if self.experts is None:
            return float(self.matrices * self.width * self.ffn * self.layers)
        mixed = self.layers - self.experts.dense_layers
        each = experts * self.experts.ffn + self.experts.shared_ffn
        routers = mixed * self.width * self.experts.count
        return self.matrices * self.width * (self.experts.dense_layers * self.ffn + mixed * each) + routers

    @property
    def weights(self) -> float:
        """Return the number of all weights."""
        embeddings = self.head_weights * (1 if self.tied else 2)
        return self._weights_without_embeddings(self.experts.count if self.experts else 1) + embeddings

    @property
    def active_weights(self) -> float:
        """Return the weights that one row is multiplied with, the LM head included."""
        return self._weights_without_embeddings(self.experts.used if self.experts else 1) + self.head_weights

    def weights_read(self, rows: float) -> float:
        """Return the weights that a step of `rows` rows reads, the LM head included."""
        return (
            self._weights_without_embeddings(self.experts.active_experts(rows) if self.experts else 1)
            + self.head_weights
        )

    def _weights_without_embeddings(self, experts: float) -> float:
        norms = (2 * self.layers + 1) * self.width
        return self.layers * self.attention_weights + self.ffn_weights(experts) + norms

    @property
    def kv_values_per_layer(self) -> int:
        """Return the KV cache values of a token in one layer."""
        if self.latent is not None:
            return self.latent.rank + self.latent.rope
        return 2 * self.kv_heads * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        """Return the KV cache values of a token in all layers. Our pages keep them all, sliding window or not."""
        return self.layers * self.kv_values_per_layer

    def attended_tokens(self, context: float) -> float:
        """Return the tokens that a row attends to, summed over layers."""
        if self.window is None:
            return self.layers * context
        return (self.layers - self.windowed) * context + self.windowed * min(context, self.window)

    def attended_values(self, context: float) -> float:
        """Return the KV cache values that a step reads for a sequence of `context` tokens."""
        return self.attended_tokens(context) * self.kv_values_per_layer

    def attention_operations(self, context: float) -> float:
        """Return the operations of attention of one row over `context` tokens, in all layers."""
        each = 2 * self.head_dim if self.latent is None else 2 * self.latent.rank + self.latent.rope
        return 2 * self.heads * each * self.attended_tokens(context)


MOST_LAYERS = 10_000
DEFAULT_CONTEXT = 2048  # if a config does not state it
WIDTH = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
FFN = ("intermediate_size", "n_inner", "ffn_dim", "d_ff")
CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k")
# Model types with tied embeddings if the config does not say.
TIED = r"gemma|gpt2|gpt_neo$|gpt_bigcode|opt$|bloom|falcon|mpt$|cohere"
PLAIN_FFN = r"gpt|opt$|bloom|falcon|mpt$|phi$|starcoder"  # model types without a gate: two matrices instead of three
GENERATIVE = r"(CausalLM|LMHeadModel|ForConditionalGeneration)$"  # endings of generative architectures
NOT_DECODERS = r"bert|electra|clip|vit$|whisper|wav2vec|hubert|t5|bart|pegasus|marian"
RECURRENT = ("linear_attention", "conv", "short_conv", "mamba", "mamba2", "recurrent")
QUANTIZED_BITS = {"fp8": 8, "fbgemm_fp8": 8, "awq": 4, "gptq": 4, "mxfp4": 4.25, "bitsandbytes": 8}
NOT_GENERATIVE = "is not a language model; give the config.json of a model that generates text"


def from_hf(name: str, values: Mapping[str, Any]) -> ModelShape:
    """Return the shape in a config.json; the error names a missing field."""
    outer = ConfigFields(values)
    config = outer.section("text_config") if isinstance(values.get("text_config"), Mapping) else outer
    _reject_unsupported(name, outer, config)
    kind = str(config.get("model_type", outer.get("model_type", "")))
    width, heads = _count(config, WIDTH), _count(config, HEADS)
    layers = _count(config, LAYERS, most=MOST_LAYERS)
    return ModelShape(
        name=name,
        vocab=_count(config, ("vocab_size",), default=outer.get("vocab_size")),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=1 if _is_multi_query(config) else _count(config, KEY_HEADS, heads),
        head_dim=config.integer("head_dim", max(1, width // heads)),
        ffn=_count(config, FFN, 4 * width),
        context=_count(config, CONTEXT, DEFAULT_CONTEXT),
        tied=config.flag("tie_word_embeddings", bool(re.search(TIED, kind))),
        matrices=UNGATED if re.search(PLAIN_FFN, kind) else GATED,
        window=None if (seen := _window(config, kind, layers)) is None else seen[0],
        windowed=0 if seen is None else seen[1],
        experts=_experts(config),
        latent=_latent(config),
        bits=_bits(outer),
    )


def _reject_unsupported(name: str, outer: ConfigFields, config: ConfigFields) -> None:
    """Raise for models that are not generative or have other layers than attention."""
    stated, kind = outer.strings("architectures"), str(outer.get("model_type", ""))
    is_generative = any(re.search(GENERATIVE, architecture) for architecture in stated)
    if outer.get("is_encoder_decoder") is True or (not is_generative and (stated or re.search(NOT_DECODERS, kind))):
        raise UnsupportedModelError(f"{name}: {', '.join(stated) or kind or 'this'} {NOT_GENERATIVE}")
    if all(config.get(each) is None for each in (*WIDTH, *LAYERS)):
        raise UnsupportedModelError(f"{name}: this {NOT_GENERATIVE}")
    if any(layer in RECURRENT for layer in config.strings("layer_types")) or config.get("ssm_cfg") is not None:
        raise UnsupportedModelError(f"{name}: has recurrent layers, which the planner does not model")


def _count(config: ConfigFields, names: tuple[str, ...], default: int | None = None, most: int = 2**31) -> int:
    """Return an integer field under the first of its names that is present."""
    found = next((name for name in names if config.get(name) is not None), names[0])
    return config.integer(found, default, most=most)


def _is_multi_query(config: ConfigFields) -> bool:
    """Return whether the config uses the older flag of multi-query attention."""
    return config.get("multi_query") is True and config.get("new_decoder_architecture") is not True


def _experts(config: ConfigFields) -> ExpertShape | None:
    if all(not config.get(name) for name in EXPERTS):
        return None
    each = config.integer("moe_intermediate_size", _count(config, FFN))
    shared = config.integer("shared_expert_intermediate_size", config.get("n_shared_experts", 0) * each, least=0)
    return ExpertShape(
        count=_count(config, EXPERTS),
        used=_count(config, EXPERTS_USED),
        ffn=each,
        shared_ffn=shared,
        dense_layers=config.integer("first_k_dense_replace", 0, least=0),
    )


def _latent(config: ConfigFields) -> LatentAttention | None:
    if config.get("kv_lora_rank") is None:
        return None
    return LatentAttention(
        rank=config.integer("kv_lora_rank"),
        rope=config.integer("qk_rope_head_dim"),
        plain=config.integer("qk_nope_head_dim"),
        value=config.integer("v_head_dim"),
        query_rank=config.integer("q_lora_rank", 0, least=0),
    )


def _window(config: ConfigFields, kind: str, layers: int) -> tuple[int, int] | None:
    """Return the sliding window and the number of layers that have one."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return None
    window = config.integer("sliding_window")
    stated = config.strings("layer_types")
    if stated:
        return window, stated.count("sliding_attention")
    if kind.startswith("gemma2"):
        return window, -(-layers // 2)
    if kind.startswith("gemma3"):
        return window, layers - layers // config.integer("sliding_window_pattern", 6)
    if kind.startswith("qwen"):
        return window, max(0, layers - config.integer("max_window_layers", 28, least=0))
    return window, layers


def _bits(outer: ConfigFields) -> float | None:
    """Return the bits per weight of a quantized model."""
    quantization = outer.section("quantization_config")
    if not quantization.values:
        return None
    method = str(quantization.get("quant_method", ""))
    if quantization.get("load_in_4bit") is True:
        return 4.5
    bits = quantization.get("bits", QUANTIZED_BITS.get(method, 8))
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 1 <= bits <= 32:
        raise ModelError(f"the model's config says quantization_config.bits is {bits!r}; it must be from 1 to 32")
    return float(bits)


def from_gguf(name: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], size: int) -> ModelShape:
    """Return the shape in the metadata of a GGUF file. `size` is the bytes of all tensors."""
    kind = ConfigFields(metadata, "general.").string("architecture")
    config = ConfigFields(metadata, f"{kind}.")
    width, heads = config.integer("embedding_length"), config.integer("attention.head_count")
    layers, context = config.integer("block_count", most=MOST_LAYERS), config.integer("context_length")
    if "token_embd.weight" not in shapes:
        raise UnsupportedModelError(f"{name}: has no token_embd.weight; give a GGUF file of a complete language model")
    experts = None
    if config.get("expert_count"):
        ffn = config.integer("expert_feed_forward_length", config.integer("feed_forward_length"))
        experts = ExpertShape(config.integer("expert_count"), config.integer("expert_used_count"), ffn)
    window = config.integer("attention.sliding_window", 0, least=0) or None
    values = sum(math.prod(shape) for shape in shapes.values())
    return ModelShape(
        name=name,
        vocab=shapes["token_embd.weight"][0],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=config.integer("attention.head_count_kv", heads),
        head_dim=config.integer("attention.key_length", max(1, width // heads)),
        ffn=config.integer("feed_forward_length", 1),
        context=context,
        tied="output.weight" not in shapes,
        window=window,
        windowed=layers - layers // 6 if window is not None and kind == "gemma3" else layers if window else 0,
        experts=experts,
        bits=8 * size / values,
    )


FORMS = "a model is a known name, a config.json, the folder of one, or a .gguf file"
OUR_NAMES = {"gemma3-270m": "gemma-3-270m"}  # built-in models that the catalog has under another name
CONFIG = "config.json"


def find_model_shape(spec: str, field: str) -> ModelShape:
    """Return the shape of a model given by name or path. `field` is the option to name in errors."""
    from foretell.hub.catalog import BUILTINS
    from foretell.hub.resolve import begins_as_gguf

    if not spec.strip():
        raise RequestError(field, f"is empty; {FORMS}")
    models = catalog()["models"]
    if spec.lower() in models or spec in BUILTINS:
        name = OUR_NAMES.get(spec, spec.lower())
        return _from_catalog(name, models[name])
    path = Path(os.path.expanduser(spec))
    if os.path.isdir(path):
        return _from_config(path / CONFIG)
    if os.path.isfile(path):
        return _from_gguf(path) if path.suffix == ".gguf" or begins_as_gguf(path) else _from_config(path)
    if path.suffix in (".json", ".gguf") or spec.startswith(("/", "./", "../", "~")):
        raise RequestError(field, f"there is no {spec}; {FORMS}")
    name = plain_name(spec)
    if name in models:
        return _from_catalog(name, models[name])
    raise UnknownModelError(f"{field}: {spec!r} is not known; {nearest(name, models)}; {FORMS}")


def plain_name(spec: str) -> str:
    """Return a Hugging Face id as a name of the catalog: without owner and suffixes such as -instruct."""
    from foretell.hub.pairs import base_name, short_name

    return base_name(short_name(spec))


def _from_catalog(name: str, entry: Mapping[str, Any]) -> ModelShape:
    sizes = dict(entry)
    if "experts" in sizes:
        sizes["experts"] = ExpertShape(**sizes["experts"])
    if "latent" in sizes:
        sizes["latent"] = LatentAttention(**sizes["latent"])
    return ModelShape(name, **sizes)


def _from_config(path: Path) -> ModelShape:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: has no {CONFIG}; {FORMS}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error.msg} in line {error.lineno}; {FORMS}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not a model config; it must be a JSON object with fields such as hidden_size")
    return from_hf(str(path), values)


def _from_gguf(path: Path) -> ModelShape:
    from foretell.hub.gguf_file import open_gguf

    file = open_gguf(path)
    shapes = {info.name: info.shape for info in file.tensor_infos}
    return from_gguf(path.name, file.metadata, shapes, sum(info.size for info in file.tensor_infos))
