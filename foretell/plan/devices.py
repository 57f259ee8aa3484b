"""Devices by their data sheets, and the catalog of known devices and models."""

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
    """Return the data file: `gpus` and `models`, each by name."""
    text = (files("foretell.plan") / "known.json").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return found


GIGA, TERA = 1e9, 1e12

Family = Literal["gpu", "cpu"]


@dataclass(frozen=True)
class Link:
    """The interconnect of the devices of one machine."""

    kind: str
    bandwidth: float  # bytes per second, each way
    latency: float  # seconds


@dataclass(frozen=True)
class Device:
    """A device by its data sheet."""

    name: str
    description: str
    family: Family
    memory: float  # bytes
    bandwidth: float  # bytes per second
    operations: Mapping[str, float]  # per second, by data type
    link: Link
    price: float  # dollars per hour

    def ops_per_second(self, dtype: str) -> float:
        """Return operations per second in a data type; one without hardware support runs as bfloat16."""
        return self.operations.get(dtype, self.operations["bfloat16"])

    def with_overrides(
        self,
        memory_gb: float | None = None,
        bandwidth_gb_s: float | None = None,
        tflops: float | None = None,
        dollars_per_hour: float | None = None,
    ) -> Device:
        """Return the device with values of the user. `tflops` is for bfloat16 and scales all data types."""
        scale = 1.0 if tflops is None else tflops * TERA / self.operations["bfloat16"]
        return replace(
            self,
            memory=self.memory if memory_gb is None else memory_gb * GIGA,
            bandwidth=self.bandwidth if bandwidth_gb_s is None else bandwidth_gb_s * GIGA,
            operations={dtype: rate * scale for dtype, rate in self.operations.items()},
            price=self.price if dollars_per_hour is None else dollars_per_hour,
        )


def find_device(name: str) -> Device:
    """Return a device of the catalog by name."""
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
