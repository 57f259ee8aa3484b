"""Training loop and checkpoints. All randomness derives from (seed, step), so that a killed run resumes exactly."""

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
from foretell.sampling.noise import derive_seed

from .capture import HiddenStateCache, HiddenStateCapture
from .objective import Objective
from .optimizer import Optimizer
from .settings import TrainingProgress
from .token_dataset import BatchLoader

CHECKPOINT_FILE = "checkpoint.safetensors"
LOG_STEPS = 20  # steps between two progress lines, which average over them


@dataclass
class TrainingState:
    """Counters and settings of a run. Field names are part of the checkpoint format and of run.json."""

    step: int = 0
    elapsed: float = 0.0  # seconds of training, over all resumed parts
    best: float = 0.0  # accepted per step of the best checkpoint
    tokens: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = ""  # hash of the training documents
    target_hash: str = ""  # hash of the target's files; empty in checkpoints of older versions


def save_checkpoint(folder: Path, state: TrainingState, tensors: dict[str, Tensor]) -> None:
    """Write the checkpoint and replace the previous one atomically."""
    part = folder / f".{CHECKPOINT_FILE}.part"
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(host, part, {"standing": json.dumps(asdict(state))})
    os.replace(part, folder / CHECKPOINT_FILE)


def load_checkpoint(folder: Path) -> tuple[TrainingState, dict[str, Tensor]]:
    path = folder / CHECKPOINT_FILE
    if not path.is_file():
        raise RequestError("resume", f"there is no checkpoint in {folder}; leave --resume out to start a run there")
    try:
        with safe_open(path, "pt") as file:
            state = TrainingState(**json.loads(file.metadata()["standing"]))
            names: list[str] = list(file.keys())
            return state, {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RequestError("resume", f"{path} cannot be read: {error}") from None


@dataclass(frozen=True)
class TrainingLimits:
    """End of a run, by steps or by time, and intervals; times are in seconds."""

    steps: int | None
    budget: float | None
    piece: float | None = None  # stop after this long, to be resumed
    save_every: float = 60.0
    check_every: float | None = None


class Trainer:
    """Trains one objective from its current state to its limits."""

    def __init__(
        self,
        objective: Objective,
        capture: HiddenStateCapture,
        batches: BatchLoader,
        optimizer: Optimizer,
        limits: TrainingLimits,
        folder: Path,
        state: TrainingState,
    ) -> None:
        self.objective, self.capture, self.batches, self.optimizer = objective, capture, batches, optimizer
        self.limits, self.folder, self.state = limits, folder, state
        self._states = HiddenStateCache(capture, batches)
        self._counts: list[Tensor] = []  # of the steps since the last progress line
        self._losses: list[Tensor] = []

    def run(
        self,
        evaluate: Callable[[], None],
        report: Callable[[TrainingProgress], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train until the run or this part of it is over; return True if the run is done.

        `evaluate` measures the current weights and keeps them if they are the best so far. `stop` is asked between
        two steps, so that the checkpoint of a stopped run is that of a whole step.
        """
        began, before = perf_counter(), self.state.elapsed
        saved = checked = began
        while not (self.done or stop()):
            self.step()
            now = perf_counter()
            self.state.elapsed = before + now - began
            if self.state.step % LOG_STEPS == 0:
                report(self.log_progress())
            if self.limits.check_every is not None and now - checked > self.limits.check_every:
                evaluate()
                self.save_checkpoint()  # with the best result so far
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
        if self.limits.steps is not None:
            return self.state.step / self.limits.steps
        assert self.limits.budget is not None, "a run is limited by steps or by time"
        return self.state.elapsed / self.limits.budget

    @property
    def done(self) -> bool:
        return self.fraction_done >= 1.0

    def step(self) -> None:
        """Train on one batch: loss, gradients, update of the weights."""
        state = self.state
        states = self._states.get(state.step)
        generator = torch.Generator(self.batches.device)
        generator.manual_seed(derive_seed(self.batches.seed, state.step) % (1 << 63))
        result = self.objective(states, generator)
        result.loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(state.step, self.fraction_done)
        self._counts.append(result.acceptance_counts())
        self._losses.append(result.loss.detach())
        state.step += 1
        state.tokens += states.batch.num_tokens

    def log_progress(self) -> TrainingProgress:
        """Average the steps since the last call and append them to the training curve."""
        state = self.state
        accepted = accepted_per_step(torch.stack(self._counts).sum(0))
        loss = float(torch.stack(self._losses).mean())
        self._counts.clear()
        self._losses.clear()
        rate = state.tokens / max(state.elapsed, 1e-9)
        state.curve.append({"step": state.step, "elapsed": round(state.elapsed, 2), "loss": loss, "accepted": accepted})
        return TrainingProgress(
            step=state.step,
            fraction_done=min(1.0, self.fraction_done),
            elapsed=state.elapsed,
            loss=loss,
            accepted=accepted,
            tokens_per_second=rate,
        )

    def save_checkpoint(self) -> None:
        tensors = {f"module.{name}": tensor for name, tensor in self.objective.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        save_checkpoint(self.folder, self.state, tensors)

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """Restore weights and optimizer state from a checkpoint's tensors."""
        self.objective.load_state_dict(_with_prefix(tensors, "module."))
        self.optimizer.load(_with_prefix(tensors, "optimizer."))


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@torch.no_grad()
def estimate_acceptance(
    objective: Objective, capture: HiddenStateCapture, batches: BatchLoader, seed: int
) -> tuple[float, tuple[float, ...]]:
    """Estimate accepted tokens per step with teacher forcing, without generating.

    Also returns the acceptance rate at each depth, conditional on all draft tokens before it being accepted.
    """
    counts: Tensor | None = None
    tokens = steps = 0
    for number, batch in enumerate(batches.eval_batches()):
        generator = torch.Generator(batch.tokens.device)
        generator.manual_seed(derive_seed(seed, number) % (1 << 63))
        result = objective(capture(batch), generator)
        new_tokens, new_steps = result.simulate_decoding()
        tokens, steps = tokens + new_tokens, steps + new_steps
        counts = result.acceptance_counts() if counts is None else counts + result.acceptance_counts()
    if counts is None or not steps:
        return 1.0, ()
    accepted, drafted = counts.tolist()
    reached = [drafted[0], *accepted[:-1]]
    accuracy = tuple(round(hit / max(1.0, before), 4) for hit, before in zip(accepted, reached, strict=True))
    return tokens / steps, accuracy


def accepted_per_step(counts: Tensor) -> float:
    """Return output tokens per step: one from the target plus the acceptance rate of each draft token."""
    accepted, drafted = counts
    return 1.0 + float((accepted / drafted.clamp_min(1)).sum())
