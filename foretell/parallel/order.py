"""What a process is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.hub import open_checkpoint
from foretell.kernels.rounded import Rounding
from foretell.models.decoder import Decoder
from foretell.models.heads import Head
from foretell.models.layers import Linear
from foretell.models.load import load_model
from foretell.models.quantize import Bits
from foretell.models.shard import Shard
from foretell.models.variants import quantize_weights, round_weights


@dataclass(frozen=True)
class Part:
    """A model that is split: how its weights run, and the room each rank gives its cache."""

    checkpoint: Path
    dtype: torch.dtype
    bits: Bits | None
    rounding: Rounding | None
    pages: int
    page_size: int
    context: int
    heads: tuple[Path | None, ...] = ()  # folders of those that are split with it; None: in its own checkpoint

    def load(self, shard: Shard, device: torch.device) -> Decoder:
        """A rank's part of it, in floats."""
        return load_model(open_checkpoint(self.checkpoint), self.dtype, device, shard)

    def ready(self, model: Decoder) -> Decoder:
        """The loaded part with its weights as they will run."""
        if self.rounding is not None:
            return round_weights(model, self.rounding)
        return model if self.bits is None else quantize_weights(model, self.bits)


@dataclass(frozen=True)
class Order:
    """Which rank it is, where it runs, and what of: the target, and a draft model where that is split, too."""

    shard: Shard
    device: str
    threads: int
    parts: tuple[Part, ...]


def head_bytes(head: Head[Any], target: Decoder) -> int:
    """What a head's weights take in memory now, without those that are the target's."""
    packed = {id(each): each.native.bytes for each in head.modules() if isinstance(each, Linear) and each.native}
    packed.pop(id(target.head), None)
    shared = {id(tensor) for tensor in target.parameters()}
    return sum(packed.values()) + sum(tensor.nbytes for tensor in head.parameters() if id(tensor) not in shared)


def held_bytes(model: Decoder) -> int:
    """What a model's weights take in memory now, packed ones included."""
    packed = sum(each.native.bytes for each in model.modules() if isinstance(each, Linear) and each.native is not None)
    return packed + sum(tensor.nbytes for tensor in model.parameters())
