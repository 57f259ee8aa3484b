"""In how many bits weights and cached values lie, and how fast they are computed with."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.errors import RequestError
from foretell.options import nearest

from .devices import Device, Family
from .shapes import Shape

BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "fp8": 8.0, "int8": 8.25, "int4": 4.5}  # scales included
AUTO = "auto"
TYPES = (AUTO, *BITS)


@dataclass(frozen=True)
class Precision:
    """Bits of a weight, and the type the device computes in."""

    name: str
    bits: float

    @property
    def weight_bytes(self) -> float:
        return self.bits / 8

    def rate(self, device: Device) -> float:
        """Operations a second; few bits that a device has no units for are widened first."""
        if self.name == "float32" and "float32" not in device.operations:
            return device.rate("bfloat16") / 2
        if self.name == "int4":
            return device.rate("int8" if device.family == "cpu" else "bfloat16")
        return device.rate(self.name)


def precision_of(dtype: str, shape: Shape, field: str) -> Precision:
    """As asked; left open, as the model's file has them, or half precision."""
    if dtype not in TYPES:
        raise RequestError(field, f"{dtype!r} is not known; {nearest(dtype, TYPES)}")
    if dtype != AUTO:
        return Precision(dtype, BITS[dtype])
    if shape.bits is None:
        return Precision("bfloat16", BITS["bfloat16"])
    return Precision("bfloat16" if shape.bits > 8.5 else "int8" if shape.bits > 7 else "int4", shape.bits)


def cache_bytes(dtype: str, family: Family) -> float:
    """Of one cached value; left open, half precision on a GPU and whole on a CPU."""
    if dtype == AUTO:
        return 2.0 if family == "gpu" else 4.0
    if dtype not in BITS:
        raise RequestError("kv_dtype", f"{dtype!r} is not known; {nearest(dtype, TYPES)}")
    return BITS[dtype] / 8
