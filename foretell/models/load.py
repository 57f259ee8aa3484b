"""A checkpoint on disk becomes a decoder in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from foretell.errors import RequestError
from foretell.options import nearest

from .config import ModelConfig
from .decoder import Decoder
from .hf_config import read_config
from .sharding import Shard
from .weights import check_tensors, fill_weights

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GGUF_FILE_TYPES = {0: torch.float32, 1: torch.float16, 32: torch.bfloat16}  # all others are quantized


def load_model(
    checkpoint: Checkpoint,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    shard: Shard | None = None,
) -> Decoder:
    """The checkpoint's decoder with its weights, or a rank's part of them, not yet prepared to run."""
    device = torch.device(device)
    config, dtype = read_config(checkpoint), choose_dtype(checkpoint, dtype, device)
    check_tensors(meta_model(config, dtype), checkpoint)
    decoder = meta_model(config, dtype, shard)
    with torch.no_grad():
        fill_weights(materialize(decoder, device), checkpoint)
    return decoder.eval()


def choose_dtype(checkpoint: Checkpoint, dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto`: float32 on a CPU, elsewhere the type the checkpoint is stored in, and bfloat16 for a quantized one."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        if dtype not in DTYPES:
            raise RequestError("dtype", f"{dtype!r} is not known; {nearest(dtype, ['auto', *DTYPES])}")
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    if checkpoint.kind == "gguf":
        return GGUF_FILE_TYPES.get(checkpoint.config.get("general.file_type", -1), torch.bfloat16)
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return DTYPES.get(str(stored), torch.bfloat16)


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether the file's own weights stand on a grid of few bits."""
    return checkpoint.kind == "gguf" and checkpoint.config.get("general.file_type", -1) not in GGUF_FILE_TYPES


def meta_model(config: ModelConfig, dtype: torch.dtype, shard: Shard | None = None) -> Decoder:
    """A decoder of shapes alone."""
    with torch.device("meta"):
        return Decoder(config, shard).to(dtype)


def materialize(decoder: Decoder, device: torch.device) -> Decoder:
    """Give a sketch parameters that hold whatever was in memory."""
    if decoder.config.tied:
        decoder.head.weight = None  # or the one parameter would become two
    for module in decoder.modules():  # `to_empty` goes through symbols, whose package takes half a second to import
        for name, sketched in module._parameters.items():
            if sketched is not None:
                empty = torch.empty(sketched.shape, dtype=sketched.dtype, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    if decoder.config.tied:
        decoder.head.weight = decoder.embed
    return decoder


def weight_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> int:
    """What the prepared weights take; a tied embedding counts twice where `prepare` packs a head from it."""
    count = sum(parameter.numel() for parameter in meta_model(config, dtype).parameters())
    if config.tied and torch.device(device).type == "cpu" and dtype == torch.float32:
        count += config.vocab * config.width
    return count * dtype.itemsize
