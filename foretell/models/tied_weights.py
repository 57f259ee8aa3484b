"""What heads borrow of a target, wherever that lies."""

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
    """To heads that lie where the target does; what is packed away is read once more. Which tokens a head can guess is
    dealt evenly, wherever the target has their rows: those are read, too."""
    if model.shard is None:
        return TargetWeights.of(model) if model.can_share_weights else read_target_weights(checkpoint, model)

    def find(tokens: Tensor) -> Tensor:
        return read_output_rows(checkpoint, model.config, tokens.cpu()).to(model.embed)

    return replace(TargetWeights.of(model), find_output_rows=find)


def read_output_rows(checkpoint: Checkpoint, config: ModelConfig, tokens: Tensor) -> Tensor:
    """Of some tokens, rising; a thousand rows are read at a time."""
    tensor, found = output_tensor(checkpoint, config), []
    for first in range(0, tensor.shape[0], CHUNK):
        here = tokens[(tokens >= first) & (tokens < first + CHUNK)]
        if len(here):
            found.append(tensor.rows(first, first + CHUNK)[here - first])
    return torch.cat(found)


def read_target_weights(checkpoint: Checkpoint, model: Decoder) -> TargetWeights:
    """The whole embedding, output and last norm of the target that `model` is, or a part of, read once more."""
    ends = materialize(meta_model(_ends(model.config), model.dtype), model.embed.device)
    with torch.no_grad():
        fill_weights(ends, checkpoint)
    return TargetWeights.of(ends)


def target_weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What that takes."""
    return sum(tensor.nbytes for tensor in meta_model(_ends(config), dtype).parameters())


def _ends(config: ModelConfig) -> ModelConfig:
    """A model with nothing between its ends."""
    return replace(config, layers=0, ropes=(), windows=())
