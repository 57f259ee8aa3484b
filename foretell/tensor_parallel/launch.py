"""Starting the other ranks of a model, and what is refused before."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.models.config import ModelConfig
from foretell.models.quantize import native_for
from foretell.models.sharding import Shard, check_tensor_parallel_size

from .messages import LaunchSpec, ModelShardSpec
from .tp_group import TensorParallelGroup

GIB = 1 << 30


def check_ranks(target: ModelConfig, device: torch.device, speculation: SpeculationConfig, ranks: int) -> None:
    """Refuse what cannot be split, before anything is started."""
    check_draft(speculation, ranks)
    if ranks == 1:
        return
    check_tensor_parallel_size(target, ranks)
    for name in re.split("[,+]", speculation.drafter):  # several to choose from, or several in one tree
        if name.strip().partition(":")[0] in ("self", "exit"):
            words = f"{name.strip()} runs the target's own layers, which lie on {ranks} ranks; take another drafter"
            raise RequestError("drafter", words)
    if device.type == "cuda":
        check_devices(device, ranks)


def check_devices(device: torch.device, ranks: int) -> None:
    """Ranks take the devices in order, each its own."""
    if device.index:
        raise RequestError("device", f"{ranks} ranks run on cuda:0 to cuda:{ranks - 1}; say cuda instead of {device}")
    if torch.cuda.device_count() < ranks:
        words = f"{ranks} ranks need a CUDA device each, and there are {torch.cuda.device_count()}"
        raise RequestError("tensor_parallel_size", words)


def check_draft(speculation: SpeculationConfig, ranks: int) -> None:
    """A draft model lies whole on the first rank, or is split as the target is."""
    size = speculation.draft_tensor_parallel_size
    if size not in (1, ranks):
        words = (
            f"must be 1, for a draft model that lies whole on the first rank, or {ranks}, as the target's; not {size}"
        )
        raise RequestError("draft_tensor_parallel_size", words if ranks > 1 else "must be 1: the target is not split")
    if size > 1 and speculation.draft_device is not None:
        raise RequestError("draft_device", "is for a draft model that is whole; leave draft_tensor_parallel_size out")


def start_team(parts: Sequence[ModelShardSpec], device: torch.device, ranks: int) -> TensorParallelGroup:
    """The other ranks; they load while this one does."""
    native_for(device)  # compiled once, and not by every rank
    threads = torch.get_num_threads()
    devices = [f"cuda:{rank}" if device.type == "cuda" else "cpu" for rank in range(ranks)]
    orders = [LaunchSpec(Shard(rank, ranks), devices[rank], threads, tuple(parts)) for rank in range(1, ranks)]
    return TensorParallelGroup(orders, device)


def ranks_words(weights: list[int]) -> str:
    """What each rank holds, in one line."""
    sizes = ", ".join(f"{size / GIB:.2f}" for size in weights)
    return f"{len(weights)} ranks hold {sizes} GiB of weights, {sum(weights) / GIB:.2f} GiB in all"
