"""The values of GGUF tensors. The two kinds of the default model have a fast path, equal to gguf's bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Floats = np.ndarray[Any, np.dtype[np.float32]]

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
# By code: name, values a block has, and bytes. For these the gguf package need not be imported.
OWN = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}


def can_decode(kind: str) -> bool:
    """Whether tensors of this kind can be read; tried on one block of zeros."""
    if kind in STORED or kind in (name for name, *_ in OWN.values()):
        return True
    import gguf
    import numpy as np

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
    import numpy as np
    import torch

    if kind in STORED:
        return torch.from_numpy(data.copy()).view(getattr(torch, STORED[kind])).view(shape)
    fast = {"Q8_0": decode_q8_0, "Q4_1": decode_q4_1}.get(kind)
    # Damaged scales are infinite or not numbers: filling the weights finds them, numpy need not warn.
    with np.errstate(all="ignore"):
        values = fast(data) if fast else decode_any(data.reshape(*shape[:-1], -1), kind)
    return torch.from_numpy(values).view(shape)


# In numpy, for torch's threads wait on each other where the cores are busy: 0.2 s became 13 s.
def decode_q8_0(data: Bytes) -> Floats:
    """Blocks of a half-precision scale and 32 signed bytes."""
    import numpy as np

    blocks = data.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return np.multiply(blocks[:, 2:].view(np.int8), scale)


def decode_q4_1(data: Bytes) -> Floats:
    """Blocks of a scale, a minimum and 32 nibbles: the low ones first, then the high ones."""
    import numpy as np

    blocks = data.reshape(-1, 20)
    packed = blocks[:, 4:].copy()
    scale_and_least = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    values = np.empty((len(blocks), 32), dtype=np.float32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    values *= scale_and_least[:, :1]
    values += scale_and_least[:, 1:]
    return values


def decode_any(rows: Bytes, kind: str) -> Floats:
    """Every other kind, through gguf, which takes whole rows."""
    import gguf

    values: Floats = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    return values
