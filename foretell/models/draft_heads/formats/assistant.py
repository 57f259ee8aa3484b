"""Gemma 4's `assistant` checkpoints, as transformers writes them."""

from __future__ import annotations

import re
from dataclasses import replace

from foretell.errors import ModelError
from foretell.models.config import LayerSizes, ModelConfig
from foretell.models.config_fields import ConfigFields
from foretell.models.draft_heads.config import AssistantConfig, LayerConfig
from foretell.models.hf_config import from_hf

from .layout import HeadFile, TensorLayout

MOST_CENTROIDS = 1 << 20  # a corrupt number must not exhaust memory
UNUSED = re.compile(r"layers\.\d{1,4}\.self_attn\.[kv]_(proj|norm)\.weight")  # all keys are the target's
NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attention.q_norm": "self_attn.q_norm",
}
LINEARS = {
    "attention.qkv": ("self_attn.q_proj",),
    "attention.out": ("self_attn.o_proj",),
    "ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn.down": ("mlp.down_proj",),
}


def assistant(file: HeadFile) -> TensorLayout:
    """Read an assistant, and check that it fits the target."""
    target, text = file.target, file.config.section("text_config")
    if target.family != "gemma4":
        raise ModelError(f"{file.where}: this assistant drafts for Gemma 4, and the target is {target.family}")
    stated = {
        "backbone_hidden_size": (file.config.integer("backbone_hidden_size"), target.width),
        "vocab_size": (text.integer("vocab_size", 262_144), target.vocab),
    }
    for name, (found, wanted) in stated.items():
        if found != wanted:
            raise ModelError(
                f"{file.where}: {name} is {found} and the target's is {wanted}: this assistant is of another target"
            )
    decoder = _decoder(file, text)
    centroids = file.config.integer("num_centroids", 2048, most=MOST_CENTROIDS)
    active = file.config.integer("centroid_intermediate_top_k", 32, most=centroids)
    is_ordered = file.config.flag("use_ordered_embeddings")
    if is_ordered and target.vocab % centroids:
        raise ModelError(f"{file.where}: num_centroids is {centroids}, which does not divide the vocabulary")
    config = AssistantConfig(
        layer=_layer(decoder),
        vocab=target.vocab,
        target_width=target.width,
        hidden_layers=(target.layers,),
        target_norm=True,
        own_output=True,
        embed_scale=target.embed_scale,
        decoder=decoder,
        centroids=centroids if is_ordered else 0,
        active_centroids=active if is_ordered else 0,
    )
    tensors = _tensors(file, config)
    spare = frozenset(name for name in file.tensors if UNUSED.fullmatch(name))
    if "lm_head.weight" in file.tensors and "embed_tokens.weight" in file.tensors:
        spare |= {"lm_head.weight"}  # it is tied
    return TensorLayout("Gemma 4's assistant", config, tensors, spare=spare)


def _decoder(file: HeadFile, text: ConfigFields) -> ModelConfig:
    """Return the config of its layers, each of which attends to the last layer of its kind that has keys."""
    # Its config says that all layers share keys, which leaves none to share with: those are the target's.
    none = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True}
    try:
        own = from_hf({"model_type": "gemma4_text", **text.values, **none})
    except ModelError as error:
        raise type(error)(f"{file.where}: text_config: {error}") from error
    target = file.target
    sizes = []
    for layer, (window, size) in enumerate(zip(own.windows, own.layer_sizes, strict=True)):
        kind = "full" if window is None else "sliding"
        shared = _kv_layer(target, window is not None)
        if shared is None:
            raise ModelError(f"{file.where}: the target has no layer with {kind} attention to attend to")
        theirs = target.layer_sizes[shared]
        if (size.head_dim, own.heads % theirs.kv_heads) != (theirs.head_dim, 0):
            raise ModelError(
                f"{file.where}: layer {layer} has {own.heads} heads of {size.head_dim}, and the target's keys of "
                f"{kind} attention are {theirs.kv_heads} heads of {theirs.head_dim}: this assistant is of another "
                "target"
            )
        sizes.append(LayerSizes(theirs.kv_heads, theirs.head_dim, size.ffn, shared))
    # The window is over the target's positions, the last of which is one before the position of the draft.
    windows = tuple(None if window is None else window + 1 for window in own.windows)
    return replace(own, layer_sizes=tuple(sizes), windows=windows)


def _kv_layer(target: ModelConfig, slides: bool) -> int | None:
    """Return the last layer of the target that has keys, with sliding or full attention."""
    layers = zip(range(target.layers), target.windows, target.layer_sizes, strict=True)
    own = [layer for layer, window, size in layers if size.kv_layer is None and (window is not None) == slides]
    return own[-1] if own else None


def _layer(decoder: ModelConfig) -> LayerConfig:
    """Return the sizes of its first layer, from which memory is planned."""
    first = decoder.at(0)
    return LayerConfig(
        width=first.width,
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        ffn=first.ffn,
        norm_eps=first.norm_eps,
    )


def _tensors(file: HeadFile, config: AssistantConfig) -> dict[str, tuple[str, ...]]:
    words = "embed_tokens.weight" if "embed_tokens.weight" in file.tensors else "lm_head.weight"
    tensors: dict[str, tuple[str, ...]] = {
        f"{name}.weight": (f"{name}.weight",) for name in ("pre_projection", "post_projection", "norm")
    }
    if config.centroids:
        tensors["table"] = (words,)
        tensors["centroids.weight"] = ("masked_embedding.centroids.weight",)
        tensors["token_ordering"] = ("masked_embedding.token_ordering",)
    else:
        tensors["output.weight"] = (words,)
    for layer in range(config.decoder.layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        tensors |= {f"{ours}.{name}.weight": (f"{theirs}.{norm}.weight",) for name, norm in NORMS.items()}
        for name, parts in LINEARS.items():
            tensors[f"{ours}.{name}.weight"] = tuple(f"{theirs}.{part}.weight" for part in parts)
        tensors[f"{ours}.scale"] = (f"{theirs}.layer_scalar",)
    return tensors
