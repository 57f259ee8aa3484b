"""The layouts of quantized checkpoints with the configs that go with them, and what the loader should call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import packers
from .packers import BLOCK, GROUP, Packed


@dataclass(frozen=True)
class Format:
    """A layout, the config that goes with it, and what the loader should call it."""

    pack: Callable[[torch.Tensor], Packed]
    config: dict[str, Any]
    name: str
    runs_as: str = "int8"  # on a CPU


def ct(format: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    ignore = ["lm_head", "re:.*mtp.*"]
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ignore}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False}
BLOCKS = f"{BLOCK[0]}x{BLOCK[1]} blocks"
FORMATS: dict[str, Format] = {
    "fp8 blocks": Format(packers.fp8_blocks, {"quant_method": "fp8", "weight_block_size": [*BLOCK]}, f"FP8 {BLOCKS}"),
    "fp8 tensor": Format(packers.fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}, "FP8 per tensor"),
    "fp8 channel": Format(
        packers.fp8_channel,
        ct("float-quantized", num_bits=8, type="float", strategy="channel"),
        "compressed-tensors FP8 per channel",
    ),
    "fbgemm": Format(
        packers.fp8_channel, {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, "FP8 per channel"
    ),
    "fp8 e5m2": Format(packers.fp8_e5m2, {"quant_method": "fp8", "weight_block_size": [*BLOCK]}, f"FP8 {BLOCKS}"),
    "fp8 e8m0": Format(
        packers.fp8_e8m0,
        {"quant_method": "fp8", "weight_block_size": [*BLOCK], "scale_fmt": "ue8m0"},
        f"FP8 {BLOCKS}",
    ),
    "ct fp8 tensor": Format(
        packers.ct_fp8_tensor,
        ct("float-quantized", num_bits=8, type="float", strategy="tensor"),
        "compressed-tensors FP8 per tensor",
    ),
    "ct fp8 group": Format(
        packers.ct_fp8_group,
        ct("naive-quantized", num_bits=8, type="float", strategy="group", group_size=GROUP),
        f"compressed-tensors FP8 group {GROUP}",
    ),
    "ct fp8 blocks": Format(
        packers.ct_fp8_blocks,
        ct("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[*BLOCK]),
        f"compressed-tensors FP8 {BLOCKS}",
    ),
    "ct int8 tensor": Format(
        packers.int8_tensor,
        ct("int-quantized", num_bits=8, type="int", strategy="tensor"),
        "compressed-tensors int8 per tensor",
    ),
    "ct int8 group": Format(
        packers.int8_group,
        ct("naive-quantized", num_bits=8, type="int", strategy="group", group_size=GROUP),
        f"compressed-tensors int8 group {GROUP}",
    ),
    "ct int8": Format(
        packers.int8_channel, ct("int-quantized", num_bits=8, type="int"), "compressed-tensors int8 per channel"
    ),
    "ct int8 asymmetric": Format(
        packers.int8_asymmetric, ct("int-quantized", symmetric=False), "compressed-tensors int8 per channel"
    ),
    "ct w4": Format(
        packers.pack_symmetric,
        ct("pack-quantized", num_bits=4),
        f"compressed-tensors int4 group {GROUP}",
        runs_as="int4",
    ),
    "ct w8": Format(packers.pack_w8, ct("pack-quantized", num_bits=8), f"compressed-tensors int8 group {GROUP}"),
    "ct w2": Format(packers.pack_w2, ct("pack-quantized", num_bits=2), f"compressed-tensors int2 group {GROUP}"),
    "ct w4 channel": Format(
        packers.pack_channel,
        ct("pack-quantized", num_bits=4, strategy="channel"),
        "compressed-tensors int4 per channel",
        runs_as="int4",
    ),
    "ct act order": Format(
        packers.pack_act_order,
        ct("pack-quantized", num_bits=4, actorder="group", symmetric=False),
        f"compressed-tensors asymmetric int4 group {GROUP}, act order",
    ),
    "awq": Format(
        packers.awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}, f"AWQ asymmetric int4 group {GROUP}"
    ),
    "gptq": Format(packers.gptq, GPTQ, f"GPTQ asymmetric int4 group {GROUP}, act order"),
    "gptq 8 bits": Format(packers.gptq_w8, GPTQ | {"bits": 8}, f"GPTQ asymmetric int8 group {GROUP}, act order"),
    "gptq v2": Format(
        packers.gptq_v2,
        GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": False},
        f"GPTQ asymmetric int4 group {GROUP}",
    ),
    "gptq symmetric": Format(
        packers.gptq_symmetric, GPTQ | {"desc_act": False, "sym": True}, f"GPTQ int4 group {GROUP}", runs_as="int4"
    ),
    "gptq one group": Format(
        packers.gptq_one_group,
        GPTQ | {"group_size": -1, "desc_act": False, "sym": True},
        "GPTQ int4 per channel",
        runs_as="int4",
    ),
    "autoround": Format(
        packers.autoround, AUTOROUND | {"packing_format": "auto_round"}, f"AutoRound asymmetric int4 group {GROUP}"
    ),
    "autoround gptq": Format(
        packers.gptq_symmetric,
        AUTOROUND | {"packing_format": "auto_round:auto_gptq", "sym": True},
        f"AutoRound int4 group {GROUP}",
        runs_as="int4",
    ),
    "autoround awq": Format(
        packers.awq, AUTOROUND | {"packing_format": "auto_round:auto_awq"}, f"AutoRound asymmetric int4 group {GROUP}"
    ),
    "autoround gptqmodel": Format(
        packers.autoround,
        AUTOROUND | {"packing_format": "auto_round:gptqmodel"},
        f"AutoRound asymmetric int4 group {GROUP}",
    ),
    "autoround :gptq": Format(
        packers.gptq_symmetric,
        AUTOROUND | {"packing_format": "auto_round:gptq", "sym": True},
        f"AutoRound int4 group {GROUP}",
        runs_as="int4",
    ),
    "autoround :awq": Format(
        packers.awq, AUTOROUND | {"packing_format": "auto_round:awq"}, f"AutoRound asymmetric int4 group {GROUP}"
    ),
    "mxfp4": Format(packers.mxfp4, ct("mxfp4-pack-quantized", num_bits=4, type="float"), "compressed-tensors MXFP4"),
    "nvfp4": Format(packers.nvfp4, ct("nvfp4-pack-quantized", num_bits=4, type="float"), "compressed-tensors NVFP4"),
    "modelopt": Format(
        packers.modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "ModelOpt NVFP4"
    ),
    "modelopt fp8": Format(
        packers.fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt FP8 per tensor"
    ),
    "modelopt fp8 channel": Format(
        packers.modelopt_channel,
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "ModelOpt FP8 per channel",
    ),
    "modelopt fp8 blocks": Format(
        packers.modelopt_blocks,
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        "ModelOpt FP8 per tensor",  # the layers of the tests are smaller than a block
    ),
    "modelopt_fp4": Format(packers.modelopt, {"quant_method": "modelopt_fp4"}, "ModelOpt NVFP4"),
    "bnb fp4": Format(packers.bnb_fp4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes FP4"),
    "nf4": Format(packers.nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes NF4"),
    "nf4 nested": Format(
        packers.nf4_nested, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes NF4"
    ),
    "bnb int8": Format(
        packers.bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8 per channel"
    ),
}
