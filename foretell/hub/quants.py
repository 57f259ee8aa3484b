"""The values of GGUF tensors. The two kinds of the default model have a fast path, equal to gguf's bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

STORED = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}


def can_decode(kind: str) -> bool:
    """Whether tensors of this kind can be read; tried on one block of zeros."""
    import gguf
    import numpy as np

    if kind in STORED:
        return True
    code = gguf.GGMLQuantizationType[kind]
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[code][1]), dtype=np.uint8)
    try:
        with np.errstate(all="ignore"):
            gguf.quants.dequantize(block, code)
    except NotImplementedError:
        return False
    return True


def decode(data: Bytes, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose bytes are `data`, in memory of its own."""
    import torch

    if kind in STORED:
        return torch.from_numpy(data.copy()).view(getattr(torch, STORED[kind])).view(shape)
    fast = {"Q8_0": decode_q8_0, "Q4_1": decode_q4_1}.get(kind)
    if fast:
        return fast(torch.from_numpy(data)).view(shape)
    return decode_any(data.reshape(*shape[:-1], -1), kind)


def decode_q8_0(data: torch.Tensor) -> torch.Tensor:
    """Blocks of a half-precision scale and 32 signed bytes."""
    import torch

    blocks = data.view(-1, 34)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8).float().mul_(scale)


def decode_q4_1(data: torch.Tensor) -> torch.Tensor:
    """Blocks of a scale, a minimum and 32 nibbles: the low ones first, then the high ones."""
    import torch

    blocks = data.view(-1, 20)
    scale, least = blocks[:, :4].contiguous().view(torch.float16).float().chunk(2, dim=1)
    packed = blocks[:, 4:]
    levels = torch.stack((packed & 15, packed >> 4), dim=1).float().view(-1, 32)
    return levels.mul_(scale).add_(least)


def decode_any(rows: Bytes, kind: str) -> torch.Tensor:
    """Every other kind, through gguf, which takes whole rows."""
    import gguf
    import numpy as np
    import torch

    # Damaged scales are infinite or not numbers: the model will show it, numpy need not warn.
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]))
