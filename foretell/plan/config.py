"""What a user says of models and machines, and what a plan makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from foretell.config import MAX_DRAFT
from foretell.errors import RequestError
from foretell.options import option, strict

from .bench_reader import BenchProvenance, read_observations
from .calibrate import EfficiencyFit, calibrate
from .devices import Device, find_device
from .drafter_cost import FREE, HEAD, DrafterCost, find_drafter
from .model_shape import find_model_shape
from .steps import AUTO, TYPES, DeployedModel, cache_bytes, default_efficiency, precision_of

DEFAULT_MOST = 16


@strict
@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Models, devices, and how often guesses stand."""

    target: str | None = option(None, "a known model, a config.json, its folder, or a .gguf file")
    draft: str = option(
        FREE[0], f"who guesses: a model likewise, {HEAD} (a head), self:int8, self:int4, or {', '.join(FREE[:-1])}"
    )
    gpu: str = option("h100", "the device by name")
    count: int = option(1, "how many of them")
    tensor_parallel: int | None = option(
        None, "devices that each have a part of every layer (default: all)", aliases=("--tensor-parallel-size", "-tp")
    )
    draft_tensor_parallel: int = option(1, "the same for a draft model")
    acceptance: float = option(0.7, "how often a guess stands where those before it do")
    length: int | None = option(None, "tokens guessed each step (default: the best)")
    max_draft: int = option(DEFAULT_MOST, "the most tokens tried")
    dtype: str = option(AUTO, "of the target's weights", choices=TYPES)
    draft_dtype: str = option(AUTO, "of the draft model's weights", choices=TYPES)
    kv_dtype: str = option(AUTO, "of cached keys and values", choices=TYPES)
    price: float | None = option(None, "dollars an hour for one device (default: a round figure)")
    bandwidth: float | None = option(None, "GB/s of the device's memory (default: by its data sheet)")
    tflops: float | None = option(None, "of the device in bfloat16 (default: by its data sheet)")
    memory: float | None = option(None, "GB of the device (default: by its data sheet)")
    calibrate: str | None = option(None, "the JSON of a bench run of this target on this device, to learn from")

    def __post_init__(self) -> None:
        if self.target is None:
            raise RequestError("target", "is not named; say --target llama-3.1-8b, or give a config.json")
        if self.count < 1:
            raise RequestError("count", f"must be 1 or more, not {self.count}")
        for name in ("tensor_parallel", "draft_tensor_parallel"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= self.count:
                raise RequestError(name, f"must be 1 to the count, {self.count}, not {value}")
        for name in ("length", "max_draft"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_DRAFT:
                raise RequestError(name, f"must be between 0 and {MAX_DRAFT}, not {value}")
        for name in ("price", "bandwidth", "tflops", "memory"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(name, f"must be above 0, not {value:g}")
        if not 0 <= self.acceptance <= 1:
            raise RequestError("acceptance", f"must be between 0 and 1, not {self.acceptance:g}")


@dataclass(frozen=True)
class PlanInputs:
    """What a plan reckons with."""

    target: DeployedModel
    drafter: DrafterCost
    calibration: EfficiencyFit | None = None


def resolve_inputs(config: PlanConfig) -> PlanInputs:
    """The models on the devices, with what was measured there where a file says so."""
    assert config.target is not None, "checked where the config was made"
    shape, device = find_model_shape(config.target, "target"), device_of(config)
    split = config.tensor_parallel or config.count
    if shape.heads % split:
        fitting = [n for n in range(1, config.count + 1) if shape.heads % n == 0 and config.count % n == 0]
        words = f"{shape.heads} heads cannot be split over {split} devices; use {', '.join(map(str, fitting))}"
        raise RequestError("tensor_parallel", words)
    precision = precision_of(config.dtype, shape, "dtype")
    cached = cache_bytes(config.kv_dtype, device.family)
    target = DeployedModel(shape, precision, cached, device, default_efficiency(device.family), split)
    guesser = find_drafter(config.draft, target, config.draft_dtype, config.draft_tensor_parallel)
    if config.calibrate is None:
        return PlanInputs(target, guesser)
    # A run is of one device; what was learnt there holds for each of several.
    one = replace(target, tensor_parallel=1)
    alone = guesser if guesser.model is None else replace(guesser, model=replace(guesser.model, tensor_parallel=1))
    path = Path(config.calibrate)
    found = calibrate(one, alone, read_observations(path))
    found = replace(found, doubts=tuple(BenchProvenance.from_file(path).warnings(shape, device)))
    reached = found.efficiency
    drafts = guesser if guesser.model is None else replace(guesser, model=guesser.model.with_efficiency(reached))
    return PlanInputs(target.with_efficiency(reached), drafts, found)


def device_of(config: PlanConfig) -> Device:
    found = find_device(config.gpu)
    return found.with_overrides(config.memory, config.bandwidth, config.tflops, config.price)
