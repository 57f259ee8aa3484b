"""Reads the quantization config of a checkpoint: the method, the layouts it may use and what shapes do not show."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from foretell.errors import ModelError, UnsupportedModelError
from foretell.hub.quantized.gptq import BITS, GptqSettings

Layout = Literal["blocks", "packed", "fp4", "mxfp4 blocks", "gptq", "awq", "NF4 or FP4", "int8 with SCB"]

CT_FORMATS = (  # of compressed-tensors
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
OWN_SETTINGS = ("dynamic", "extra_config")  # of single layers, in GPTQModel and AutoRound
AUTOROUND_PACKINGS = {  # zero offset of the GPTQ layout; None: AWQ's
    "auto_round": 0,
    "auto_round:gptqmodel": 0,
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round:auto_awq": None,
    "auto_round:awq": None,
}


@dataclass(frozen=True)
class Quantization:
    """The quantization of a checkpoint."""

    method: str  # in words; empty where the names of its formats say it
    layouts: frozenset[Layout]
    block: tuple[int, int] | None = None  # rows and columns of a weight that share a scale
    gptq: GptqSettings | None = None


class Settings:
    """Validated access to the entries of a quantization config."""

    def __init__(self, values: Mapping[str, Any], where: str = "quantization_config") -> None:
        self.values, self.where = values, where

    def integer(self, name: str, default: int, allowed: Callable[[int], bool], wanted: str) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or not allowed(value):
            self.refuse(name, wanted)
        return int(value)

    def word(self, name: str, default: str, allowed: tuple[str, ...] = ()) -> str:
        """Return a string in lower case; with `allowed`, one of these."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or (allowed and value not in allowed):
            self.refuse(name, ", ".join(allowed) if allowed else "a string")
        return str(value)

    def section(self, name: str) -> Settings:
        """Return a nested config; empty if it is absent."""
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            self.refuse(name, "a mapping")
        return Settings(value, f"{self.where}.{name}")

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the size of a block of a weight; None if the config states none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 1 << 20 for n in value):
            self.refuse(name, "two integers above 0, such as [128, 128]")
        return value[0], value[1]

    def refuse(self, name: str, wanted: str) -> NoReturn:
        value = reprlib.repr(self.values.get(name))
        raise UnsupportedModelError(f"the model's config says {self.where}.{name} is {value}; supported is {wanted}")


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return the quantization that a config.json states; None if there is none. Raise if it is not supported."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found and isinstance(text := config.get("text_config"), Mapping):  # of a multimodal model
        found = text.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ModelError(f"the model's config says quantization_config is {reprlib.repr(found)}; it must be a mapping")
    settings = Settings(found)
    method = re.sub(r"^intel/", "", settings.word("quant_method", "").lower().replace("_", "-"))
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise UnsupportedModelError(
            f"quantization method {method or 'none'!r} of this checkpoint is not supported; supported are {known} and "
            "GGUF files"
        )
    return METHODS[method](settings)


def _fp8(settings: Settings) -> Quantization:
    return Quantization("", frozenset({"blocks"}), settings.block("weight_block_size"))


def _compressed_tensors(settings: Settings) -> Quantization:
    settings.word("format", CT_FORMATS[0], CT_FORMATS)
    for name in ("sparsity_config", "transform_config"):
        part = settings.section(name)
        if part.values and part.values.get("format") != "dense":
            raise UnsupportedModelError(f"{part.where} (sparse or rotated weights) is not supported; use a dense model")
    groups = settings.section("config_groups")
    blocks = {groups.section(name).section("weights").block("block_structure") for name in groups.values} - {None}
    if len(blocks) > 1:
        raise UnsupportedModelError(f"{groups.where} has several block sizes, which is not supported; use one")
    return Quantization("compressed-tensors", frozenset({"blocks", "packed", "fp4"}), next(iter(blocks), None))


def _gptq(settings: Settings) -> Quantization:
    default = settings.word("format", "gptq")
    offset = {"gptq": 1, "gptq_v2": 0}[settings.word("checkpoint_format", default, ("gptq", "gptq_v2"))]
    _bits(settings, BITS)
    return Quantization("GPTQ", frozenset({"gptq"}), gptq=_gptq_settings(settings, offset))


def _gptq_settings(settings: Settings, offset: int) -> GptqSettings:
    size = settings.integer("group_size", 128, lambda n: n == -1 or 0 < n < 1 << 20, "-1 or an integer above 0")
    layers = [each for name in OWN_SETTINGS for each in settings.section(name).values.values()]
    configs = [settings.values, *(each for each in layers if isinstance(each, Mapping))]
    symmetric = configs[0].get("sym") is True and not any(each.get("sym") is False for each in configs)
    act_order = any(each.get("desc_act") is True for each in configs)
    return GptqSettings(size, offset, symmetric, act_order)


def _bits(settings: Settings, allowed: tuple[int, ...]) -> None:
    settings.integer("bits", 4, lambda n: n in allowed, " or ".join(map(str, allowed)))


def _awq(settings: Settings) -> Quantization:
    _bits(settings, (4,))
    settings.word("version", "gemm", ("gemm", "GEMM"))
    return Quantization("AWQ", frozenset({"awq"}))


def _autoround(settings: Settings) -> Quantization:
    packing = settings.word("packing_format", "auto_round:gptq", tuple(AUTOROUND_PACKINGS))
    settings.word("data_type", "int", ("int",))
    _bits(settings, BITS)
    offset = AUTOROUND_PACKINGS[packing]
    if offset is None:
        return Quantization("AutoRound", frozenset({"awq"}))
    return Quantization("AutoRound", frozenset({"gptq"}), gptq=_gptq_settings(settings, offset))


def _bitsandbytes(settings: Settings) -> Quantization:
    return Quantization("bitsandbytes", frozenset({"NF4 or FP4", "int8 with SCB"}))


def _mxfp4(settings: Settings) -> Quantization:
    return Quantization("", frozenset({"mxfp4 blocks"}))


def _modelopt(settings: Settings, default: str = "") -> Quantization:
    settings = settings.section("quantization") if "quantization" in settings.values else settings
    settings.word("quant_algo", default, MODELOPT_ALGORITHMS)
    return Quantization("ModelOpt", frozenset({"blocks", "fp4"}), (128, 128))


def _modelopt_fp4(settings: Settings) -> Quantization:
    return _modelopt(settings, "NVFP4")


METHODS: dict[str, Callable[[Settings], Quantization]] = {
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _autoround,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt_fp4,
}
