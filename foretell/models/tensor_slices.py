"""Which part of each tensor of a checkpoint a rank reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import ModelConfig
from .decoder import Decoder
from .sharding import Shard

if TYPE_CHECKING:
    from foretell.hub.tensor import LazyTensor

CHUNK = 1024  # rows of a tensor read at a time where only some of its columns are kept


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that a rank has: a run of rows, or of columns where the others have the rest of each sum."""

    rows: range | None = None
    columns: range | None = None

    def read(self, tensor: LazyTensor) -> Tensor:
        """That part alone."""
        if self.rows is not None:
            return tensor.rows(self.rows.start, self.rows.stop)
        if self.columns is None:
            return tensor.load()
        some = slice(self.columns.start, self.columns.stop)
        chunks = range(0, tensor.shape[0], CHUNK)
        return torch.cat([tensor.rows(at, at + CHUNK)[:, some] for at in chunks])


WHOLE = Cut()
NONE = Cut(rows=range(0))  # a bias that another rank adds


class Cuts:
    """Which part of each tensor this rank's decoder has."""

    def __init__(self, decoder: Decoder) -> None:
        self.shard, self.rows, self.columns = decoder.shard, dict[str, range](), dict[str, range]()
        if self.shard is not None:
            self._deal(self.shard, decoder.config)

    def _deal(self, shard: Shard, config: ModelConfig) -> None:
        heads, keys = (_times(part, config.head_dim) for part in (shard.heads(config), shard.kv_heads(config)))
        ffn = shard.ffn(config)
        self.rows = {"q": heads, "k": keys, "v": keys, "gate": ffn, "up": ffn, "head": shard.vocab(config)}
        self.columns = {"out": heads, "down": ffn}

    def of(self, part: str, kind: str) -> Cut:
        """`kind` is weight or bias. The bias of a sum over ranks is the first one's to add."""
        if self.shard is None or part in self.rows:
            return Cut(rows=self.rows.get(part))
        if kind == "weight":
            return Cut(columns=self.columns[part])
        return WHOLE if self.shard.rank == 0 else NONE


def _times(run: range, size: int) -> range:
    return range(run.start * size, run.stop * size)
