"""The loop: a batch, the target's states, a step. What is random comes from (seed, step), so a killed run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretell.errors import RequestError
from foretell.sampling.noise import mix

from .capture import HiddenStateCache, HiddenStateCapture
from .objective import Objective
from .optimizer import Optimizer
from .settings import TrainingProgress
from .token_dataset import BatchLoader

CHECKPOINT_FILE = "checkpoint.safetensors"


@dataclass
class TrainingState:
    """The numbers of a run."""

    step: int = 0
    elapsed: float = 0.0  # seconds of training, over all its pieces
    best: float = 0.0  # accepted per step, of the drafter that was kept
    tokens: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = ""  # the hash of what is trained on
    target_hash: str = ""  # of the target's files; empty in checkpoints of older versions


def save_checkpoint(folder: Path, standing: TrainingState, tensors: dict[str, Tensor]) -> None:
    """Replace the last one."""
    part = folder / f".{CHECKPOINT_FILE}.part"
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(kept, part, {"standing": json.dumps(asdict(standing))})
    os.replace(part, folder / CHECKPOINT_FILE)


def load_checkpoint(folder: Path) -> tuple[TrainingState, dict[str, Tensor]]:
    """The last one."""
    path = folder / CHECKPOINT_FILE
    if not path.is_file():
        raise RequestError("resume", f"there is no checkpoint in {folder}; leave --resume out to begin there")
    try:
        with safe_open(path, "pt") as file:
            standing = TrainingState(**json.loads(file.metadata()["standing"]))
            names: list[str] = list(file.keys())
            return standing, {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RequestError("resume", f"{path} cannot be read: {error}") from None


SMOOTH = 20  # steps over which progress is shown


@dataclass(frozen=True)
class TrainingLimits:
    """When a run, or this piece of it, is over; and how often it is kept and measured, in seconds."""

    steps: int | None
    budget: float | None
    piece: float | None = None
    save_every: float = 60.0
    check_every: float | None = None


class Trainer:
    """Trains one method. `check` measures what is there now and keeps it where it is the best yet."""

    def __init__(
        self,
        method: Objective,
        capture: HiddenStateCapture,
        batches: BatchLoader,
        optimizer: Optimizer,
        limits: TrainingLimits,
        folder: Path,
        standing: TrainingState,
    ) -> None:
        self.objective, self.capture, self.batches, self.optimizer = method, capture, batches, optimizer
        self.limits, self.folder, self.state = limits, folder, standing
        self._states = HiddenStateCache(capture, batches)
        self._sums: list[Tensor] = []
        self._losses: list[Tensor] = []

    def run(self, check: Callable[[], None], show: Callable[[TrainingProgress], None]) -> bool:
        """Train to the end of this piece; True where the whole run is done."""
        began, before = perf_counter(), self.state.elapsed
        saved = checked = began
        while not self.done:
            self.step()
            now = perf_counter()
            self.state.elapsed = before + now - began
            if self.state.step % SMOOTH == 0:
                show(self.log_progress())
            if self.limits.check_every is not None and now - checked > self.limits.check_every:
                check()
                self.save_checkpoint()  # with the best so far
                saved = checked = perf_counter()
            if now - saved > self.limits.save_every:
                self.save_checkpoint()
                saved = perf_counter()
            if self.limits.piece is not None and now - began > self.limits.piece:
                break
        self.save_checkpoint()
        return self.done

    @property
    def fraction_done(self) -> float:
        """Of the run that is done."""
        if self.limits.steps is not None:
            return self.state.step / self.limits.steps
        assert self.limits.budget is not None, "a run has an end"
        return self.state.elapsed / self.limits.budget

    @property
    def done(self) -> bool:
        return self.fraction_done >= 1.0

    def step(self) -> None:
        """One batch."""
        standing = self.state
        states = self._states.get(standing.step)
        generator = torch.Generator(self.batches.device)
        generator.manual_seed(mix(self.batches.seed, standing.step) % (1 << 63))
        progress = self.objective(states, generator)
        progress.loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(standing.step, self.fraction_done)
        self._sums.append(progress.acceptance_counts())
        self._losses.append(progress.loss.detach())
        standing.step += 1
        standing.tokens += states.batch.num_tokens

    def log_progress(self) -> TrainingProgress:
        """How the last steps went; it goes into the curve."""
        standing = self.state
        accepted = accepted_per_step(torch.stack(self._sums).sum(0))
        loss = float(torch.stack(self._losses).mean())
        self._sums.clear()
        self._losses.clear()
        rate = standing.tokens / max(standing.elapsed, 1e-9)
        standing.curve.append(
            {"step": standing.step, "elapsed": round(standing.elapsed, 2), "loss": loss, "accepted": accepted}
        )
        return TrainingProgress(standing.step, min(1.0, self.fraction_done), standing.elapsed, loss, accepted, rate)

    def save_checkpoint(self) -> None:
        tensors = {f"module.{name}": tensor for name, tensor in self.objective.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        save_checkpoint(self.folder, self.state, tensors)

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """Go on from a checkpoint's tensors."""
        self.objective.load_state_dict(
            {n.removeprefix("module."): t for n, t in tensors.items() if n.startswith("module.")}
        )
        self.optimizer.load({n.removeprefix("optimizer."): t for n, t in tensors.items() if n.startswith("optimizer.")})


@torch.no_grad()
def estimate_acceptance(
    method: Objective, capture: HiddenStateCapture, batches: BatchLoader, seed: int
) -> tuple[float, tuple[float, ...]]:
    """Accepted per step on other texts, and how often the first, second .. guess stood: teacher-forced, in a moment."""
    sums: Tensor | None = None
    tokens = steps = 0
    for number, batch in enumerate(batches.eval_batches()):
        generator = torch.Generator(batch.tokens.device)
        generator.manual_seed(mix(seed, number) % (1 << 63))
        progress = method(capture(batch), generator)
        walked, found = progress.simulate_decoding(), progress.acceptance_counts()
        tokens, steps = tokens + walked[0], steps + walked[1]
        sums = found if sums is None else sums + found
    if sums is None or not steps:
        return 1.0, ()
    stood, asked = sums.tolist()
    reached = [asked[0], *stood[:-1]]
    accuracy = tuple(round(hit / max(1.0, before), 4) for hit, before in zip(stood, reached, strict=True))
    return tokens / steps, accuracy


def accepted_per_step(sums: Tensor) -> float:
    """Tokens a step yields: the target's own and, of each guess, the share that stands with all before it."""
    stood, asked = sums
    return 1.0 + float((stood / asked.clamp_min(1)).sum())
