"""Layouts of heads in files of other projects: our config, and a mapping of tensor names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretell.errors import ModelError, UnsupportedModelError
from foretell.models.config import ModelConfig
from foretell.models.config_fields import ConfigFields
from foretell.models.draft_heads.base import DraftHead
from foretell.models.draft_heads.config import HeadConfig, LayerConfig
from foretell.models.draft_heads.io import LazyTensors, fill_head, make_head
from foretell.models.layer_config import hf_rope
from foretell.models.sharding import Shard

if TYPE_CHECKING:
    from foretell.hub.tensor import LazyTensor

TensorNames = dict[str, tuple[str, ...]]

WRAPPERS = re.compile(r"^((model|language_model)\.)+")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class TensorLayout:
    """The config of a head and `tensors`: for each tensor of ours the names in the file that are stacked in it.

    `offsets` names the tensor with the difference between target id and draft index (d2t), `ids` one with the target
    ids themselves. `spare` are redundant tensors.
    """

    source: str  # name of the format
    config: HeadConfig
    tensors: Mapping[str, tuple[str, ...]]
    offsets: str | None = None
    ids: str | None = None
    spare: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class HeadFile:
    """Config and tensors of a head's folder, without prefixes of wrapper modules."""

    where: str
    config: ConfigFields
    tensors: Mapping[str, LazyTensor]
    target: ModelConfig

    @classmethod
    def of(
        cls, where: str, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], target: ModelConfig
    ) -> HeadFile:
        return cls(
            where, ConfigFields(config), {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}, target
        )

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise ModelError(f"{self.where}: tensor {name!r} is missing")
        return tuple(self.tensors[name].shape)

    def layer(self, config: ConfigFields, first: str, inputs: int | None = None) -> LayerConfig:
        """Return the config of the layer with tensor prefix `first`: sizes by config, options by tensors."""
        width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        activation = config.string("hidden_act", "silu")
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"hidden_act {activation!r} of a head is not supported")
        out = self.shape(f"{first}.self_attn.o_proj.weight")
        layer = LayerConfig(
            width=width,
            heads=heads,
            kv_heads=config.integer("num_key_value_heads", heads),
            head_dim=config.integer("head_dim", out[1] // heads),
            ffn=config.integer("intermediate_size"),
            norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=hf_rope(config, "full_attention", config.number("rope_theta", 10_000.0)),
            window=_window(config),
            activation="gelu_tanh" if ACTIVATIONS[activation] == "gelu_tanh" else "silu",
            qk_norm=f"{first}.self_attn.q_norm.weight" in self.tensors,
            qkv_bias=f"{first}.self_attn.q_proj.bias" in self.tensors,
            out_bias=f"{first}.self_attn.o_proj.bias" in self.tensors,
            mlp_bias=f"{first}.mlp.down_proj.bias" in self.tensors,
        )
        if self.shape(f"{first}.self_attn.q_proj.weight") != (heads * layer.head_dim, inputs or width):
            raise ModelError(f"{self.where}: {first}.self_attn.q_proj.weight does not have the size of its config")
        return layer


def _window(config: ConfigFields) -> int | None:
    """Return the sliding window of all layers; layers that differ are not supported."""
    types = set(config.strings("layer_types"))
    if "sliding_attention" not in types:
        return None
    if len(types) > 1:
        raise UnsupportedModelError("draft heads with both full and sliding attention layers are not supported")
    return config.integer("sliding_window")


def layer_tensors(
    layer: LayerConfig, index: int, first: str, input_norm: str | None = "input_layernorm"
) -> TensorNames:
    """Return the tensor names of a decoder layer with tensor prefix `first`."""
    ours, attn, mlp = f"layers.{index}", f"{first}.self_attn", f"{first}.mlp"
    tensors: TensorNames = {f"{ours}.ffn_norm.weight": (f"{first}.post_attention_layernorm.weight",)}
    if input_norm is not None:
        tensors[f"{ours}.attention_norm.weight"] = (f"{first}.{input_norm}.weight",)
    kinds = {
        "attention.q": ((f"{attn}.q_proj",), layer.qkv_bias),
        "attention.kv": ((f"{attn}.k_proj", f"{attn}.v_proj"), layer.qkv_bias),
        "attention.out": ((f"{attn}.o_proj",), layer.out_bias),
        "ffn.gate_up": ((f"{mlp}.gate_proj", f"{mlp}.up_proj"), layer.mlp_bias),
        "ffn.down": ((f"{mlp}.down_proj",), layer.mlp_bias),
    }
    for name, (theirs, bias) in kinds.items():
        for kind in ("weight", "bias") if bias else ("weight",):
            tensors[f"{ours}.{name}.{kind}"] = tuple(f"{each}.{kind}" for each in theirs)
    if layer.qk_norm:
        tensors |= {f"{ours}.attention.{n}.weight": (f"{attn}.{n}.weight",) for n in ("q_norm", "k_norm")}
    return tensors


def fill(layout: TensorLayout, file: HeadFile, shard: Shard | None = None) -> DraftHead[Any]:
    """Load a head, or a rank's shard. Raise ModelError for a tensor that is neither mapped nor redundant."""
    used = {name for names in layout.tensors.values() for name in names} | layout.spare
    used |= {name for name in (layout.offsets, layout.ids) if name is not None}
    if unknown := sorted(set(file.tensors) - used):
        raise ModelError(f"{file.where}: tensor {unknown[0]!r} does not belong to a head in {layout.source} format")
    reads: dict[str, Callable[[], Tensor]] = {
        ours: partial(_read, file, ours, theirs, layout.config.vocab) for ours, theirs in layout.tensors.items()
    }
    if (ids := draft_ids(layout, file)) is not None:
        reads["draft_ids"] = lambda: ids
    head = make_head(layout.config, shard)
    fill_head(head, LazyTensors(reads), file.where, layout.tensors)
    return head


def _read(file: HeadFile, ours: str, theirs: tuple[str, ...], vocab: int) -> Tensor:
    found = _stacked(file, theirs)
    if ours == "token_ordering" and not torch.equal(found.long().sort().values, torch.arange(vocab)):
        raise ModelError(f"{file.where}: tensor {theirs[0]!r} does not have each token of the vocabulary once")
    return _fitted(found, vocab) if ours in ("embed", "markov_in") else found  # padded vocabularies differ in length


def _stacked(file: HeadFile, names: tuple[str, ...]) -> Tensor:
    found = []
    for name in names:
        file.shape(name)
        found.append(file.tensors[name].load())
    if len({tuple(tensor.shape[1:]) for tensor in found}) > 1 or not all(tensor.dim() for tensor in found):
        each = ", ".join(f"{name!r} {list(tensor.shape)}" for name, tensor in zip(names, found, strict=True))
        raise ModelError(f"{file.where}: these tensors have shapes that do not belong together: {each}")
    return found[0] if len(found) == 1 else torch.cat(found)


def _fitted(rows: Tensor, vocab: int) -> Tensor:
    missing = vocab - len(rows)
    return rows[:vocab] if missing <= 0 else torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])


