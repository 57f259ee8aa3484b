"""Draft heads to train for a target: shape, draft vocabulary, and weights initialized from the target's layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.errors import RequestError
from foretell.models.config import ModelConfig
from foretell.models.decoder import Block, Decoder
from foretell.models.draft_heads import (
    BlockConfig,
    DistilledConfig,
    DraftHead,
    EagleConfig,
    HeadConfig,
    LayerConfig,
    MedusaConfig,
    TargetWeights,
    make_head,
    read_head,
    read_head_config,
)
from foretell.models.draft_heads.config import FILE as HEAD_FILE
from foretell.models.draft_heads.layer import HeadLayer

from .settings import TrainConfig

DRAFT_VOCAB = 8192  # tokens
LAYERS = {"eagle": 1, "block": 2, "medusa": 1, "distill": 4, "streaming": 1}
DRAFT_TOKENS = {"eagle": 5, "block": 7, "medusa": 3, "distill": 5, "streaming": 3}
DEFAULT_OPTIMIZERS = {"eagle": "muon", "block": "muon", "medusa": "muon", "distill": "muon", "streaming": "adamw"}
LEARNING_RATES = {
    "muon": {"eagle": 1e-2, "block": 1e-2, "medusa": 1e-2, "distill": 6e-3, "streaming": 1e-3},
    "adamw": {"eagle": 1.5e-3, "block": 1.5e-3, "medusa": 2e-3, "distill": 1e-3, "streaming": 2e-4},
}
MARKOV_RANK = 32
HEAD_KINDS = {"eagle": "eagle", "block": "block", "medusa": "medusa", "distill": "distilled", "streaming": "medusa"}
LOOK_BACK = 8  # most recent tokens whose embeddings a block head reads with the hidden states, so that it can copy
EMBEDDING_INIT_SCALE = 0.1  # of copied weights that read the embedding, an input the target's layer never had


def layer_config(target: ModelConfig) -> LayerConfig:
    """Return the config of a head layer with the shape of the target's layers."""
    return LayerConfig(
        target.width,
        target.heads,
        target.kv_heads,
        target.head_dim,
        target.ffn,
        target.norm_eps,
        target.ropes[0],
        activation=target.activation,
    )


def with_head_shape(kind: str, config: TrainConfig) -> TrainConfig:
    """Return the config with the shape of the --init head, if any; refuse flags that contradict it."""
    if config.init is None:
        return config
    head = _read_config(config.init)
    if head.kind != HEAD_KINDS[kind]:
        raise RequestError("init", f"{config.init} has a {head.kind} head; {kind} needs a {HEAD_KINDS[kind]} head")
    shape = _shape_flags(head)
    for name, value in shape.items():
        given = getattr(config, name)
        same = config.hidden_layers == head.hidden_layers if name == "taps" else given == value
        if given is not None and not same:
            raise RequestError(name, f"is {given} but {config.init} has {value}; leave out this flag, or --init")
    return replace(config, **shape)


def _shape_flags(head: HeadConfig) -> dict[str, Any]:
    """Return a head's shape as training flags."""
    found: dict[str, Any] = {"layers": getattr(head, "layers", 1)}
    if isinstance(head, EagleConfig | BlockConfig):
        found["taps"] = ",".join(str(layer) for layer in head.hidden_layers)
    if isinstance(head, BlockConfig):
        found |= {"draft_tokens": head.block, "markov_rank": head.markov_rank}
    if isinstance(head, MedusaConfig):
        found["draft_tokens"] = head.heads
    return found


def _read_config(folder: str) -> HeadConfig:
    try:
        content = json.loads((Path(folder) / HEAD_FILE).read_text())
    except (OSError, ValueError) as error:
        raise RequestError("init", f"there is no head in {folder}: {error}; name a trained head's folder") from None
    if not isinstance(content, dict):
        raise RequestError("init", f"{folder}/{HEAD_FILE} describes no head; give the folder of a trained head")
    return read_head_config(content)


def head_config(kind: str, target: ModelConfig, config: TrainConfig, outputs: int, name: str) -> HeadConfig:
    """Return the config of a head; `outputs` is the size of its draft vocabulary, `name` the target's."""
    shared: dict[str, Any] = {
        "layer": layer_config(target),
        "vocab": target.vocab,
        "target_width": target.width,
        "draft_vocab": outputs if outputs < target.vocab else None,
        "embed_scale": target.embed_scale,
        "target": name,
    }
    layers, draft_tokens = config.layers or LAYERS[kind], config.draft_tokens or DRAFT_TOKENS[kind]
    taps = config.hidden_layers or default_hidden_layers(target.layers)
    if kind == "eagle":
        # The norms of EAGLE-3.1. The residual stays as in EAGLE-3, which every engine supports.
        return EagleConfig(**shared, hidden_layers=taps, layers=layers, fc_norm=True, norm_output=True)
    if kind == "block":
        rank = MARKOV_RANK if config.markov_rank is None else config.markov_rank
        look_back = LOOK_BACK if target.width % LOOK_BACK == 0 else 0
        return BlockConfig(
            **shared, hidden_layers=taps, layers=layers, block=draft_tokens, markov_rank=rank, confidence=True,
            confidence_with_markov=rank > 0, fc_norm=True, look_back=look_back, anchored=True,
        )  # fmt: skip
    if kind == "distill":
        return DistilledConfig(**shared, hidden_layers=(0,), layers=layers)
    assert kind in ("medusa", "streaming"), "there are no other kinds"
    return MedusaConfig(**shared, hidden_layers=(target.layers,), target_norm=True, heads=draft_tokens, layers=layers)


