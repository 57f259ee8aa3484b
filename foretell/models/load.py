"""Loads a checkpoint into a decoder."""

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
from .weights import check_tensors, fill_weights, layer_matrices

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # vLLM's other names
GGUF_FILE_TYPES = {0: torch.float32, 1: torch.float16, 32: torch.bfloat16}  # all others are quantized


def load_model(
    checkpoint: Checkpoint,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    shard: Shard | None = None,
) -> Decoder:
    """Return the decoder of a checkpoint, or the shard of one rank, with its weights, before `prepare`."""
    device = torch.device(device)
    config, dtype = read_config(checkpoint), choose_dtype(checkpoint, dtype, device)
    check_tensors(meta_model(config, dtype), checkpoint)
    decoder = meta_model(config, dtype, shard)
    with torch.no_grad():
        fill_weights(materialize(decoder, device), checkpoint)
    return decoder.eval()


def choose_dtype(checkpoint: Checkpoint, dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype. `auto` is float32 on a CPU, else that of the checkpoint, bfloat16 for a quantized one."""
    if isinstance(dtype, torch.dtype):
        return dtype
    dtype = DTYPE_NAMES.get(dtype, dtype)
    if dtype != "auto":
        if dtype not in DTYPES:
            raise RequestError("dtype", f"{dtype!r} is unknown; {nearest(dtype, ['auto', *DTYPES])}")
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    if checkpoint.kind == "gguf":
        return GGUF_FILE_TYPES.get(checkpoint.config.get("general.file_type", -1), torch.bfloat16)
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return DTYPES.get(str(stored), torch.bfloat16)


def fits_int4(checkpoint: Checkpoint) -> bool:
    """Return whether our own int4 holds the weights of the decoder with no more error than that of its scales.

    The output layer does not count: it runs in int8. Nor do tensors for images, and MTP modules, which are draft heads.
    """
    if not any(tensor.stored is not None and tensor.stored.fits_int4 for _, tensor in checkpoint.tensors()):
        return False
    matrices = layer_matrices(meta_model(read_config(checkpoint), torch.float32), checkpoint)
    return all(tensor.stored is not None and tensor.stored.fits_int4 for tensor in matrices)


def meta_model(config: ModelConfig, dtype: torch.dtype, shard: Shard | None = None) -> Decoder:
    """Return a decoder on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Decoder(config, shard).to(dtype)


def materialize(decoder: Decoder, device: torch.device) -> Decoder:
    """Allocate uninitialized parameters for a decoder on the meta device."""
    if decoder.config.tied:
        decoder.head.weight = None  # otherwise the shared parameter would become two
    for module in decoder.modules():  # `to_empty` would import sympy, which takes half a second
        for name, shape_only in module._parameters.items():
            if shape_only is not None:
                empty = torch.empty(shape_only.shape, dtype=shape_only.dtype, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    if decoder.config.tied:
        decoder.head.weight = decoder.embed
    return decoder


def weight_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> int:
    """Return the bytes of the prepared weights. A tied embedding counts twice if `prepare` packs an LM head from it."""
    count = sum(parameter.numel() for parameter in meta_model(config, dtype).parameters())
    if config.tied and torch.device(device).type == "cpu" and dtype == torch.float32:
        count += config.vocab * config.width
    return count * dtype.itemsize
