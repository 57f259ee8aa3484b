"""Who decides how far to guess, and what requests get that say nothing of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from foretell.build.model_source import ModelSource
from foretell.config import SpeculationConfig
from foretell.control.adaptive import AdaptiveController
from foretell.control.latency_model import CostPrior, StepCosts
from foretell.control.settings import ControllerSettings, DrafterTraits
from foretell.draft.base import Drafter
from foretell.engine.request_builder import AUTO
from foretell.models.quantize import native_for
from foretell.types import SpeculationChoice
from foretell.utils.system import home, processor
from foretell.verify.lossy import ThresholdSettings

COSTS = 4  # what was learnt of others, or of other heads under the same names, is not gone on with


def costs_file(model: str, target: ModelSource) -> Path:
    """Where what steps cost is kept: for this model on this device with so many threads."""
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else processor()
    kernels = (target.quantization, native_for(target.device) is not None)
    parts: tuple[object, ...] = (model, target.config, target.dtype, kernels, device, torch.get_num_threads())
    parts += (() if target.shard is None else (target.shard,), target.sizes, COSTS)
    return home() / "costs" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.json"


def build_controller(config: SpeculationConfig, drafter: Drafter, target: ModelSource) -> AdaptiveController:
    """Who decides how far to guess for these drafters."""
    settings = ControllerSettings(
        most=config.budget,
        fixed=config.fixed_lengths(),
        throughput=config.goal == "throughput",
        shortest=config.min_draft,
        tree=config.tree,
    )
    arms = drafter.drafters.items()
    traits = {name: DrafterTraits.of(arm) for name, arm in arms}
    costs = StepCosts(_cost_prior(target), target.sizes)
    return AdaptiveController(traits, settings, costs, presence=drafter)


def _cost_prior(target: ModelSource) -> CostPrior:
    """Before anything ran: a GPU takes many rows for the price of one, and a cached token costs its share of bytes."""
    row = 0.03 if target.device.type == "cpu" else 0.002
    return CostPrior(row=row, token=target.token_bytes / target.weights)


def default_choice(config: SpeculationConfig) -> SpeculationChoice:
    """What a request gets that says nothing of speculation."""
    given = (config.acceptance_threshold, config.acceptance_threshold_lower)
    known = ThresholdSettings()
    if config.workload is not None and config.workload != AUTO:
        known = ThresholdSettings.for_workload(config.workload)
    upper, lower = given[0] if given[0] is not None else known.upper, given[1] if given[1] is not None else known.lower
    thresholds = None if given == (None, None) else (upper, lower)
    return SpeculationChoice(rule=config.rule, acceptance_threshold=thresholds, workload=config.workload)
