"""Multi-token prediction modules, in the target's checkpoint or a separate one."""

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


def mtp(file: HeadFile) -> TensorLayout:
    """Read the first of several modules, which is applied again for each further token."""
    layers = file.target.layers
    for first, names, norm_output in (
        ("mtp.", QWEN, True),
        (f"layers.{layers}.", DEEPSEEK, False),
        ("mtp_layers.0.", SPECULATORS, True),
    ):
        if first + names["fc.weight"] in file.tensors:
            return _module(file, first, names, norm_output)
    raise ModelError(f"{file.where}: no multi-token prediction module found; name a head as mtp:FOLDER")


def _module(file: HeadFile, first: str, names: dict[str, str], norm_output: bool) -> TensorLayout:
    sizes = file.config.section("transformer_layer_config")
    inner = f"{first}layers.0" if names is QWEN else first.removesuffix(".")
    layer = file.layer(sizes if sizes.values else file.config, inner)
    layer = replace(layer, window=None)  # MTP layers have full attention, whatever the target has
    head = MtpConfig(
        layer,
        file.target.vocab,
        file.target.width,
        (file.target.layers,),
        target_norm=True,
        norm_output=norm_output,
        embed_scale=file.target.embed_scale,
    )
    tensors = {ours: (first + theirs,) for ours, theirs in names.items()} | layer_tensors(layer, 0, inner)
    used = {name for theirs in tensors.values() for name in theirs}
    return TensorLayout("MTP", head, tensors, spare=frozenset(set(file.tensors) - used))
