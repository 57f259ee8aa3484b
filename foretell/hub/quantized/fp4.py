"""4-bit floats (E2M1) with a scale per group: MXFP4 and NVFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.hub.quantized.parts import FLOATS, Parts, unpack
from foretell.hub.tensor import LazyTensor

if TYPE_CHECKING:
    import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_GROUP = 32  # values that share a power of two
NVFP4_GROUP = 16  # values that share an FP8 scale


def dequantize_mxfp4(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return value * 2 ** (exponent - 127) in float32: packed [..., in / 2] uint8, exponents [..., in / 32] uint8."""
    import torch

    return _values(packed) * exponents.view(torch.float8_e8m0fnu).float().repeat_interleave(MXFP4_GROUP, -1)


def dequantize_nvfp4(packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return value * scale * factor in float32: packed [out, in / 2] uint8, scales [out, in / 16] fp8, one factor."""
    return _values(packed) * (scales.float() * factor).repeat_interleave(NVFP4_GROUP, -1)


def _values(packed: torch.Tensor) -> torch.Tensor:
    """Return the float values of nibbles, the low one of a byte first."""
    import torch

    return torch.tensor(E2M1)[unpack(packed, 4)]


def open_fp4(parts: Parts, part: str) -> LazyTensor:
    """Return the weight of a layer with packed values `part`: NVFP4 if it has a scale of the tensor, else MXFP4."""
    packed, outputs, columns = parts.matrix(part, ("U8",))
    shape = (outputs, 2 * columns)
    glob = next((name for name in ("weight_global_scale", "weight_scale_2") if name in parts.tensors), None)
    group = MXFP4_GROUP if glob is None else NVFP4_GROUP
    if shape[1] % group:
        raise parts.wrong(part, f"has {shape[1]} inputs, which groups of {group} do not divide")
    grid = (outputs, shape[1] // group)
    if glob is None:
        exponents = parts.need("weight_scale", ("U8", "F8_E8M0"), grid)
        return parts.weight(
            shape,
            "MXFP4",
            lambda start, stop: dequantize_mxfp4(packed.rows(start, stop), exponents.rows(start, stop)),
        )
    scales = parts.need("weight_scale", ("F8_E4M3",), grid)
    whole = parts.need(glob, FLOATS, (1,), ())

    def decode(start: int, stop: int) -> torch.Tensor:
        factor = whole.load().float().reshape(())
        # compressed-tensors stores the factor that scales were multiplied with, ModelOpt its inverse.
        factor = 1 / factor if glob == "weight_global_scale" else factor
        return dequantize_nvfp4(packed.rows(start, stop), scales.rows(start, stop), factor)

    return parts.weight(shape, "NVFP4", decode)


def open_mxfp4_blocks(parts: Parts) -> LazyTensor:
    """Return the weight of gpt-oss's layout: blocks [..., groups, 16] and exponents [..., groups]."""
    blocks = parts.need("blocks", ("U8",))
    *lead, groups, each = blocks.shape if len(blocks.shape) > 2 else (0, 0, 0)
    if each != MXFP4_GROUP // 2 or 0 in blocks.shape:
        raise parts.wrong("blocks", f"has shape {list(blocks.shape)}, but must have [..., groups, {MXFP4_GROUP // 2}]")
    exponents = parts.need("scales", ("U8", "F8_E8M0"), (*lead, groups))
    return parts.weight(
        (*lead, groups * MXFP4_GROUP),
        "MXFP4",
        lambda start, stop: dequantize_mxfp4(blocks.rows(start, stop).flatten(-2), exponents.rows(start, stop)),
    )
