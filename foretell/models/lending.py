"""What heads borrow of a target that lies on several ranks: read once more, whole, for the rank that guesses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .config import ModelConfig
from .decoder import Decoder
from .heads import Lender
from .load import sketch, take_memory
from .weights import fill_weights

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint


def read_lender(checkpoint: Checkpoint, model: Decoder) -> Lender:
    """The whole embedding, output and last norm of the target that `model` is a part of."""
    ends = take_memory(sketch(_ends(model.config), model.dtype), model.embed.device)
    with torch.no_grad():
        fill_weights(ends, checkpoint)
    return Lender.of(ends)


def lender_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What that takes."""
    return sum(tensor.nbytes for tensor in sketch(_ends(config), dtype).parameters())


def _ends(config: ModelConfig) -> ModelConfig:
    """A model with nothing between its ends."""
    return replace(config, layers=0, ropes=(), windows=())
