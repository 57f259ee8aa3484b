"""Weights that draft heads share with the target: embedding, LM head and final norm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import ModelConfig
from .decoder import Decoder
from .draft_heads import TargetWeights
from .load import materialize, meta_model
from .weights import CHUNK, fill_weights, output_tensor

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint


def share_target_weights(checkpoint: Checkpoint, model: Decoder) -> TargetWeights:
    """Return the weights of the target that heads on the same device share; weights that are packed are read again.

    On a tensor-parallel rank a head's draft vocabulary is split evenly, independent of the target's shards, so rows of
    the LM head on other ranks are read from the checkpoint.
    """
    if model.shard is None:
        return TargetWeights.of(model) if model.can_share_weights else read_target_weights(checkpoint, model)

    def find(tokens: Tensor) -> Tensor:
        return read_output_rows(checkpoint, model.config, tokens.cpu()).to(model.embed)

    return replace(TargetWeights.of(model), find_output_rows=find)


def read_output_rows(checkpoint: Checkpoint, config: ModelConfig, tokens: Tensor) -> Tensor:
    """Return the LM head rows of `tokens`, ascending, reading CHUNK rows at a time."""
    tensor, found = output_tensor(checkpoint, config), []
    for first in range(0, tensor.shape[0], CHUNK):
        here = tokens[(tokens >= first) & (tokens < first + CHUNK)]
        if len(here):
            found.append(tensor.rows(first, first + CHUNK)[here - first])
    return torch.cat(found)


def read_target_weights(checkpoint: Checkpoint, model: Decoder) -> TargetWeights:
    """Read the complete embedding, LM head and final norm of the target again; `model` may be a shard of it."""
    ends = materialize(meta_model(_ends(model.config), model.dtype), model.embed.device)
    with torch.no_grad():
        fill_weights(ends, checkpoint)
    return TargetWeights.of(ends)


def target_weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of `read_target_weights`."""
    return sum(tensor.nbytes for tensor in meta_model(_ends(config), dtype).parameters())


def _ends(config: ModelConfig) -> ModelConfig:
    """Return the config without layers."""
    return replace(config, layers=0, ropes=(), windows=(), layer_sizes=(), per_layer_width=0)
