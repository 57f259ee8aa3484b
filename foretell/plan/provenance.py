"""Of which model and device a run was, and whether that is what a plan is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bench_reader import load_run
from .devices import Device
from .shapes import Shape, from_hf

NEAR = 0.01  # of a model's weights
GPU_WORDS = ("nvidia", "geforce", "radeon", "instinct")


@dataclass(frozen=True)
class Origin:
    """What a run tells of itself: a model's name, or its sizes, and the device's name."""

    model: str | None = None
    sizes: Mapping[str, Any] | None = None
    device: str | None = None

    @classmethod
    def of(cls, path: Path) -> Origin:
        run = load_run(path)
        sizes, device = run.get("target"), run.get("device") or (run.get("machine") or {}).get("device")
        return cls(run.get("model"), sizes if isinstance(sizes, Mapping) else None, device)

    def doubts(self, shape: Shape, device: Device) -> list[str]:
        """What a reader must know where it seems to be of something else; names differ, so nothing is refused."""
        found = []
        if not self._is_of(shape):
            found.append(f"The run is of {self.model or 'a model of other sizes'}, the plan for {shape.name}")
        if not self._is_on(device):
            found.append(f"The run is of {self.device}, the plan for {device.name}")
        return [f"{each}: what was measured there may not hold here." for each in found]

    def _is_of(self, shape: Shape) -> bool:
        if self.sizes is not None:
            return abs(from_hf("target", self.sizes).weights / shape.weights - 1) < NEAR
        names = [_letters(name.rstrip("/").rpartition("/")[2]) for name in (self.model or "", shape.name)]
        return self.model is None or names[0] in names[1] or names[1] in names[0]

    def _is_on(self, device: Device) -> bool:
        if self.device is None:
            return True
        there = _letters(self.device)
        if device.family == "cpu":
            return not any(word in there for word in GPU_WORDS)
        return all(part in there for part in device.name.lower().split("-"))


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
