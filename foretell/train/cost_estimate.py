"""Estimate of a run's time, memory and disk before it starts, from a forward and backward pass that is discarded."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from foretell.errors import CapacityError
from foretell.runner.memory_plan import GIB

from .trainer import Trainer

CHECKPOINT_FLOATS = 4  # per trained weight in a checkpoint: the module's, the float32 master and two moments


@dataclass(frozen=True)
class CostEstimate:
    """Expected cost of a run; `memory` and `disk` are in bytes."""

    seconds: float
    steps: int
    epochs: float
    memory: int
    disk: int

    @property
    def summary(self) -> str:
        return (
            f"about {format_duration(self.seconds)} for {self.steps} steps ({self.epochs:.1f} epochs), "
            f"{self.memory / GIB:.2f} GiB of memory, {self.disk / 2**20:.0f} MiB of disk"
        )


def format_duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} s"


def estimate_cost(trainer: Trainer, folder: Path, answered_fraction: float = 1.0) -> CostEstimate:
    """Time one forward and backward pass without an update.

    `answered_fraction` is the share of prompts that have answers so far; an epoch will be that much longer.
    """
    cuda = trainer.optimizer.parameters[0].device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step_seconds = min(_time_step(trainer) for _ in range(2))
    limits, state = trainer.limits, trainer.state
    if limits.steps is not None:
        steps = limits.steps - state.step
        remaining = steps * step_seconds
    else:
        assert limits.budget is not None, "a run is limited by steps or by time"
        remaining = max(0.0, limits.budget - state.elapsed)
        steps = int(remaining / step_seconds)
    memory = torch.cuda.max_memory_allocated() if cuda else _peak_process_memory()
    weights = sum(each.numel() for each in trainer.optimizer.parameters)
    disk = weights * 4 * (CHECKPOINT_FLOATS + 1)
    _check_disk(disk, folder)
    epochs = steps / max(1.0, trainer.batches.steps_per_epoch / answered_fraction)
    return CostEstimate(remaining, steps, epochs, memory, disk)


def _time_step(trainer: Trainer) -> float:
    began = perf_counter()
    batch = trainer.batches.get(0)
    generator = torch.Generator(batch.tokens.device).manual_seed(0)
    result = trainer.objective(trainer.capture(batch), generator)
    result.loss.backward()  # type: ignore[no-untyped-call]
    float(result.loss.detach())  # wait for the GPU
    for each in trainer.optimizer.parameters:
        each.grad = None
    return perf_counter() - began


def _peak_process_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _check_disk(disk: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if disk > free:
        raise CapacityError(
            f"{folder} has {free / 2**20:.0f} MiB of free disk and the run needs {disk / 2**20:.0f} MiB; "
            "free some, or choose another --out"
        )
