"""Multi-token prediction, in the target's own checkpoint or apart from it."""

from __future__ import annotations

from dataclasses import replace

from foretell.errors import ModelError
from foretell.models.draft_heads.config import MtpConfig

from .layout import HeadFile, TensorLayout, layer_tensors

QWEN = {
    "embed_norm.weight": "pre_fc_norm_embedding.weight",
    "feature_norm.weight": "pre_fc_norm_hidden.weight",
    "fc.weight": "fc.weight",
    "norm.weight": "norm.weight",
}
DEEPSEEK = {
    "embed_norm.weight": "enorm.weight",
    "feature_norm.weight": "hnorm.weight",
    "fc.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
SPECULATORS = {
    "embed_norm.weight": "token_layernorm.weight",
    "feature_norm.weight": "hidden_layernorm.weight",
    "fc.weight": "input_proj.weight",
    "norm.weight": "final_layernorm.weight",
}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's own, in DeepSeek's modules


def mtp(file: HeadFile) -> TensorLayout:
    """Of several modules the first is served, and used again for each further token."""
    layers = file.target.layers
    for first, names, norm_output in (
        ("mtp.", QWEN, True),
        (f"layers.{layers}.", DEEPSEEK, False),
        ("mtp_layers.0.", SPECULATORS, True),
    ):
        if first + names["fc.weight"] in file.tensors:
            return _module(file, first, names, norm_output)
    raise ModelError(f"{file.where}: has no module for multi-token prediction; name a head that has, as mtp:FOLDER")


def _module(file: HeadFile, first: str, names: dict[str, str], norm_output: bool) -> TensorLayout:
    sizes = file.config.section("transformer_layer_config")
    inner = f"{first}layers.0" if names is QWEN else first.removesuffix(".")
    layer = file.layer(sizes if sizes.values else file.config, inner)
    layer = replace(layer, window=None)  # such a layer sees all, whatever the target's do
    head = MtpConfig(
        layer,
        file.target.vocab,
        file.target.width,
        (file.target.layers,),
        target_norm=True,
        norm_output=norm_output,
        embed_scale=file.target.embed_scale,
    )
    parts = {ours: (first + theirs,) for ours, theirs in names.items()} | layer_tensors(layer, 0, inner)
    used = {name for theirs in parts.values() for name in theirs}
    return TensorLayout("MTP", head, parts, spare=frozenset(set(file.tensors) - used))
