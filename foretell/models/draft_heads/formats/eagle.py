"""EAGLE heads as their authors, SpecForge and speculators write them."""

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
    """Where EAGLE-3 taps when its config does not say."""
    return 2, target.layers // 2, target.layers - 3


def read_ids(config: ConfigFields, name: str) -> tuple[int, ...]:
    """Layer numbers, as the config gives them; none where it does not."""
    ids = config.get(name, [])
    if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
        raise config.invalid(name, "a list of layer numbers")
    return tuple(ids)


def nested_hidden_layers(config: ConfigFields) -> tuple[int, ...]:
    """`eagle_config`: SpecForge counts layers from 0, so that 1 is what layer 1 gives, h[2]; NVIDIA counts states."""
    ids = read_ids(config.section("eagle_config"), "eagle_aux_hidden_state_layer_ids")
    return tuple(each + 1 for each in ids) if ids[:1] == (1,) else ids


def eagle3(file: HeadFile) -> TensorLayout:
    """EAGLE-3's own format and SpecForge's: a Llama's config with the head's flags in it."""
    config = file.config
    nested = config.section("eagle_config")
    taps = read_ids(config, "eagle_aux_hidden_state_layer_ids") or nested_hidden_layers(config)
    flags = {
        "norm_before_fc": config.flag("norm_before_fc", nested.flag("norm_before_fc")),
        "norm_before_residual": config.flag("norm_before_residual"),
        "norm_output": config.flag("norm_output"),
    }
    return _eagle3_layout(file, "EAGLE-3", config, taps or default_hidden_layers(file.target), flags)


def speculators(file: HeadFile) -> TensorLayout:
    """speculators' format of EAGLE-3: the layer's config stands apart, layer numbers count states."""
    config = file.config
    taps = read_ids(config, "eagle_aux_hidden_state_layer_ids") or default_hidden_layers(file.target)
    flags = {name: config.flag(name) for name in ("norm_before_fc", "norm_output")}
    flags["norm_before_residual"] = config.flag("norm_before_residual", True)
    return _eagle3_layout(file, "speculators", config.section("transformer_layer_config"), taps, flags)


def _eagle3_layout(
    file: HeadFile, source: str, config: ConfigFields, taps: tuple[int, ...], flags: dict[str, Any]
) -> TensorLayout:
    first = "midlayer" if "midlayer.hidden_norm.weight" in file.tensors else "layers.0"
    width = config.integer("hidden_size")
    layer = file.layer(config, first, 2 * width)
    layers = 1 + sum(f"layers.{i}.mlp.down_proj.weight" in file.tensors for i in range(1, 65))
    norms = [f"fc_norm.{i}.weight" for i in range(len(taps))]
    norms = [name for name in (*norms, *LEGACY_NORMS) if name in file.tensors]
    head = EagleConfig(
        layer,
        file.target.vocab,
        file.target.width,
        taps,
        draft_vocab=draft_vocab(file),
        layers=layers,
        fc_bias="fc.bias" in file.tensors,
        fc_norm=bool(norms),
        **flags,
    )
    if file.shape("fc.weight") != (width, len(taps) * file.target.width):
        raise ModelError(
            f"{file.where}: fc.weight is {list(file.shape('fc.weight'))}, but {len(taps)} taps of a target of width "
            f"{file.target.width} were expected; is it a head for this target?"
        )
    parts = layer_tensors(layer, 0, first, None)
    for i in range(1, layers):
        # SGLang's layers behind the first call their only norm by the first layer's name.
        name = "input_layernorm" if f"layers.{i}.input_layernorm.weight" in file.tensors else "hidden_norm"
        parts |= layer_tensors(layer, i, f"layers.{i}", name)
    parts |= {
        "fc.weight": ("fc.weight",),
        "embed_norm.weight": (f"{first}.input_layernorm.weight",),
        "feature_norm.weight": (f"{first}.hidden_norm.weight",),
        "norm.weight": ("norm.weight",),
    }
    parts |= {"fc.bias": ("fc.bias",)} if head.fc_bias else {}
    parts |= {"fc_norm.weight": ("input_norm.weight",)} if head.norm_before_fc else {}
    parts |= {f"tap_norms.{i}.weight": (name,) for i, name in enumerate(norms)}
    return own_or_shared(TensorLayout(source, head, parts, "d2t", spare=frozenset({"d2t", "t2d"})), file)


def eagle1(file: HeadFile) -> TensorLayout:
    """EAGLE-1 and -2: [embedding, the target's last normed state] projected, one layer, no norm behind it."""
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
    parts: TensorNames = {"fc.weight": ("fc.weight",)}
    parts |= {"fc.bias": ("fc.bias",)} if head.fc_bias else {}
    parts |= layer_tensors(layer, 0, "layers.0", None)
    for i in range(1, layers):
        parts |= layer_tensors(layer, i, f"layers.{i}")
    layout = own_or_shared(TensorLayout("EAGLE", head, parts, spare=frozenset({"lm_head.weight"})), file)
    # What was trained with the target's output is served with it, whatever else the file has.
    kept = {name: names for name, names in layout.tensors.items() if name != "output.weight"}
    return replace(layout, config=replace(layout.config, own_output=False), tensors=kept)
