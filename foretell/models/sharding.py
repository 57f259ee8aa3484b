"""Tensor-parallel sharding: a rank has whole groups of heads and ranges of feed-forward and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from foretell.errors import RequestError

from .config import ModelConfig

SPLIT_UNIT = 32  # columns that share a quantization scale on a CPU; ranges are multiples of it if large enough


class ShardableSizes(Protocol):
    """The sizes of a layer that can be sharded, of a model or a draft head."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def ffn(self) -> int: ...


class Ranks(Protocol):
    """Collective operations of the tensor-parallel ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, added in rank order, so that a row's result does not depend on the batch."""
        ...

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Return on rank 0 the concatenation of [rows, widths[rank]] of all ranks; on other ranks their own part."""
        ...


@dataclass(frozen=True)
class Shard:
    """One rank of `size`. The first ranks get more if something does not divide evenly."""

    rank: int
    size: int

    def kv_heads(self, config: ShardableSizes) -> range:
        """Return the KV heads of this rank. If there are more ranks than KV heads, several ranks have the same one."""
        if config.kv_heads >= self.size:
            return split_evenly(config.kv_heads, self.size, self.rank)
        head = self._shared_kv_head(config)
        return range(head, head + 1)

    def heads(self, config: ShardableSizes) -> range:
        """Return the query heads of this rank. Ranks with the same KV head divide its query heads."""
        group_size = config.heads // config.kv_heads
        if config.kv_heads >= self.size:
            keys = self.kv_heads(config)
            return range(keys.start * group_size, keys.stop * group_size)
        head = self._shared_kv_head(config)
        owners = split_evenly(self.size, config.kv_heads, head)
        own = split_evenly(group_size, len(owners), self.rank - owners.start)
        return range(head * group_size + own.start, head * group_size + own.stop)

    def _shared_kv_head(self, config: ShardableSizes) -> int:
        """Return the one KV head of this rank if there are more ranks than KV heads."""
        return next(
            head for head in range(config.kv_heads) if self.rank in split_evenly(self.size, config.kv_heads, head)
        )

    def ffn(self, config: ShardableSizes) -> range:
        return self.split(config.ffn)

    def vocab(self, config: ModelConfig) -> range:
        return self.split(config.vocab)

    def split(self, numbers: int) -> range:
        """Return the range of this rank out of `numbers` columns."""
        return split_in_units(numbers, self.size, self.rank)

    def local_config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of this rank's shard."""
        return replace(
            config,
            heads=len(self.heads(config)),
            kv_heads=len(self.kv_heads(config)),
            ffn=len(self.ffn(config)),
            vocab=len(self.vocab(config)),
        )

    @property
    def all_ranks(self) -> tuple[Shard, ...]:
        """Return the shards of all ranks, this one included."""
        return tuple(Shard(rank, self.size) for rank in range(self.size))


def check_tensor_parallel_size(config: ModelConfig, size: int) -> None:
    """Raise RequestError if the model cannot be split into this many ranks."""
    if size > 1 and config.full_qk_norm:
        words = f"{config.family} normalizes the queries of all heads together, which cannot be split; use 1"
        raise RequestError("tensor_parallel_size", words)
    if size > 1 and config.layer_sizes:
        raise RequestError(
            "tensor_parallel_size", f"{config.family} has layers of different sizes, which are not split; use 1"
        )
    most = min(config.heads, config.ffn, config.vocab)
    if size > most:
        words = f"{size} is more than this model can be split into; use {most} or fewer"
        raise RequestError("tensor_parallel_size", words)


def split_evenly(items: int, parts: int, index: int) -> range:
    """Return the range of rank `index` out of `items` split into `parts`; the first ranges are longer by one."""
    each, more = divmod(items, parts)
    start = index * each + min(index, more)
    return range(start, start + each + (index < more))


def split_in_units(numbers: int, size: int, rank: int) -> range:
    """Return a rank's range of columns, a multiple of SPLIT_UNIT if there are enough."""
    unit = SPLIT_UNIT if numbers >= SPLIT_UNIT * size else 1
    units = split_evenly(-(-numbers // unit), size, rank)
    return range(units.start * unit, min(units.stop * unit, numbers))
