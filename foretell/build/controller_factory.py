"""Builds the controller and the default speculation settings of requests from the config."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from foretell.build.model_source import ModelSource
from foretell.config import SpeculationConfig
from foretell.control.adaptive import AdaptiveController
from foretell.control.latency_model import CostPrior, StepCosts
from foretell.control.settings import ControllerSettings
from foretell.draft.mix import MixDrafter
from foretell.engine.request_builder import AUTO
from foretell.models.quantize import native_for
from foretell.types import SpeculationChoice
from foretell.utils.system import cpu_name, home
from foretell.verify.lossy import ThresholdSettings

COSTS_VERSION = 5  # of the cost file; raised when old measurements are no longer comparable


def costs_file(model: str, target: ModelSource) -> Path:
    """Return the file of measured costs, for this model on this device with this number of threads."""
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu_name()
    kernels = (target.quantization, native_for(target.device) is not None)
    parts: tuple[object, ...] = (model, target.config, target.dtype, target.kv_dtype, kernels, device)
    parts += (torch.get_num_threads(),)
    parts += (() if target.shard is None else (target.shard,), target.padded_sizes, COSTS_VERSION)
    return home() / "costs" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.json"


def build_controller(config: SpeculationConfig, drafter: MixDrafter, target: ModelSource) -> AdaptiveController:
    """Build the controller that chooses draft lengths for these drafters."""
    settings = ControllerSettings(
        max_draft_tokens=config.budget,
        fixed_length=config.fixed_lengths(),
        throughput=config.goal == "throughput",
        min_draft_tokens=config.min_draft,
        max_tree_nodes=config.tree,
    )
    traits = {name: each.traits for name, each in drafter.drafters.items()}
    costs = StepCosts(_cost_prior(target), target.padded_sizes)
    return AdaptiveController(traits, settings, costs, loader=drafter)


def _cost_prior(target: ModelSource) -> CostPrior:
    """Return the assumed costs before any measurement.

    A GPU runs many rows at the price of one; a cached token costs its share of the bytes read in a step.
    """
    row = 0.03 if target.device.type == "cpu" else 0.002
    return CostPrior(row=row, token=target.token_bytes / target.weight_bytes)


def default_choice(config: SpeculationConfig) -> SpeculationChoice:
    """Return the speculation settings of a request that has none of its own."""
    upper, lower = config.acceptance_threshold, config.acceptance_threshold_lower
    defaults = ThresholdSettings()
    if config.workload is not None and config.workload != AUTO:
        defaults = ThresholdSettings.for_workload(config.workload)  # raises for an unknown one
    thresholds = None
    if upper is not None or lower is not None:
        thresholds = (defaults.upper if upper is None else upper, defaults.lower if lower is None else lower)
    return SpeculationChoice(rule=config.rule, acceptance_threshold=thresholds, workload=config.workload)
