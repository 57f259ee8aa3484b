"""Time of a step by component: drafting, the target on its device, and the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from time import perf_counter
from typing import Any

import torch

from foretell.engine.engine import Engine
from foretell.engine.sequence_state import SequenceState
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.executor import Executor, StepOutput
from foretell.runner.model_runner import ModelRunner


class DeviceClock(Executor):
    """Seconds for which the target's executor keeps its device busy; on a CUDA device by its own events."""

    def __init__(self, runner: ModelRunner) -> None:
        self._executor, self._seconds = runner.executor, 0.0
        self._cuda, self._open = runner.device.type == "cuda", False
        if self._cuda:
            self._begin, self._end = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
            self._send = getattr(self._executor, "_send", None)
            if self._send is not None:
                self._executor._send = self._sent  # type: ignore[attr-defined]
        runner.executor = self

    @property
    def seconds(self) -> float:
        if self._open:
            self._end.synchronize()
            self._seconds += self._begin.elapsed_time(self._end) / 1e3
            self._open = False
        return self._seconds

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        if not self._cuda:
            began = perf_counter()
            output = self._executor.forward(packed, taps)
            self._seconds += perf_counter() - began
            return output
        _ = self.seconds
        self._begin.record()
        output = self._executor.forward(packed, taps)
        self._end.record()
        self._open = True
        return output

    def _sent(self, *tables: Any) -> None:
        """Until its tables are made the device has nothing to do: that is the host's time."""
        assert self._send is not None
        self._send(*tables)
        self._begin.record()


@dataclass(frozen=True)
class Taken:
    """Times of sequences from their first token on."""

    seconds: float = 0.0
    drafting: float = 0.0  # until the drafts are ready
    device: float = 0.0  # the target's pass over them
    running: float = 0.0  # that pass, choosing, judging and committing
    tokens: int = 0
    steps: int = 0
    drafted: int = 0

    @classmethod
    def total(cls, some: Iterable[Taken]) -> Taken:
        several = list(some)
        return cls(**{each.name: sum(getattr(one, each.name) for one in several) for each in fields(cls)})

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def round(self) -> dict[str, float]:
        """Milliseconds of a round and of its parts."""
        parts = {
            "round": self.seconds,
            "draft": self.drafting,
            "verify": self.device,
            "judge": self.running - self.device,
            "rest": self.seconds - self.drafting - self.running,
        }
        return {name: 1e3 * seconds / max(1, self.steps) for name, seconds in parts.items()}

    def json(self) -> dict[str, float]:
        return asdict(self)


def write(engine: Engine, clock: DeviceClock, track: SequenceState) -> Taken:
    """Let a text be written to its end; the clocks run from its first token on."""
    while not track.seq.num_output_tokens:
        engine.step()
    stats, record = engine.stats, track.speculation
    before = (stats.draft_seconds, clock.seconds, stats.target_seconds, record.tokens, record.steps, record.drafted)
    began = perf_counter()
    while engine.busy:
        engine.step()
    seconds = perf_counter() - began
    after = (stats.draft_seconds, clock.seconds, stats.target_seconds, record.tokens, record.steps, record.drafted)
    return Taken(seconds, *(b - a for a, b in zip(before, after, strict=True)))  # type: ignore[arg-type]
