"""What a run will take, told before it starts: time, memory and disk, from one step that is thrown away."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from foretell.errors import CapacityError
from foretell.runner.memory_plan import GIB

from .trainer import Trainer

FLOATS = 4  # of a trained weight that a checkpoint keeps: the module's, the master and two moments


@dataclass(frozen=True)
class CostEstimate:
    """Seconds, bytes and how often every text is read."""

    seconds: float
    steps: int
    epochs: float
    memory: int
    disk: int

    @property
    def summary(self) -> str:
        return (
            f"about {format_duration(self.seconds)} for {self.steps} steps ({self.epochs:.1f} times through the texts), "
            f"{self.memory / GIB:.2f} GiB of memory, {self.disk / 2**20:.0f} MiB of disk"
        )


def format_duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} s"


def estimate_cost(trainer: Trainer, folder: Path, part: float = 1.0) -> CostEstimate:
    """Run one step's losses and gradients, and change nothing; only `part` of the texts may be there yet."""
    cuda = trainer.optimizer.parameters[0].device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = min(_timed(trainer) for _ in range(2))
    limits, standing = trainer.limits, trainer.state
    if limits.steps is not None:
        steps = limits.steps - standing.step
        left = steps * seconds
    else:
        assert limits.budget is not None, "a run has an end"
        left = max(0.0, limits.budget - standing.elapsed)
        steps = int(left / seconds)
    memory = torch.cuda.max_memory_allocated() if cuda else _own_memory()
    weights = sum(each.numel() for each in trainer.optimizer.parameters)
    disk = weights * 4 * (FLOATS + 1)
    _check_disk(disk, folder)
    return CostEstimate(left, steps, steps / max(1.0, trainer.batches.steps_per_epoch / part), memory, disk)


def _timed(trainer: Trainer) -> float:
    began = perf_counter()
    batch = trainer.batches.get(0)
    generator = torch.Generator(batch.tokens.device).manual_seed(0)
    progress = trainer.objective(trainer.capture(batch), generator)
    progress.loss.backward()  # type: ignore[no-untyped-call]
    float(progress.loss.detach())
    for each in trainer.optimizer.parameters:
        each.grad = None
    return perf_counter() - began


def _own_memory() -> int:
    """What this process takes now, its peak so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _check_disk(disk: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if disk > free:
        raise CapacityError(f"{folder} has {free / 2**20:.0f} MiB of room and the run wants {disk / 2**20:.0f}")
