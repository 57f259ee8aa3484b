"""EAGLE heads in the formats of EAGLE, SpecForge and speculators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretell.errors import ModelError
from foretell.models.config import ModelConfig
from foretell.models.config_fields import ConfigFields
from foretell.models.draft_heads.config import EagleConfig

from .layout import HeadFile, TensorLayout, TensorNames, draft_vocab, layer_tensors, own_or_shared

LEGACY_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")


def default_hidden_layers(target: ModelConfig) -> tuple[int, ...]:
    """Return the default hidden layers of EAGLE-3."""
    return 2, target.layers // 2, target.layers - 3


def read_ids(config: ConfigFields, name: str) -> tuple[int, ...]:
    """Return layer numbers of the config; empty if absent."""
    ids = config.get(name, [])
    if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
        raise config.invalid(name, "a list of layer numbers")
    return tuple(ids)


def nested_hidden_layers(config: ConfigFields) -> tuple[int, ...]:
    """Return the layers of `eagle_config`. SpecForge counts layers from 0 (1 is h[2]); NVIDIA counts states."""
    ids = read_ids(config.section("eagle_config"), "eagle_aux_hidden_state_layer_ids")
    return tuple(each + 1 for each in ids) if ids[:1] == (1,) else ids


def eagle3(file: HeadFile) -> TensorLayout:
    """Read EAGLE-3 and SpecForge: a Llama config with the flags of the head."""
    config = file.config
    nested = config.section("eagle_config")
    hidden_layers = read_ids(config, "eagle_aux_hidden_state_layer_ids") or nested_hidden_layers(config)
    flags = {
        "norm_before_fc": config.flag("norm_before_fc", nested.flag("norm_before_fc")),
        "norm_before_residual": config.flag("norm_before_residual"),
        "norm_output": config.flag("norm_output"),
    }
    return _eagle3_layout(file, "EAGLE-3", config, hidden_layers or default_hidden_layers(file.target), flags)


def speculators(file: HeadFile) -> TensorLayout:
    """Read EAGLE-3 of speculators: a nested layer config; layer numbers count states."""
    config = file.config
    hidden_layers = read_ids(config, "eagle_aux_hidden_state_layer_ids") or default_hidden_layers(file.target)
    flags = {name: config.flag(name) for name in ("norm_before_fc", "norm_output")}
    flags["norm_before_residual"] = config.flag("norm_before_residual", True)
    return _eagle3_layout(file, "speculators", config.section("transformer_layer_config"), hidden_layers, flags)


def _eagle3_layout(
    file: HeadFile, source: str, config: ConfigFields, hidden_layers: tuple[int, ...], flags: dict[str, Any]
) -> TensorLayout:
    first = "midlayer" if "midlayer.hidden_norm.weight" in file.tensors else "layers.0"
    width = config.integer("hidden_size")
    layer = file.layer(config, first, 2 * width)
    layers = 1 + sum(f"layers.{i}.mlp.down_proj.weight" in file.tensors for i in range(1, 65))
    norms = [f"fc_norm.{i}.weight" for i in range(len(hidden_layers))]
    norms = [name for name in (*norms, *LEGACY_NORMS) if name in file.tensors]
    head = EagleConfig(
        layer,
        file.target.vocab,
        file.target.width,
        hidden_layers,
        draft_vocab=draft_vocab(file),
        layers=layers,
        fc_bias="fc.bias" in file.tensors,
        fc_norm=bool(norms),
        **flags,
    )
    if file.shape("fc.weight") != (width, len(hidden_layers) * file.target.width):
        raise ModelError(
            f"{file.where}: fc.weight is {list(file.shape('fc.weight'))}, but "
            f"{len(hidden_layers)} hidden layers of a target of width "
            f"{file.target.width} were expected; is it a head for this target?"
        )
    tensors = layer_tensors(layer, 0, first, None)
    for i in range(1, layers):
        # In SGLang layers after the first name their only norm like the first layer does.
        name = "input_layernorm" if f"layers.{i}.input_layernorm.weight" in file.tensors else "hidden_norm"
        tensors |= layer_tensors(layer, i, f"layers.{i}", name)
    tensors |= {
        "fc.weight": ("fc.weight",),
        "embed_norm.weight": (f"{first}.input_layernorm.weight",),
        "feature_norm.weight": (f"{first}.hidden_norm.weight",),
        "norm.weight": ("norm.weight",),
    }
    tensors |= {"fc.bias": ("fc.bias",)} if head.fc_bias else {}
    tensors |= {"fc_norm.weight": ("input_norm.weight",)} if head.norm_before_fc else {}
    tensors |= {f"tap_norms.{i}.weight": (name,) for i, name in enumerate(norms)}
    return own_or_shared(TensorLayout(source, head, tensors, "d2t", spare=frozenset({"d2t", "t2d"})), file)


def eagle1(file: HeadFile) -> TensorLayout:
    """Read EAGLE-1 and -2: a projection of [embedding, normalized last state], one layer, no final norm."""
    config = file.config.section("model") if file.config.section("model").values else file.config
    layer = file.layer(config, "layers.0")
    layers = sum(f"layers.{i}.mlp.down_proj.weight" in file.tensors for i in range(64))
    head = EagleConfig(
        layer,
        file.target.vocab,
        file.target.width,
        (file.target.layers,),
        target_norm=True,
        layers=layers,
        generation=1,
        fc_bias="fc.bias" in file.tensors,
    )
    tensors: TensorNames = {"fc.weight": ("fc.weight",)}
    tensors |= {"fc.bias": ("fc.bias",)} if head.fc_bias else {}
    tensors |= layer_tensors(layer, 0, "layers.0", None)
    for i in range(1, layers):
        tensors |= layer_tensors(layer, i, f"layers.{i}")
    layout = own_or_shared(TensorLayout("EAGLE", head, tensors, spare=frozenset({"lm_head.weight"})), file)
    # The head was trained with the target's LM head, so it is served with it, whatever the file has.
    kept = {name: names for name, names in layout.tensors.items() if name != "output.weight"}
    return replace(layout, config=replace(layout.config, own_output=False), tensors=kept)
