"""Dequantization of GGUF tensors. The default model's types have a fast path, bit-identical to the gguf package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Floats = np.ndarray[Any, np.dtype[np.float32]]

UNQUANTIZED = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
# By type code: name, values per block, bytes per block. These do not need the gguf package.
KNOWN_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}


def can_dequantize(kind: str) -> bool:
    """Return whether a type can be dequantized, tried on one block of zeros."""
    if kind in UNQUANTIZED or kind in (name for name, *_ in KNOWN_TYPES.values()):
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


def dequantize(data: Bytes, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with the bytes `data`, as a copy."""
    import numpy as np
    import torch

    if kind in UNQUANTIZED:
        return torch.from_numpy(data.copy()).view(getattr(torch, UNQUANTIZED[kind])).view(shape)
    fast = {"Q8_0": dequantize_q8_0, "Q4_1": dequantize_q4_1}.get(kind)
    # Damaged scales are infinite or NaN; loading the weights checks for them, so numpy need not warn.
    with np.errstate(all="ignore"):
        values = fast(data) if fast else dequantize_any(data.reshape(*shape[:-1], -1), kind)
    return torch.from_numpy(values).view(shape)


# In numpy: on busy cores torch's threads wait for each other, and 0.2 s became 13 s.
def dequantize_q8_0(data: Bytes) -> Floats:
    """Dequantize blocks of a float16 scale and 32 int8 values."""
    import numpy as np

    blocks = data.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return np.multiply(blocks[:, 2:].view(np.int8), scale)


def dequantize_q4_1(data: Bytes) -> Floats:
    """Dequantize blocks of a scale, a minimum and 32 nibbles, low ones first."""
    import numpy as np

    blocks = data.reshape(-1, 20)
    packed = blocks[:, 4:].copy()
    scale_and_min = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    values = np.empty((len(blocks), 32), dtype=np.float32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    values *= scale_and_min[:, :1]
    values += scale_and_min[:, 1:]
    return values


def dequantize_any(rows: Bytes, kind: str) -> Floats:
    """Dequantize any other type with the gguf package, which takes full rows."""
    import gguf

    values: Floats = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    return values
