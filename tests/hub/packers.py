"""Quantized linear layers in the published layouts, packed value by value from float weights.

Nothing here uses the loader. Every packer returns the tensors of a layer by the last part of their names and the exact
float32 weight that they stand for.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
GROUP = 32
BLOCK = (24, 40)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble of a word, from the lowest
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4_LEVELS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # in the order of bitsandbytes' codes, times 12
FP4 = (*(level / 12 for level in FP4_LEVELS), *(-level / 12 for level in FP4_LEVELS))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def words(values: Array, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack the last dimension into int32, the first value in the lowest bits or by `order`."""
    each = 32 // bits
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // each), dtype=np.uint32)
    for nibble in range(each):
        source = nibble if order is None else order[nibble]
        packed |= (values[..., source::each].astype(np.uint32) & (2**bits - 1)) << np.uint32(bits * nibble)
    return torch.from_numpy(packed.view(np.int32))


def half(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


def asymmetric(weight: Array, group: Array, bits: int) -> tuple[Array, Array, Array]:
    """Return values [out, in], zero points [out, groups] and float16 scales [out, groups]."""
    most, count = 2**bits - 1, int(group.max()) + 1
    scales, zeros = (np.empty((len(weight), count), dtype=np.float32) for _ in range(2))
    for index in range(count):
        part = weight[:, group == index]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, index] = half(np.maximum(high - low, 1e-3) / most)
        zeros[:, index] = np.clip(np.round(-low / scales[:, index]), 1, most)
    values = np.clip(np.round(weight / scales[:, group]) + zeros[:, group], 0, most)
    return values.astype(np.int64), zeros.astype(np.int64), scales


