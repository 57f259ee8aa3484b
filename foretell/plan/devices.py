"""What a device can do by its data sheet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from foretell.errors import RequestError
from foretell.options import nearest


@cache
def catalog() -> Mapping[str, Mapping[str, Any]]:
    """`gpus` and `models`, each by name."""
    text = (files("foretell.plan") / "known.json").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return found


GIGA, TERA = 1e9, 1e12

Family = Literal["gpu", "cpu"]


@dataclass(frozen=True)
class Link:
    """How devices of one machine talk: bytes a second each way, and seconds before the first byte."""

    kind: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """Bytes of memory, bytes a second, operations a second by the type of the numbers, and the price of an hour."""

    name: str
    description: str
    family: Family
    memory: float
    bandwidth: float
    operations: Mapping[str, float]
    link: Link
    price: float

    def ops_per_second(self, dtype: str) -> float:
        """Operations a second for numbers of a type; one the device has no units for runs as bfloat16."""
        return self.operations.get(dtype, self.operations["bfloat16"])

    def with_overrides(
        self,
        memory_gb: float | None = None,
        bandwidth_gb_s: float | None = None,
        tflops: float | None = None,
        dollars_per_hour: float | None = None,
    ) -> Device:
        """With what a user knows better; a rate given scales those of all types."""
        faster = 1.0 if tflops is None else tflops * TERA / self.operations["bfloat16"]
        return replace(
            self,
            memory=self.memory if memory_gb is None else memory_gb * GIGA,
            bandwidth=self.bandwidth if bandwidth_gb_s is None else bandwidth_gb_s * GIGA,
            operations={dtype: rate * faster for dtype, rate in self.operations.items()},
            price=self.price if dollars_per_hour is None else dollars_per_hour,
        )


def find_device(name: str) -> Device:
    """The device of that name."""
    devices = catalog()["gpus"]
    if name.lower() not in devices:
        raise RequestError("gpu", f"{name!r} is not known; {nearest(name.lower(), devices)}")
    return _device(name.lower(), devices[name.lower()])


def _device(name: str, entry: Mapping[str, Any]) -> Device:
    link = entry["link"]
    return Device(
        name=name,
        description=entry["about"],
        family=entry["kind"],
        memory=entry["memory_gb"] * GIGA,
        bandwidth=entry["bandwidth_gb_s"] * GIGA,
        operations={dtype: rate * TERA for dtype, rate in entry["tflops"].items()},
        link=Link(link["kind"], link["gb_s"] * GIGA, link["latency_us"] * 1e-6),
        price=entry["dollars_per_hour"],
    )
