"""The quantized checkpoints that are read, in words: for `foretell models --supported` and the reference page."""

from __future__ import annotations

from typing import NamedTuple


class ReadFormat(NamedTuple):
    """A row of the table."""

    methods: str  # as `quant_method` names them
    read: str
    runs_as: str  # on a CPU


SYMMETRIC = "int4 if symmetric in 4 bits without act order, else int8"
FORMAT_TABLE = (
    ReadFormat(
        "fp8, fbgemm_fp8",
        "E4M3 or E5M2 with a scale per tensor, output or block (weight_scale_inv, weight_scale)",
        "int8",
    ),
    ReadFormat(
        "compressed-tensors",
        "int8 (W8A8) and FP8 per tensor, output, group or block; int8 with zero points",
        "int8",
    ),
    ReadFormat(
        "compressed-tensors",
        "pack-quantized in 2, 4 or 8 bits per output or group, with zero points and act order",
        SYMMETRIC,
    ),
    ReadFormat("compressed-tensors", "NVFP4 with both levels of scales, MXFP4", "int8"),
    ReadFormat("modelopt, modelopt_fp4", "FP8 per tensor, output or block of 128x128 (FP8_PB_WO), NVFP4", "int8"),
    ReadFormat("awq", "4 bits in the packing of the GEMM version", "int8"),
    ReadFormat(
        "gptq",
        "2, 4 or 8 bits, act order, versions 1 and 2 (gptq_v2), bits and groups per layer",
        SYMMETRIC,
    ),
    ReadFormat(
        "auto-round",
        "packing auto_round, and auto_round: with gptqmodel, auto_gptq, gptq, auto_awq or awq",
        "as gptq and awq",
    ),
    ReadFormat("bitsandbytes", "NF4 and FP4, with nested scales or without; int8 with SCB", "int8"),
    ReadFormat("mxfp4", "gpt-oss's blocks of experts; mixtures themselves are not served yet", ""),
)
