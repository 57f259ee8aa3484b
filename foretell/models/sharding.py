"""Which part of a model one of several ranks has: whole groups of heads, a run of the feed-forward, a run of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from foretell.errors import RequestError

from .config import ModelConfig

SPLIT_UNIT = 32  # numbers that are rounded together on a CPU: runs are whole ones where there are enough


class ShardableSizes(Protocol):
    """Sizes of a layer that is dealt: a model's or a head's."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def ffn(self) -> int: ...


class Ranks(Protocol):
    """How ranks tell each other what each has worked out."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have, added in their order, so that a row's bits hang on itself alone."""
        ...

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """What all ranks have, [rows, widths[rank]] each, side by side at the first; the others get their own back."""
        ...


@dataclass(frozen=True)
class Shard:
    """One rank of `size`. The first ones have more where things do not divide."""

    rank: int
    size: int

    def kv_heads(self, config: ShardableSizes) -> range:
        """Key heads go in whole groups; where ranks outnumber them, several ranks have the same one."""
        if config.kv_heads >= self.size:
            return split_evenly(config.kv_heads, self.size, self.rank)
        head = self._key_head(config)
        return range(head, head + 1)

    def heads(self, config: ShardableSizes) -> range:
        """The query heads that read those key heads; ranks with the same key head share its query heads."""
        share = config.heads // config.kv_heads
        if config.kv_heads >= self.size:
            keys = self.kv_heads(config)
            return range(keys.start * share, keys.stop * share)
        head = self._key_head(config)
        owners = split_evenly(self.size, config.kv_heads, head)
        own = split_evenly(share, len(owners), self.rank - owners.start)
        return range(head * share + own.start, head * share + own.stop)

    def _key_head(self, config: ShardableSizes) -> int:
        """Where ranks outnumber key heads: the one this rank has."""
        return next(
            head for head in range(config.kv_heads) if self.rank in split_evenly(self.size, config.kv_heads, head)
        )

    def ffn(self, config: ShardableSizes) -> range:
        return self.split(config.ffn)

    def vocab(self, config: ModelConfig) -> range:
        return self.split(config.vocab)

    def split(self, numbers: int) -> range:
        """Of so many numbers in a row those that lie here."""
        return split_in_units(numbers, self.size, self.rank)

    def local_config(self, config: ModelConfig) -> ModelConfig:
        """A config of what this rank has."""
        return replace(
            config,
            heads=len(self.heads(config)),
            kv_heads=len(self.kv_heads(config)),
            ffn=len(self.ffn(config)),
            vocab=len(self.vocab(config)),
        )

    @property
    def all_ranks(self) -> tuple[Shard, ...]:
        """All ranks of this model, itself included."""
        return tuple(Shard(rank, self.size) for rank in range(self.size))


def check_tensor_parallel_size(config: ModelConfig, size: int) -> None:
    """Refuse more ranks than there is something for."""
    most = min(config.heads, config.ffn, config.vocab)
    if size > most:
        words = f"{size} is more than this model can be split into; take {most} or fewer"
        raise RequestError("tensor_parallel_size", words)


def split_evenly(things: int, hands: int, hand: int) -> range:
    """The things that go to one hand: runs in order, the first ones longer by one where they do not divide."""
    each, more = divmod(things, hands)
    start = hand * each + min(hand, more)
    return range(start, start + each + (hand < more))


def split_in_units(numbers: int, size: int, rank: int) -> range:
    """A rank's run of numbers, in whole units where there are enough of them."""
    unit = SPLIT_UNIT if numbers >= SPLIT_UNIT * size else 1
    units = split_evenly(-(-numbers // unit), size, rank)
    return range(units.start * unit, min(units.stop * unit, numbers))