def symmetric(weight: Array, size: int, bits: int) -> tuple[Array, Array]:
    """Return signed values [out, in] and float16 scales [out, groups]."""
    parts = weight.reshape(len(weight), -1, size)
    scales = half(np.abs(parts).max(2) / (2 ** (bits - 1) - 0.5))
    values = np.clip(np.round(parts / scales[:, :, None]), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return values.reshape(weight.shape).astype(np.int64), scales


def tensor(values: Array, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def fp8(
    weight: torch.Tensor,
    block: tuple[int, int],
    name: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.float32,
) -> Packed:
    """FP8 with a scale for each block; scales of E8M0 are powers of two."""
    rows, columns = (np.arange(size) // each for size, each in zip(weight.shape, block, strict=True))
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = weight[rows == row][:, columns == column]
            scales[row, column] = part.abs().max() / torch.finfo(dtype).max
    if scale_dtype == torch.float8_e8m0fnu:
        scales = torch.exp2(scales.log2().ceil())
    wide = scales[rows][:, columns]
    values = (weight / wide).to(dtype)
    stored = scales.to(scale_dtype)
    return {"weight": values, name: stored[0, 0] if stored.numel() == 1 else stored}, values.float() * wide


def fp8_blocks(weight: torch.Tensor) -> Packed:
    return fp8(weight, BLOCK, "weight_scale_inv")


def fp8_tensor(weight: torch.Tensor) -> Packed:
    tensors, exact = fp8(weight, (weight.shape[0], weight.shape[1]), "weight_scale")
    return tensors | {"input_scale": torch.tensor(0.5)}, exact


def fp8_channel(weight: torch.Tensor) -> Packed:
    return fp8(weight, (1, weight.shape[1]), "weight_scale")


def fp8_e5m2(weight: torch.Tensor) -> Packed:
    return fp8(weight, BLOCK, "weight_scale_inv", dtype=torch.float8_e5m2)


def fp8_e8m0(weight: torch.Tensor) -> Packed:
    return fp8(weight, BLOCK, "weight_scale_inv", scale_dtype=torch.float8_e8m0fnu)


def ct_fp8_tensor(weight: torch.Tensor) -> Packed:
    """compressed-tensors stores the scale of a tensor as a list of one."""
    tensors, exact = fp8_tensor(weight)
    return tensors | {"weight_scale": tensors["weight_scale"].reshape(1)}, exact


def ct_fp8_group(weight: torch.Tensor) -> Packed:
    return fp8(weight, (1, GROUP), "weight_scale")


def ct_fp8_blocks(weight: torch.Tensor) -> Packed:
    return fp8(weight, BLOCK, "weight_scale")


def modelopt_channel(weight: torch.Tensor) -> Packed:
    """ModelOpt's scales of outputs have one dimension."""
    tensors, exact = fp8_channel(weight)
    return tensors | {"weight_scale": tensors["weight_scale"].flatten()}, exact


def modelopt_blocks(weight: torch.Tensor) -> Packed:
    """ModelOpt keeps the dimensions within a block, [out / 128, 1, in / 128, 1]."""
    tensors, exact = fp8(weight, (128, 128), "weight_scale")
    scales = tensors["weight_scale"]
    rows, columns = scales.shape if scales.dim() else (1, 1)
    return tensors | {"weight_scale": scales.reshape(rows, 1, columns, 1)}, exact


def int8_tensor(weight: torch.Tensor) -> Packed:
    values, scales = symmetric(weight.numpy().reshape(1, -1), weight.numel(), 8)
    tensors = {"weight": tensor(values.reshape(weight.shape), torch.int8), "weight_scale": tensor(scales[0])}
    return tensors, tensor((values * scales.astype(np.float32)).reshape(weight.shape))


def int8_group(weight: torch.Tensor) -> Packed:
    values, scales = symmetric(weight.numpy(), GROUP, 8)
    tensors = {"weight": tensor(values, torch.int8), "weight_scale": tensor(scales)}
    return tensors, tensor(values * np.repeat(scales, GROUP, 1).astype(np.float32))


def int8_channel(weight: torch.Tensor) -> Packed:
    values, scales = symmetric(weight.numpy(), weight.shape[1], 8)
    tensors = {"weight": tensor(values, torch.int8), "weight_scale": tensor(scales, torch.bfloat16)}
    return tensors, tensor(values) * tensors["weight_scale"].float()


def int8_asymmetric(weight: torch.Tensor) -> Packed:
    values, zeros, scales = asymmetric(weight.numpy(), np.zeros(weight.shape[1], dtype=np.int64), 8)
    tensors = {"weight": tensor(values - 128, torch.int8), "weight_scale": tensor(scales)}
    tensors["weight_zero_point"] = tensor(zeros - 128, torch.int8)
    return tensors, tensor((values - zeros).astype(np.float32) * scales)


def pack_symmetric(weight: torch.Tensor, bits: int = 4, size: int = GROUP) -> Packed:
    values, scales = symmetric(weight.numpy(), size, bits)
    tensors = {"weight_packed": words(values + 2 ** (bits - 1), bits), "weight_scale": tensor(scales, torch.float16)}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    return tensors, tensor(values * np.repeat(scales, size, 1).astype(np.float32))


def pack_w8(weight: torch.Tensor) -> Packed:
    return pack_symmetric(weight, 8)


def pack_w2(weight: torch.Tensor) -> Packed:
    return pack_symmetric(weight, 2)


def pack_channel(weight: torch.Tensor) -> Packed:
    return pack_symmetric(weight, size=weight.shape[1])


def scattered(inputs: int) -> Array:
    """Return a group for each input as act order makes them: not in ranges."""
    return np.random.default_rng(3).permutation(np.arange(inputs) // GROUP)


def pack_act_order(weight: torch.Tensor) -> Packed:
    """Asymmetric, with groups in any order; zero points are packed along the outputs."""
    group = scattered(weight.shape[1])
    values, zeros, scales = asymmetric(weight.numpy(), group, 4)
    tensors = {"weight_packed": words(values, 4), "weight_scale": tensor(scales, torch.float16)}
    tensors |= {"weight_shape": torch.tensor(weight.shape), "weight_g_idx": torch.from_numpy(group.astype(np.int32))}
    tensors["weight_zero_point"] = words(zeros.T, 4).t().contiguous()
    return tensors, tensor((values - zeros[:, group]) * scales[:, group])


def awq(weight: torch.Tensor) -> Packed:
    group = np.arange(weight.shape[1]) // GROUP
    values, zeros, scales = asymmetric(weight.numpy(), group, 4)
    tensors = {"qweight": words(values.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER)}
    tensors["scales"] = tensor(scales.T, torch.float16)
    return tensors, tensor((values - zeros[:, group]) * scales[:, group])


def gptq(
    weight: torch.Tensor,
    bits: int = 4,
    act_order: bool = True,
    offset: int = 1,
    sym: bool = False,
    size: int = GROUP,
) -> Packed:
    """`offset` 1 is the first version of the format, which stores zero points minus one."""
    inputs = weight.shape[1]
    group = scattered(inputs) if act_order else np.arange(inputs) // size
    if sym:
        values, scales = symmetric(weight.numpy(), size, bits)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
        values = values + 2 ** (bits - 1)
    else:
        values, zeros, scales = asymmetric(weight.numpy(), group, bits)
    tensors = {"qweight": words(values, bits).t().contiguous(), "qzeros": words(zeros.T - offset, bits)}
    tensors |= {"scales": tensor(scales.T, torch.float16), "g_idx": torch.from_numpy(group.astype(np.int32))}
    return tensors, tensor((values - zeros[:, group]) * scales[:, group])


def gptq_w8(weight: torch.Tensor) -> Packed:
    return gptq(weight, bits=8)


def gptq_v2(weight: torch.Tensor) -> Packed:
    return gptq(weight, offset=0, act_order=False)


def gptq_symmetric(weight: torch.Tensor) -> Packed:
    return gptq(weight, act_order=False, sym=True)


def gptq_one_group(weight: torch.Tensor) -> Packed:
    return gptq(weight, act_order=False, sym=True, size=weight.shape[1])


def autoround(weight: torch.Tensor) -> Packed:
    """AutoRound's own packing has zero points as they are and no order of groups."""
    tensors, exact = gptq(weight, act_order=False, offset=0)
    del tensors["g_idx"]
    return tensors, exact


def fp4(weight: Array, scales: Array, group: int) -> tuple[torch.Tensor, Array]:
    """Return bytes with the first value in the low nibble, and the values."""
    scaled = weight / np.repeat(scales, group, 1)
    nearest = np.abs(np.abs(scaled)[..., None] - np.array(E2M1)).argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).astype(np.uint8)
    values = np.array(E2M1, dtype=np.float32)[nearest] * np.where(scaled < 0, -1, 1)
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), values.astype(np.float32)


def mxfp4(weight: torch.Tensor) -> Packed:
    peaks = np.abs(weight.numpy().reshape(len(weight), -1, 32)).max(2)
    exponents = np.ceil(np.log2(peaks / 6)).astype(np.int64)
    scales = np.exp2(exponents).astype(np.float32)
    packed, values = fp4(weight.numpy(), scales, 32)
    tensors = {"weight_packed": packed, "weight_scale": tensor(exponents + 127, torch.uint8)}
    return tensors, tensor(values * np.repeat(scales, 32, 1))


def nvfp4(weight: torch.Tensor, inverse: bool = True) -> Packed:
    """Two levels of scales. compressed-tensors divides by the scale of the tensor, ModelOpt multiplies."""
    peaks = np.abs(weight.numpy().reshape(len(weight), -1, 16)).max(2)
    whole = np.float32(448 * 6 / np.abs(weight.numpy()).max())
    stored = tensor(peaks / 6 * whole).to(torch.float8_e4m3fn)
    factor = torch.tensor(1 / whole) if not inverse else 1 / torch.tensor(whole)
    scales = stored.float() * factor
    packed, values = fp4(weight.numpy(), scales.numpy(), 16)
    name, value = ("weight_global_scale", torch.tensor([whole])) if inverse else ("weight_scale_2", factor)
    tensors = {"weight_packed" if inverse else "weight": packed, "weight_scale": stored, name: value}
    extra = {"input_global_scale": torch.ones(1)} if inverse else {"input_scale": torch.tensor(0.1)}
    return tensors | extra, tensor(values) * scales.repeat_interleave(16, 1)


def modelopt(weight: torch.Tensor) -> Packed:
    return nvfp4(weight, inverse=False)


def nf4(weight: torch.Tensor, nested: bool = False, block: int = 64, kind: str = "nf4") -> Packed:
    flat = weight.numpy().reshape(-1, block)
    absmax = np.abs(flat).max(1).astype(np.float32)
    table = np.array({"nf4": NF4, "fp4": FP4}[kind], dtype=np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": [*weight.shape]}
    tensors = {"weight.quant_map": tensor(table)}
    if nested:
        levels = np.linspace(-1, 1, 256).astype(np.float32)
        offset = float(absmax.mean())
        padded = np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
        outer = np.abs(padded).max(1).astype(np.float32)
        codes = np.abs((padded / outer[:, None])[..., None] - levels).argmin(-1).reshape(-1)[: len(absmax)]
        absmax = (levels[codes] * np.repeat(outer, 256)[: len(absmax)] + np.float32(offset)).astype(np.float32)
        tensors |= {"weight.absmax": tensor(codes, torch.uint8), "weight.nested_absmax": tensor(outer)}
        tensors["weight.nested_quant_map"] = tensor(levels)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        tensors["weight.absmax"] = tensor(absmax)
    codes = np.abs((flat / absmax[:, None])[..., None] - table).argmin(-1).reshape(-1).astype(np.uint8)
    tensors["weight"] = torch.from_numpy((codes[0::2] << 4 | codes[1::2])[:, None])
    described = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8).copy()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(described)
    return tensors, tensor(table[codes] * np.repeat(absmax, block)).view(weight.shape)


def nf4_nested(weight: torch.Tensor) -> Packed:
    return nf4(weight, nested=True)


def bnb_fp4(weight: torch.Tensor) -> Packed:
    return nf4(weight, kind="fp4")


def bnb_int8(weight: torch.Tensor) -> Packed:
    absmax = weight.abs().amax(1)
    values = (weight * (127 / absmax[:, None])).round().to(torch.int8)
    tensors = {"weight": values, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values.float() * (absmax[:, None] / 127)