def draft_vocab(file: HeadFile) -> int | None:
    """Return the size of the draft vocabulary; None: all tokens of the target."""
    if "d2t" not in file.tensors:
        return None
    count = file.shape("d2t")[0]
    total = file.shape("t2d")[0] if "t2d" in file.tensors else file.target.vocab
    return None if count == total else count


def draft_ids(layout: TensorLayout, file: HeadFile) -> Tensor | None:
    """Return the target ids of the draft vocabulary, ascending; None if it has all tokens."""
    if layout.config.draft_vocab is None:
        return None
    if layout.ids is not None:
        ids = file.tensors[layout.ids].load().long()
    else:
        if layout.offsets is None or layout.offsets not in file.tensors:
            raise ModelError(f"{file.where}: has no mapping (d2t) of its {layout.config.draft_vocab} draft tokens")
        offsets = file.tensors[layout.offsets].load().long()
        ids = torch.arange(len(offsets)) + offsets
    if not bool((ids.diff() > 0).all()) or not 0 <= int(ids[0]) <= int(ids[-1]) < layout.config.vocab:
        raise ModelError(f"{file.where}: the draft vocabulary is not an ascending list of target ids")
    return ids


def own_or_shared(layout: TensorLayout, file: HeadFile) -> TensorLayout:
    """Return the layout with embedding and LM head from the file if it has them, else shared with the target."""
    tensors, config = dict(layout.tensors), layout.config
    if "embed_tokens.weight" in file.tensors:
        tensors["embed"] = ("embed_tokens.weight",)
        config = replace(config, own_embed=True)
    if "lm_head.weight" in file.tensors:
        tensors["output.weight"] = ("lm_head.weight",)
        config = replace(config, own_output=True)
    return replace(layout, tensors=tensors, config=config)
