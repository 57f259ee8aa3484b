"""A drafter to train, made for a target: its shape, its words, and weights that start from the target's own."""

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

DRAFT_VOCAB = 8192
LAYERS = {"eagle": 1, "block": 2, "medusa": 1, "distill": 4, "streaming": 1}
DRAFTED = {"eagle": 5, "block": 7, "medusa": 3, "distill": 5, "streaming": 3}
OPTIMIZED = {"eagle": "muon", "block": "muon", "medusa": "muon", "distill": "muon", "streaming": "adamw"}
RATES = {
    "muon": {"eagle": 1e-2, "block": 1e-2, "medusa": 1e-2, "distill": 6e-3, "streaming": 1e-3},
    "adamw": {"eagle": 1.5e-3, "block": 1.5e-3, "medusa": 2e-3, "distill": 1e-3, "streaming": 2e-4},
}
MARKOV_RANK = 32
HEADS = {"eagle": "eagle", "block": "block", "medusa": "medusa", "distill": "distilled", "streaming": "medusa"}
LOOK_BACK = 8  # tokens of a block's width: each of its places can find what once stood so far behind the anchor
LEAN = 0.1  # of a copied layer's part that reads the embedding, which the layer it is copied from never saw


def layer_config(target: ModelConfig) -> LayerConfig:
    """A layer as the target's are."""
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


def shaped(kind: str, config: TrainConfig) -> TrainConfig:
    """With the shape of the head that is gone on with, where there is one; flags that say another are refused."""
    if config.init is None:
        return config
    head = _config_in(config.init)
    if head.kind != HEADS[kind]:
        raise RequestError(
            "init", f"{config.init} has a head of the kind {head.kind}; {kind} goes on with {HEADS[kind]}"
        )
    found = _shape_of(head)
    for name, value in found.items():
        given = getattr(config, name)
        same = config.tap_list == head.hidden_layers if name == "taps" else given == value
        if given is not None and not same:
            raise RequestError(
                name, f"{given} is asked for and {config.init} has {value}; leave the flag out, or --init"
            )
    return replace(config, **found)


def _shape_of(head: HeadConfig) -> dict[str, Any]:
    """What flags say of a head, by their names."""
    found: dict[str, Any] = {"layers": getattr(head, "layers", 1)}
    if isinstance(head, EagleConfig | BlockConfig):
        found["taps"] = ",".join(str(tap) for tap in head.hidden_layers)
    if isinstance(head, BlockConfig):
        found |= {"draft_tokens": head.block, "markov_rank": head.markov_rank}
    if isinstance(head, MedusaConfig):
        found["draft_tokens"] = head.heads
    return found


def _config_in(folder: str) -> HeadConfig:
    try:
        said = json.loads((Path(folder) / HEAD_FILE).read_text())
    except (OSError, ValueError) as error:
        raise RequestError("init", f"there is no head in {folder}: {error}; give a folder that a run wrote") from None
    if not isinstance(said, dict):
        raise RequestError("init", f"{folder}/{HEAD_FILE} describes no head; give a folder that a run wrote")
    return read_head_config(said)


def head_config(kind: str, target: ModelConfig, config: TrainConfig, outputs: int, name: str) -> HeadConfig:
    """What the head is made of."""
    shared: dict[str, Any] = {
        "layer": layer_config(target),
        "vocab": target.vocab,
        "target_width": target.width,
        "draft_vocab": outputs if outputs < target.vocab else None,
        "embed_scale": target.embed_scale,
        "target": name,
    }
    layers, drafted = config.layers or LAYERS[kind], config.draft_tokens or DRAFTED[kind]
    taps = config.tap_list or default_taps(target.layers)
    if kind == "eagle":
        # The norms of 3.1; the residual stays as it is, which every server of EAGLE-3 heads knows.
        return EagleConfig(**shared, hidden_layers=taps, layers=layers, fc_norm=True, norm_output=True)
    if kind == "block":
        rank = MARKOV_RANK if config.markov_rank is None else config.markov_rank
        look_back = LOOK_BACK if target.width % LOOK_BACK == 0 else 0
        return BlockConfig(
            **shared, hidden_layers=taps, layers=layers, block=drafted, markov_rank=rank, confidence=True,
            confidence_with_markov=rank > 0, fc_norm=True, look_back=look_back, anchored=True,
        )  # fmt: skip
    if kind == "distill":
        return DistilledConfig(**shared, hidden_layers=(0,), layers=layers)
    assert kind in ("medusa", "streaming"), "there are no other kinds"
    return MedusaConfig(**shared, hidden_layers=(target.layers,), target_norm=True, heads=drafted, layers=layers)


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE's three, early, middle and late: heads that share taps cost the target less."""
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 1)}))


