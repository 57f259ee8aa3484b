"""What was measured of steps, read from the JSON of a bench run."""

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

WHOLE = 0.9  # of an arm's steps must have had a whole draft; a text's first step never has one
SHORT_CONTEXT = 512  # where a run does not say how long its texts were
KINDS = "foretell bench offline or drafters with --out, bench/grid.py or bench/gpu.py"
FREE, MODEL, NONE = "oracle", "model", "none"  # who guessed


@dataclass(frozen=True)
class Observation:
    """One step as it was timed: on the device alone, or by the wall clock with the host and the drafter."""

    batch: int
    context: int
    length: int  # tokens guessed for each text
    seconds: float
    wall: bool
    drafter: str = NONE
    of_draft: bool = False  # whether it is a step of the draft model, not of the target
    accepted: float = 1.0  # tokens it yielded for a text


def read_observations(path: Path) -> list[Observation]:
    """The steps in a bench run's JSON; what holds none is refused."""
    found = list(_all(load_run(path)))
    if not found:
        raise RequestError("calibrate", f"{path} has no timed steps; give the JSON of {KINDS}")
    return found


def load_run(path: Path) -> Mapping[str, Any]:
    """A file of JSON, or the log of a script that prints it last."""
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
        place = int(cell["texts"]), int(cell["context"]), int(cell["length"])
        if cell["device_ms"] is not None and cell["drafter"] != MODEL:
            yield Observation(*place, cell["device_ms"] / 1e3, wall=False)
        accepted = float(cell["accepted_per_step"])
        yield Observation(*place, cell["wall_ms"] / 1e3, wall=True, drafter=cell["drafter"], accepted=accepted)


def _bench(run: Mapping[str, Any]) -> Iterator[Observation]:
    """One text at a time: plain steps, and those of arms that guess a fixed number of tokens in nearly every step.

    Drafting is left out of an arm's step; what a drafter of one's own machine takes is not what is asked for here.
    """
    lengths = run.get("drafters", {})
    alone = [cell for cell in run["overall"] if cell.get("batch", 1) == 1]
    for place, cell in enumerate(alone):
        plain, mine = cell["plain_tokens_per_second"], cell["tokens_per_second"]
        if place == 0 and plain:
            yield Observation(1, SHORT_CONTEXT, 0, 1 / plain, wall=True)
        length = lengths.get(cell["arm"]) if isinstance(lengths, Mapping) else None
        if mine and isinstance(length, int) and length > 0 and _drafts_whole(cell, length):
            seconds = cell["accepted_per_step"] / mine * (1 - cell["time"]["drafting"])
            yield Observation(1, SHORT_CONTEXT, length, seconds, True, FREE, accepted=cell["accepted_per_step"])


def _drafts_whole(cell: Mapping[str, Any], length: int) -> bool:
    """Whether its steps were of that length. A drafter that copies often has no guess, or a shorter one."""
    reached = (cell.get("places") or {}).get("reached") or []
    return len(reached) >= length and reached[length - 1] >= WHOLE * cell["steps"]


def _gpu(run: Mapping[str, Any]) -> Iterator[Observation]:
    """Figures by their names. Those of rows stand for the last context that was measured: the others are lost."""
    context = 0
    for name, value in run.items():
        if one := re.fullmatch(r"step, 1 row, context (\d+)", name):
            context = int(one[1])
            yield Observation(1, context, 0, value / 1e3, wall=False)
        elif texts := re.fullmatch(r"step, (\d+) texts, context (\d+)", name):
            yield Observation(int(texts[1]), int(texts[2]), 0, value / 1e3, wall=False)
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


NEAR = 0.01  # of a model's weights
GPU_WORDS = ("nvidia", "geforce", "radeon", "instinct")


@dataclass(frozen=True)
class BenchProvenance:
    """What a run tells of itself: a model's name, or its sizes, and the device's name."""

    model: str | None = None
    sizes: Mapping[str, Any] | None = None
    device: str | None = None

    @classmethod
    def from_file(cls, path: Path) -> BenchProvenance:
        run = load_run(path)
        sizes, device = run.get("target"), run.get("device") or (run.get("machine") or {}).get("device")
        return cls(run.get("model"), sizes if isinstance(sizes, Mapping) else None, device)

    def warnings(self, shape: ModelShape, device: Device) -> list[str]:
        """What a reader must know where it seems to be of something else; names differ, so nothing is refused."""
        found = []
        if not self._is_of(shape):
            found.append(f"The run is of {self.model or 'a model of other sizes'}, the plan for {shape.name}")
        if not self._is_on(device):
            found.append(f"The run is of {self.device}, the plan for {device.name}")
        return [f"{each}: what was measured there may not hold here." for each in found]

    def _is_of(self, shape: ModelShape) -> bool:
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
