"""Heads in files of our own: `config.json` and `model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from foretell.errors import ModelError
from foretell.models.sharding import Shard

from .base import DraftHead
from .block import BlockHead
from .config import (
    FILE,
    BlockConfig,
    DistilledConfig,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    MtpConfig,
    read_head_config,
)
from .distilled import DistilledHead
from .eagle import EagleHead
from .int8_io import pack_state, unpack_state
from .medusa import MedusaHead
from .mtp import MtpHead
from .sharding import part_of_tensor

WEIGHTS = "model.safetensors"


def make_head(config: HeadConfig, shard: Shard | None = None) -> DraftHead[Any]:
    """A head of that config, or a rank's part of it, its weights whatever was in memory."""
    if isinstance(config, EagleConfig):
        return EagleHead(config, shard)
    if isinstance(config, MtpConfig):
        return MtpHead(config, shard)
    if isinstance(config, BlockConfig):
        return BlockHead(config, shard)
    if isinstance(config, MedusaConfig):
        return MedusaHead(config, shard)
    if isinstance(config, DistilledConfig):
        return DistilledHead(config, shard)
    raise ModelError(f"no head is made of a {type(config).__name__}")


def write_head(head: DraftHead[Any], folder: Path, dtype: torch.dtype | None = None, packed: bool = False) -> None:
    """Config and weights, the latter in `dtype` where that is given, or packed into bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.own_state().items()}
    if dtype is not None:
        state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    save_file(pack_state(state) if packed else state, folder / WEIGHTS)
    head.config.write(folder)


def read_head(folder: Path) -> DraftHead[Any]:
    """What `write_head` wrote, in float32."""
    head = make_head(read_head_config(json.loads((folder / FILE).read_text())))
    try:
        state = unpack_state(load_file(folder / WEIGHTS))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    fill_head(head, state, str(folder))
    return head


def fill_head(head: DraftHead[Any], state: Mapping[str, torch.Tensor], where: str) -> None:
    """Put a file's tensors into the head: each that it has of its own, in its shape, and no other; into a rank's part
    of a head its part of each."""
    with torch.device("meta"):
        wanted = make_head(head.config).own_state()
    own = head.own_state()
    if missing := sorted(set(wanted) - set(state)):
        raise ModelError(f"{where}: tensor {missing[0]!r} is missing, {len(missing)} in all")
    if spare := sorted(set(state) - set(wanted)):
        raise ModelError(f"{where}: tensor {spare[0]!r} has no place in this head, {len(spare)} in all")
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            raise ModelError(
                f"{where}: tensor {name!r} has shape {list(tensor.shape)}, but the config asks for "
                f"{list(wanted[name].shape)}"
            )
        with torch.no_grad():
            own[name].copy_(part_of_tensor(head, name, tensor))
