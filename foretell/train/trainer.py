"""The loop: a batch, the target's states, a step. What is random comes from (seed, step), so a killed run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from foretell.sampling.noise import derive_seed

from .batches import Batches
from .capture import Capture, KeptStates
from .checkpoint import TrainingState, save_checkpoint
from .objective import Method
from .optimizer import Optimizer

SMOOTH = 20  # steps over which progress is shown


@dataclass(frozen=True)
class Limits:
    """When a run, or this piece of it, is over; and how often it is kept and measured, in seconds."""

    steps: int | None
    budget: float | None
    piece: float | None = None
    save_every: float = 60.0
    check_every: float | None = None


@dataclass(frozen=True)
class Shown:
    """What a progress line says."""

    step: int
    share: float  # of the run that is done
    elapsed: float
    loss: float
    accepted: float  # a step, were the text's own tokens always there
    tokens_per_second: float


class Trainer:
    """Trains one method. `check` measures what is there now and keeps it where it is the best yet."""

    def __init__(
        self,
        method: Method,
        capture: Capture,
        batches: Batches,
        optimizer: Optimizer,
        limits: Limits,
        folder: Path,
        standing: TrainingState,
    ) -> None:
        self.method, self.capture, self.batches, self.optimizer = method, capture, batches, optimizer
        self.limits, self.folder, self.standing = limits, folder, standing
        self._states = KeptStates(capture, batches)
        self._sums: list[Tensor] = []
        self._losses: list[Tensor] = []

    def run(self, check: Callable[[], None], show: Callable[[Shown], None]) -> bool:
        """Train to the end of this piece; True where the whole run is done."""
        began, before = perf_counter(), self.standing.elapsed
        saved = checked = began
        while not self.done:
            self.step()
            now = perf_counter()
            self.standing.elapsed = before + now - began
            if self.standing.step % SMOOTH == 0:
                show(self.shown())
            if self.limits.check_every is not None and now - checked > self.limits.check_every:
                check()
                self.save()  # with the best so far
                saved = checked = perf_counter()
            if now - saved > self.limits.save_every:
                self.save()
                saved = perf_counter()
            if self.limits.piece is not None and now - began > self.limits.piece:
                break
        self.save()
        return self.done

    @property
    def share(self) -> float:
        """Of the run that is done."""
        if self.limits.steps is not None:
            return self.standing.step / self.limits.steps
        assert self.limits.budget is not None, "a run has an end"
        return self.standing.elapsed / self.limits.budget

    @property
    def done(self) -> bool:
        return self.share >= 1.0

    def step(self) -> None:
        """One batch."""
        standing = self.standing
        states = self._states.at(standing.step)
        generator = torch.Generator(self.batches.device)
        generator.manual_seed(derive_seed(self.batches.seed, standing.step) % (1 << 63))
        progress = self.method(states, generator)
        progress.loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(standing.step, self.share)
        self._sums.append(progress.sums())
        self._losses.append(progress.loss.detach())
        standing.step += 1
        standing.tokens += states.batch.size

    def shown(self) -> Shown:
        """How the last steps went; it goes into the curve."""
        standing = self.standing
        accepted = accepted_per_step(torch.stack(self._sums).sum(0))
        loss = float(torch.stack(self._losses).mean())
        self._sums.clear()
        self._losses.clear()
        rate = standing.tokens / max(standing.elapsed, 1e-9)
        standing.curve.append(
            {"step": standing.step, "elapsed": round(standing.elapsed, 2), "loss": loss, "accepted": accepted}
        )
        return Shown(standing.step, min(1.0, self.share), standing.elapsed, loss, accepted, rate)

    def save(self) -> None:
        tensors = {f"module.{name}": tensor for name, tensor in self.method.state().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        save_checkpoint(self.folder, self.standing, tensors)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from a checkpoint's tensors."""
        self.method.load({n.removeprefix("module."): t for n, t in tensors.items() if n.startswith("module.")})
        self.optimizer.load({n.removeprefix("optimizer."): t for n, t in tensors.items() if n.startswith("optimizer.")})


@torch.no_grad()
def estimate(method: Method, capture: Capture, batches: Batches, seed: int) -> tuple[float, tuple[float, ...]]:
    """Accepted per step on other texts, and how often the first, second .. guess stood: teacher-forced, in a moment."""
    sums: Tensor | None = None
    tokens = steps = 0
    for number, batch in enumerate(batches.in_order()):
        generator = torch.Generator(batch.tokens.device)
        generator.manual_seed(derive_seed(seed, number) % (1 << 63))
        progress = method(capture(batch), generator)
        walked, found = progress.walk(), progress.sums()
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
