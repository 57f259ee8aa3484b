"""Options of `foretell plan`, and the deployment they describe."""

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
    """Options of `foretell plan`: models, devices and acceptance."""

    target: str | None = option(
        None, "target model: a known name, a config.json, its folder, or a .gguf file", common=True
    )
    draft: str = option(
        FREE[0],
        f"drafter: a model as above, {HEAD} (a head), self:int8, self:int4, or {', '.join(FREE[:-1])}",
        common=True,
    )
    gpu: str = option("h100", "device name", common=True)
    count: int = option(1, "number of devices", common=True)
    tensor_parallel: int | None = option(
        None, "tensor parallel size (default: all devices)", aliases=("--tensor-parallel-size", "-tp")
    )
    draft_tensor_parallel: int = option(1, "tensor parallel size of a draft model")
    acceptance: float = option(
        0.7, "acceptance rate of a draft token, given that those before it were accepted", common=True
    )
    length: int | None = option(None, "draft tokens per step (default: the best length)", common=True)
    max_draft: int = option(DEFAULT_MOST, "longest draft to consider")
    dtype: str = option(AUTO, "data type of the target's weights", choices=TYPES, common=True)
    draft_dtype: str = option(AUTO, "data type of the draft model's weights", choices=TYPES)
    kv_dtype: str = option(AUTO, "data type of the KV cache", choices=TYPES)
    price: float | None = option(None, "dollars per hour and device (default: a rough figure)", common=True)
    bandwidth: float | None = option(None, "memory bandwidth of the device in GB/s (default: its data sheet)")
    tflops: float | None = option(None, "bfloat16 TFLOPS of the device (default: its data sheet)")
    memory: float | None = option(None, "memory of the device in GB (default: its data sheet)")
    calibrate: str | None = option(None, "JSON of a bench run of this target on this device, to fit the efficiency to")

    def __post_init__(self) -> None:
        if self.target is None:
            raise RequestError("target", "is missing; use --target llama-3.1-8b or the path of a config.json")
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
    """Target, drafter and calibration of a plan."""

    target: DeployedModel
    drafter: DrafterCost
    calibration: EfficiencyFit | None = None


def resolve_inputs(config: PlanConfig) -> PlanInputs:
    """Return the deployed models, calibrated if a bench run is given."""
    assert config.target is not None, "checked where the config was made"
    shape, device = find_model_shape(config.target, "target"), device_of(config)
    split = config.tensor_parallel or config.count
    if shape.heads % split:
        valid = [n for n in range(1, config.count + 1) if shape.heads % n == 0 and config.count % n == 0]
        message = f"{shape.heads} heads cannot be split over {split} devices; use {', '.join(map(str, valid))}"
        raise RequestError("tensor_parallel", message)
    precision = precision_of(config.dtype, shape, "dtype")
    cached = cache_bytes(config.kv_dtype, device.family)
    target = DeployedModel(shape, precision, cached, device, default_efficiency(device.family), split)
    drafter = find_drafter(config.draft, target, config.draft_dtype, config.draft_tensor_parallel)
    if config.calibrate is None:
        return PlanInputs(target, drafter)
    # A bench run is of one device; its efficiency applies to each of several.
    one = replace(target, tensor_parallel=1)
    alone = drafter if drafter.model is None else replace(drafter, model=replace(drafter.model, tensor_parallel=1))
    path = Path(config.calibrate)
    found = calibrate(one, alone, read_observations(path))
    found = replace(found, warnings=tuple(BenchProvenance.from_file(path).warnings(shape, device)))
    efficiency = found.efficiency
    drafts = drafter if drafter.model is None else replace(drafter, model=drafter.model.with_efficiency(efficiency))
    return PlanInputs(target.with_efficiency(efficiency), drafts, found)


def device_of(config: PlanConfig) -> Device:
    found = find_device(config.gpu)
    return found.with_overrides(config.memory, config.bandwidth, config.tflops, config.price)
