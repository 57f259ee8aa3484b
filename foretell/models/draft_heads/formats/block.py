"""DFlash and DSpark heads in the formats of their authors and of speculators."""

from __future__ import annotations

from foretell.errors import ModelError, UnsupportedModelError
from foretell.models.config_fields import ConfigFields
from foretell.models.draft_heads.config import BlockConfig

from .eagle import read_ids
from .layout import HeadFile, TensorLayout, TensorNames, draft_vocab, layer_tensors, own_or_shared

ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def dflash(file: HeadFile) -> TensorLayout:
    """Read the format of z-lab and DeepSpec: layer numbers count from 0, so v is h[v + 1]."""
    config, nested = file.config, file.config.section("dflash_config")
    ids = read_ids(nested, "target_layer_ids") or read_ids(config, "target_layer_ids")
    if not ids:
        raise ModelError(f"{file.where}: the config does not state its hidden layers (target_layer_ids)")
    block = nested.get("block_size", config.get("block_size"))
    settings = ConfigFields({**config.values, **nested.values, "block_size": block})
    return _block(file, "DFlash", config, settings, tuple(each + 1 for each in ids), _is_dspark(file))


def speculators(file: HeadFile) -> TensorLayout:
    """Read the format of speculators: a nested layer config; layer numbers count states."""
    config = file.config
    hidden_layers = read_ids(config, "aux_hidden_state_layer_ids")
    if not hidden_layers:
        raise ModelError(f"{file.where}: the config does not state its hidden layers (aux_hidden_state_layer_ids)")
    anchor = config.flag("sample_from_anchor", config.string("speculators_model_type", "") == "dspark")
    return _block(file, "speculators", config.section("transformer_layer_config"), config, hidden_layers, anchor)


def _is_dspark(file: HeadFile) -> bool:
    return "markov_head.markov_w1.weight" in file.tensors


def _block(
    file: HeadFile,
    source: str,
    sizes: ConfigFields,
    settings: ConfigFields,
    hidden_layers: tuple[int, ...],
    anchor: bool,
) -> TensorLayout:
    if settings.string("markov_head_type", "vanilla") != "vanilla":
        raise UnsupportedModelError(f"{file.where}: unsupported Markov head type {settings.get('markov_head_type')!r}")
    layers = sum(f"layers.{i}.mlp.down_proj.weight" in file.tensors for i in range(64))
    layer = file.layer(sizes, "layers.0")
    has_confidence = "confidence_head.proj.weight" in file.tensors
    rank = file.shape("markov_head.markov_w1.weight")[1] if _is_dspark(file) else 0
    head = BlockConfig(
        layer,
        file.target.vocab,
        file.target.width,
        hidden_layers,
        draft_vocab=draft_vocab(file),
        layers=layers,
        block=settings.integer("block_size", most=1024),
        sample_from_anchor=settings.flag("sample_from_anchor", anchor),
        causal_in_block=settings.flag("causal_head")
        or (layer.window is not None and not settings.flag("sliding_window_non_causal")),
        mask_token=settings.integer("mask_token_id", least=0),
        markov_rank=rank,
        confidence=has_confidence,
        confidence_with_markov=has_confidence and file.shape("confidence_head.proj.weight")[1] > layer.width,
    )
    tensors: TensorNames = {
        "fc.weight": ("fc.weight",),
        "feature_norm.weight": ("hidden_norm.weight",),
        "norm.weight": ("norm.weight",),
    }
    tensors |= {ours: (alias,) for alias, plain in ALIASES.items() if alias in file.tensors for ours in _ours(plain)}
    for i in range(layers):
        tensors |= layer_tensors(layer, i, f"layers.{i}")
    if rank:
        tensors["markov_in"] = ("markov_head.markov_w1.weight",)
        tensors["markov_out.weight"] = ("markov_head.markov_w2.weight",)
    if has_confidence:
        tensors["surety.weight"], tensors["surety.bias"] = (
            ("confidence_head.proj.weight",),
            ("confidence_head.proj.bias",),
        )
    return own_or_shared(TensorLayout(source, head, tensors, "d2t", spare=frozenset({"d2t", "t2d"})), file)


def _ours(plain: str) -> tuple[str, ...]:
    return ("fc.weight",) if plain == "fc.weight" else ("feature_norm.weight",)