def ready_head(head: DraftHead[Any], target: Decoder, context: int) -> DraftHead[Any]:
    """With what it borrows, on the target's device, to be trained on texts of up to `context` tokens."""
    device = target.embed.device
    head.to(device, target.dtype)
    head.share_weights(TargetWeights.of(target))
    head.prepare(context)
    return head


def new_head(said: HeadConfig, ids: list[int], target: Decoder, seed: int, context: int) -> DraftHead[Any]:
    """A head with weights to start from; layers start as the target's last ones."""
    head = make_head(said)
    if said.draft_vocab is not None:
        head.draft_ids.copy_(torch.tensor(ids))
    ready_head(head, target, context)
    head.init_weights(torch.Generator(target.embed.device).manual_seed(seed))
    with torch.no_grad():
        inherit(head, target, spaced(said.layers, len(target.blocks)) if isinstance(said, DistilledConfig) else None)
    return head


def spaced(count: int, total: int) -> list[int]:
    """So many of a target's layers, the first and the last among them."""
    return [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]


def opened_head(folder: str, said: HeadConfig, ids: list[int] | None, target: Decoder, context: int) -> DraftHead[Any]:
    """A head that was trained before, to go on with; `ids` are the words it is to have where those are others."""
    head = read_head(Path(folder))
    if isinstance(said, BlockConfig) and isinstance(head.config, BlockConfig):  # of these there is no choice
        was = head.config
        said = replace(said, look_back=was.look_back, anchored=was.anchored, fc_norm=was.fc_norm)
    mine, theirs = (asdict(replace(each, accuracy=(), target="", draft_vocab=None)) for each in (said, head.config))
    if others := ", ".join(name for name in mine if mine[name] != theirs.get(name)):
        raise RequestError("init", f"{folder} is not made as heads for this target are ({others}); leave it out")
    if ids is not None and len(ids) != head.config.outputs:
        head = reworded(head, said, ids)
    return ready_head(head, target, context)


def reworded(head: DraftHead[Any], said: HeadConfig, ids: list[int]) -> DraftHead[Any]:
    """The same head with other words to guess: its states are as good for other rows of the target's."""
    other = make_head(said)
    state = {name: part for name, part in head.own_state_dict().items() if name != "draft_ids"}
    if any(other.own_state_dict()[name].shape != part.shape for name, part in state.items()):
        raise RequestError("draft_vocab", "this head has weights for each of its words; leave --draft-vocab out")
    other.load_state_dict(state, strict=False)
    if said.draft_vocab is not None:
        other.draft_ids.copy_(torch.tensor(ids))
    return other


def inherit(head: DraftHead[Any], target: Decoder, layers: Sequence[int] | None = None) -> None:
    """Copy the target's layers into the head's, the last of them where none are named."""
    own = [each for each in getattr(head, "layers", []) if isinstance(each, HeadLayer)]
    total = len(target.blocks)
    which = layers if layers is not None else range(max(0, total - len(own)), total)
    for mine, number in zip(own, which, strict=False):
        block = target.blocks[number]
        assert isinstance(block, Block), "a decoder is made of blocks"
        _copy(mine, block)
    if (norm := getattr(head, "norm", None)) is not None:
        norm.weight.copy_(target.norm.weight)


def _copy(mine: HeadLayer, theirs: Block) -> None:
    attention, config = theirs.attention, theirs.attention.config
    assert attention.qkv.weight is not None, "weights are not packed away"
    rows = config.heads * config.head_dim
    _fill(mine.attention.q.weight, attention.qkv.weight[:rows])
    _fill(mine.attention.kv.weight, attention.qkv.weight[rows:])
    _fill(mine.attention.out.weight, attention.out.weight)
    _fill(mine.ffn.gate_up.weight, theirs.ffn.gate_up.weight)
    _fill(mine.ffn.down.weight, theirs.ffn.down.weight)
    mine.ffn_norm.weight.copy_(theirs.ffn_norm.weight)
    if mine.attention_norm is not None:
        mine.attention_norm.weight.copy_(theirs.attention_norm.weight)


def _fill(mine: Tensor | None, theirs: Tensor | None) -> None:
    """A matrix; where the head's reads [embedding, feature], the feature's half is the target's."""
    assert mine is not None and theirs is not None, "weights are not packed away"
    if mine.shape == theirs.shape:
        mine.copy_(theirs)
    elif mine.shape[1] == 2 * theirs.shape[1]:
        mine[:, theirs.shape[1] :].copy_(theirs)
        mine[:, : theirs.shape[1]].copy_(theirs * LEAN)
