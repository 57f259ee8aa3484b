"""Reads measured steps from the JSON of a bench run, and checks which model and device they are of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import RequestError
from foretell.plan.devices import Device
from foretell.plan.model_shape import ModelShape, from_hf

FULL_DRAFTS = 0.9  # share of steps that must have a full draft; the first step of a request has none
SHORT_CONTEXT = 512  # tokens, if a run does not state its context length
KINDS = "foretell bench offline or drafters with --out, bench/grid.py or bench/gpu.py"
FREE, MODEL, NONE = "oracle", "model", "none"  # drafters


@dataclass(frozen=True)
class Observation:
    """A measured step: device time alone, or wall time with host and drafter."""

    batch: int
    context: int
    length: int  # draft tokens per sequence
    seconds: float
    wall: bool
    drafter: str = NONE
    of_draft: bool = False  # a step of the draft model instead of the target
    accepted: float = 1.0  # tokens per sequence and step, the target's own included


def read_observations(path: Path) -> list[Observation]:
    """Return the measured steps of a bench run; RequestError if there are none."""
    found = list(_all(load_run(path)))
    if not found:
        raise RequestError("calibrate", f"{path} has no timed steps; give the JSON of {KINDS}")
    return found


def load_run(path: Path) -> Mapping[str, Any]:
    """Return the JSON of a file, or the last JSON line of a log."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("calibrate", f"{path} cannot be read: {error}") from None
    for part in (text, *reversed(text.strip().splitlines())):
        try:
            found = json.loads(part)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            return found
    raise RequestError("calibrate", f"{path} is not JSON; give the JSON of {KINDS}")


def _all(run: Mapping[str, Any]) -> Iterator[Observation]:
    try:
        if run.get("bench") == "grid":
            yield from _grid(run)
        elif "overall" in run:
            yield from _bench(run)
        else:
            yield from _gpu(run)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        words = f"is not what {KINDS} writes: {type(error).__name__} {error}"
        raise RequestError("calibrate", words) from None


def _grid(run: Mapping[str, Any]) -> Iterator[Observation]:
    for step in run["draft_steps"]:
        yield Observation(
            int(step["texts"]), int(step["context"]), 0, step["device_ms"] / 1e3, wall=False, of_draft=True
        )
    for cell in run["cells"]:
        shape = int(cell["texts"]), int(cell["context"]), int(cell["length"])
        if cell["device_ms"] is not None and cell["drafter"] != MODEL:
            yield Observation(*shape, cell["device_ms"] / 1e3, wall=False)
        accepted = float(cell["accepted_per_step"])
        yield Observation(*shape, cell["wall_ms"] / 1e3, wall=True, drafter=cell["drafter"], accepted=accepted)


def _bench(run: Mapping[str, Any]) -> Iterator[Observation]:
    """Yield steps at batch size 1: plain ones, and those of drafters with a fixed length in nearly every step.

    Draft time is subtracted, since the plan has its own model of that.
    """
    lengths = run.get("drafters", {})
    alone = [cell for cell in run["overall"] if cell.get("batch", 1) == 1]
    for index, cell in enumerate(alone):
        plain, mine = cell["plain_tokens_per_second"], cell["tokens_per_second"]
        if index == 0 and plain:
            yield Observation(1, SHORT_CONTEXT, 0, 1 / plain, wall=True)
        length = lengths.get(cell["arm"]) if isinstance(lengths, Mapping) else None
        if mine and isinstance(length, int) and length > 0 and _has_full_drafts(cell, length):
            seconds = cell["accepted_per_step"] / mine * (1 - cell["time"]["drafting"])
            yield Observation(1, SHORT_CONTEXT, length, seconds, True, FREE, accepted=cell["accepted_per_step"])


def _has_full_drafts(cell: Mapping[str, Any], length: int) -> bool:
    """Return whether nearly all steps had drafts of this length. An n-gram drafter often has a shorter one or none."""
    reached = (cell.get("places") or {}).get("reached") or []
    return len(reached) >= length and reached[length - 1] >= FULL_DRAFTS * cell["steps"]


def _gpu(run: Mapping[str, Any]) -> Iterator[Observation]:
    """Yield the figures of bench/gpu.py by name. Those by rows are of the last context that was measured."""
    context = 0
    for name, value in run.items():
        if one := re.fullmatch(r"step, 1 row, context (\d+)", name):
            context = int(one[1])
            yield Observation(1, context, 0, value / 1e3, wall=False)
        elif batch := re.fullmatch(r"step, (\d+) texts, context (\d+)", name):
            yield Observation(int(batch[1]), int(batch[2]), 0, value / 1e3, wall=False)
        elif rows := re.fullmatch(r"step, (\d+) texts of (\d+) rows", name):
            yield Observation(int(rows[1]), SHORT_CONTEXT, int(rows[2]) - 1, value / 1e3, wall=False)
        elif plain := re.fullmatch(r"plain, batch (\d+): wall a step", name):
            yield Observation(int(plain[1]), SHORT_CONTEXT, 0, value / 1e3, wall=True)
        elif name == "draft model, step, 1 row":
            yield Observation(1, SHORT_CONTEXT, 0, value / 1e3, wall=False, of_draft=True)
    for name, value in run.items():
        if rows := re.fullmatch(r"\s*(\d+) rows over one", name):
            one_row = run[f"step, 1 row, context {context}"]
            yield Observation(1, context, int(rows[1]) - 1, value * one_row / 1e3, wall=False)


NEAR = 0.01  # relative difference of weights within which two models count as the same
GPU_WORDS = ("nvidia", "geforce", "radeon", "instinct")


@dataclass(frozen=True)
class BenchProvenance:
    """Model and device of a bench run, as far as it states them."""

    model: str | None = None
    sizes: Mapping[str, Any] | None = None  # fields of its config.json
    device: str | None = None

    @classmethod
    def from_file(cls, path: Path) -> BenchProvenance:
        run = load_run(path)
        sizes, device = run.get("target"), run.get("device") or (run.get("machine") or {}).get("device")
        return cls(run.get("model"), sizes if isinstance(sizes, Mapping) else None, device)

    def warnings(self, shape: ModelShape, device: Device) -> list[str]:
        """Return warnings if the run seems to be of another model or device. Names differ, so nothing is rejected."""
        found = []
        if not self._is_of(shape):
            found.append(f"The run is of {self.model or 'a model of other sizes'}, the plan for {shape.name}")
        if not self._is_on(device):
            found.append(f"The run is of {self.device}, the plan for {device.name}")
        return [f"{each}: its measurements may not apply here." for each in found]

    def _is_of(self, shape: ModelShape) -> bool:
        if self.sizes is not None:
            return abs(from_hf("target", self.sizes).weights / shape.weights - 1) < NEAR
        names = [_normalized(name.rstrip("/").rpartition("/")[2]) for name in (self.model or "", shape.name)]
        return self.model is None or names[0] in names[1] or names[1] in names[0]

    def _is_on(self, device: Device) -> bool:
        if self.device is None:
            return True
        name = _normalized(self.device)
        if device.family == "cpu":
            return not any(word in name for word in GPU_WORDS)
        return all(part in name for part in device.name.lower().split("-"))


def _normalized(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