def default_hidden_layers(layers: int) -> tuple[int, ...]:
    """Return EAGLE-3's early, middle and late layers. Heads that read the same layers share the target's work."""
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 1)}))


def prepare_head(head: DraftHead[Any], target: Decoder, context: int) -> DraftHead[Any]:
    """Move a head to the target's device, share the target's weights with it, and size it for `context` tokens."""
    device = target.embed.device
    head.to(device, target.dtype)
    head.share_weights(TargetWeights.of(target))
    head.prepare(context)
    return head


def new_head(config: HeadConfig, ids: list[int], target: Decoder, seed: int, context: int) -> DraftHead[Any]:
    """Return an untrained head whose layers are copies of the target's."""
    head = make_head(config)
    if config.draft_vocab is not None:
        head.draft_ids.copy_(torch.tensor(ids))
    prepare_head(head, target, context)
    head.init_weights(torch.Generator(target.embed.device).manual_seed(seed))
    total = len(target.blocks)
    layers = spaced_layers(config.layers, total) if isinstance(config, DistilledConfig) else None
    with torch.no_grad():
        copy_target_layers(head, target, layers)
    return head


def spaced_layers(count: int, total: int) -> list[int]:
    """Return `count` evenly spaced layers, including the first and the last."""
    return [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]


def load_trained_head(
    folder: str, config: HeadConfig, ids: list[int] | None, target: Decoder, context: int
) -> DraftHead[Any]:
    """Load a trained head to continue from; `ids` is a new draft vocabulary, if it changes."""
    head = read_head(Path(folder))
    if isinstance(config, BlockConfig) and isinstance(head.config, BlockConfig):  # no flags choose these
        was = head.config
        config = replace(config, look_back=was.look_back, anchored=was.anchored, fc_norm=was.fc_norm)
    expected, found = (
        asdict(replace(each, accuracy=(), target="", draft_vocab=None)) for each in (config, head.config)
    )
    if others := ", ".join(name for name in expected if expected[name] != found.get(name)):
        raise RequestError("init", f"{folder} does not fit this target ({others} differ); leave --init out")
    if ids is not None and len(ids) != head.config.outputs:
        head = with_draft_vocab(head, config, ids)
    return prepare_head(head, target, context)


def with_draft_vocab(head: DraftHead[Any], config: HeadConfig, ids: list[int]) -> DraftHead[Any]:
    """Return a head with another draft vocabulary: other rows of the target's output matrix."""
    other = make_head(config)
    state = {name: part for name, part in head.own_state_dict().items() if name != "draft_ids"}
    if any(other.own_state_dict()[name].shape != part.shape for name, part in state.items()):
        raise RequestError("draft_vocab", "cannot change: this head has weights per token; leave --draft-vocab out")
    other.load_state_dict(state, strict=False)
    if config.draft_vocab is not None:
        other.draft_ids.copy_(torch.tensor(ids))
    return other


def copy_target_layers(head: DraftHead[Any], target: Decoder, layers: Sequence[int] | None = None) -> None:
    """Copy layers of the target into the head's layers; by default the target's last ones."""
    own = [each for each in getattr(head, "layers", []) if isinstance(each, HeadLayer)]
    total = len(target.blocks)
    sources = layers if layers is not None else range(max(0, total - len(own)), total)
    for layer, number in zip(own, sources, strict=False):
        block = target.blocks[number]
        assert isinstance(block, Block), "a decoder is made of blocks"
        _copy_layer(layer, block)
    if (norm := getattr(head, "norm", None)) is not None:
        norm.weight.copy_(target.norm.weight)


def _copy_layer(layer: HeadLayer, block: Block) -> None:
    attention, config = block.attention, block.attention.config
    assert attention.qkv.weight is not None, "the weights are not packed"
    rows = config.heads * config.head_dim
    _copy_matrix(layer.attention.q.weight, attention.qkv.weight[:rows])
    _copy_matrix(layer.attention.kv.weight, attention.qkv.weight[rows:])
    _copy_matrix(layer.attention.out.weight, attention.out.weight)
    _copy_matrix(layer.ffn.gate_up.weight, block.ffn.gate_up.weight)
    _copy_matrix(layer.ffn.down.weight, block.ffn.down.weight)
    if block.ffn_norm is not None:
        layer.ffn_norm.weight.copy_(block.ffn_norm.weight)
    if layer.attention_norm is not None and block.attention_norm is not None:
        layer.attention_norm.weight.copy_(block.attention_norm.weight)


def _copy_matrix(own: Tensor | None, source: Tensor | None) -> None:
    """Copy a matrix. Where the head's reads [embedding, hidden state], the embedding half gets a scaled copy."""
    assert own is not None and source is not None, "the weights are not packed"
    if own.shape == source.shape:
        own.copy_(source)
    elif own.shape[1] == 2 * source.shape[1]:
        own[:, source.shape[1] :].copy_(source)
        own[:, : source.shape[1]].copy_(source * EMBEDDING_INIT_SCALE)
