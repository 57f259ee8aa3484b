"""Which part of each tensor of a head a rank has: dealt as the target's are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from foretell.errors import RequestError

from .base import DraftHead
from .config import HeadConfig, MedusaConfig

STACKED = ("kv", "gate_up")  # of two that stand one under the other each is dealt


class Lazily(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for: so that a rank never holds more than one it has a part of."""

    def __init__(self, reads: Mapping[str, Callable[[], Tensor]]) -> None:
        self._reads = reads

    def __getitem__(self, name: str) -> Tensor:
        return self._reads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


def part_of_tensor(head: DraftHead[Any], name: str, tensor: Tensor) -> Tensor:
    """What `head` has of a tensor of the whole head."""
    if head.shard is None:
        return tensor
    layer, dim = head.config.layer, head.config.layer.head_dim
    heads, keys = (_times(deal(layer), dim) for deal in (head.shard.heads, head.shard.kv_heads))
    ffn, columns, outputs = head.shard.ffn(layer), head.columns_here, head.outputs_here
    rows = {"q": heads, "kv": keys, "gate_up": ffn, "fc": columns, "blocks": columns}
    rows |= {"embed": head.tokens_here, "markov_in": head.tokens_here}
    rows |= {"output": outputs, "outputs": outputs, "markov_out": outputs}
    sums = {"out": heads, "down": ffn}
    words = name.split(".")
    part, is_bias = words[-2] if words[0] == "layers" else words[0], words[-1] == "bias"
    if part in rows:
        pieces = tensor.chunk(2) if part in STACKED else (tensor,)
        return torch.cat([piece[rows[part].start : rows[part].stop] for piece in pieces])
    if part not in sums:
        return tensor
    if is_bias:  # of a sum over ranks, the first one's to add
        return tensor if head.shard.rank == 0 else torch.zeros_like(tensor)
    return tensor[:, sums[part].start : sums[part].stop]


def check_split_head(config: HeadConfig, size: int, name: str) -> None:
    """Refuse more ranks than there is something for."""
    most = min(config.layer.width, config.outputs)
    if not isinstance(config, MedusaConfig):
        most = min(most, config.layer.heads, config.layer.ffn)
    if size > most:
        words = f"the head {name} can be split into {most} parts, and there are {size} ranks; take {most} or fewer"
        raise RequestError("tensor_parallel_size", f"{words}, or another drafter")


def _times(run: range, size: int) -> range:
    return range(run.start * size, run.stop * size)
