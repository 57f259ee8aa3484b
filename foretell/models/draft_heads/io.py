"""Reads and writes heads in our own format: `config.json` and `model.safetensors`, optionally int8."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretell.errors import ModelError, RequestError
from foretell.models.draft_heads.assistant import AssistantHead
from foretell.models.draft_heads.base import DraftHead
from foretell.models.draft_heads.block import BlockHead
from foretell.models.draft_heads.config import (
    FILE,
    AssistantConfig,
    BlockConfig,
    DistilledConfig,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    MtpConfig,
    read_head_config,
)
from foretell.models.draft_heads.distilled import DistilledHead
from foretell.models.draft_heads.eagle import EagleHead
from foretell.models.draft_heads.medusa import MedusaHead
from foretell.models.draft_heads.mtp import MtpHead
from foretell.models.sharding import Shard

STACKED = ("kv", "gate_up")  # two stacked matrices, each of which is sharded


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, read on access, so that a rank never holds more than one complete tensor."""

    def __init__(self, reads: Mapping[str, Callable[[], Tensor]]) -> None:
        self._reads = reads

    def __getitem__(self, name: str) -> Tensor:
        return self._reads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


def shard_tensor(head: DraftHead[Any], name: str, tensor: Tensor) -> Tensor:
    """Return the shard of a tensor for the rank of `head`."""
    if head.shard is None:
        return tensor
    layer, dim = head.config.layer, head.config.layer.head_dim
    heads, keys = (_times(deal(layer), dim) for deal in (head.shard.heads, head.shard.kv_heads))
    ffn, columns, outputs = head.shard.ffn(layer), head.local_columns, head.local_outputs
    rows = {"q": heads, "kv": keys, "gate_up": ffn, "fc": columns, "blocks": columns}
    rows |= {"embed": head.local_tokens, "markov_in": head.local_tokens}
    rows |= {"output": outputs, "outputs": outputs, "markov_out": outputs}
    sums = {"out": heads, "down": ffn}
    words = name.split(".")
    part, is_bias = words[-2] if words[0] == "layers" else words[0], words[-1] == "bias"
    if part in rows:
        pieces = tensor.chunk(2) if part in STACKED else (tensor,)
        return torch.cat([piece[rows[part].start : rows[part].stop] for piece in pieces])
    if part not in sums:
        return tensor
    if is_bias:  # the bias of a row-parallel layer is on rank 0
        return tensor if head.shard.rank == 0 else torch.zeros_like(tensor)
    return tensor[:, sums[part].start : sums[part].stop]


def check_head_split(config: HeadConfig, size: int, name: str) -> None:
    """Raise RequestError if there are more ranks than the head can be split into."""
    most = min(config.layer.width, config.outputs)
    if not isinstance(config, MedusaConfig):
        most = min(most, config.layer.heads, config.layer.ffn)
    if size > most:
        words = f"the head {name} can be split into {most} parts, but there are {size} ranks; use {most} or fewer"
        raise RequestError("tensor_parallel_size", f"{words}, or another drafter")


def _times(run: range, size: int) -> range:
    return range(run.start * size, run.stop * size)


SCALE = ".scale"  # suffix of the tensor with the scales of an int8 matrix
STEPS = 127  # largest int8 value


def quantize_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantize matrices to int8 with one scale per row; other floats become float16, ids int32."""
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            packed[name] = tensor.to(torch.int32)
        elif tensor.dim() < 2:
            packed[name] = tensor.to(torch.float16)
        else:
            scale = (tensor.float().abs().amax(-1, keepdim=True) / STEPS).clamp_min(1e-12)
            packed[name] = (tensor.float() / scale).round().to(torch.int8)
            packed[name + SCALE] = scale[..., 0]
    return packed


def dequantize_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `quantize_state` up to half a step; tensors without scales are unchanged."""
    names = (name for name in state if not name.endswith(SCALE))
    return {name: dequantize(state[name], state.get(name + SCALE)) for name in names}


def dequantize(tensor: Tensor, scale: Tensor | None) -> Tensor:
    """Return one tensor dequantized, or unchanged without a scale."""
    return tensor if scale is None else tensor.float() * scale[..., None]


WEIGHTS = "model.safetensors"


def make_head(config: HeadConfig, shard: Shard | None = None) -> DraftHead[Any]:
    """Return a head of that config, or a rank's shard, with uninitialized weights."""
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
    if isinstance(config, AssistantConfig):
        return AssistantHead(config, shard)
    raise ModelError(f"unknown head config {type(config).__name__}")


def write_head(head: DraftHead[Any], folder: Path, dtype: torch.dtype | None = None, packed: bool = False) -> None:
    """Write config and weights, in `dtype` if given, or quantized to int8 if `packed`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.own_state_dict().items()}
    if dtype is not None:
        state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    save_file(quantize_state(state) if packed else state, folder / WEIGHTS)
    head.config.write(folder)


def read_head(folder: Path) -> DraftHead[Any]:
    """Read a head that `write_head` wrote, in float32."""
    head = make_head(read_head_config(json.loads((folder / FILE).read_text())))
    try:
        state = dequantize_state(load_file(folder / WEIGHTS))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    fill_head(head, state, str(folder))
    return head


def fill_head(
    head: DraftHead[Any],
    state: Mapping[str, torch.Tensor],
    where: str,
    file_names: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Load the tensors of a file into a head, or their shards into a rank's part of it.

    `file_names` are the names in the file of the tensors that are stacked in ours, where they differ.
    Raise ModelError unless the file has exactly the head's own tensors with the right shapes.
    """
    with torch.device("meta"):
        wanted = make_head(head.config).own_state_dict()
    own = head.own_state_dict()
    if missing := sorted(set(wanted) - set(state)):
        raise ModelError(f"{where}: tensor {missing[0]!r} is missing, {len(missing)} in all")
    if spare := sorted(set(state) - set(wanted)):
        raise ModelError(f"{where}: tensor {spare[0]!r} does not belong to this head, {len(spare)} in all")
    for name, tensor in state.items():
        stored = " and ".join(map(repr, (file_names or {}).get(name, (name,))))
        if tensor.shape != wanted[name].shape:
            raise ModelError(
                f"{where}: tensor {stored} has shape {list(tensor.shape)}, but the config requires "
                f"{list(wanted[name].shape)}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ModelError(f"{where}: tensor {stored} has values that are not finite: the file is damaged")
        with torch.no_grad():
            own[name].copy_(shard_tensor(head, name, tensor))
