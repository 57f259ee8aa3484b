"""The first rank's steps: told to the others, then run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from foretell.errors import RankError
from foretell.models.draft_heads import HeadConfig
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.executor import Executor, StepOutput
from foretell.runner.heads.ops import HeadLogits, HeadOp, TorchHeadOps
from foretell.runner.model_runner import ModelRunner

from .messages import head_config_message, head_op_message, move_message, step_message
from .tp_group import TensorParallelGroup

Result = TypeVar("Result")


def make_leader(runner: ModelRunner, team: TensorParallelGroup, model: int = 0) -> None:
    """Let the runner's steps and moves be those of all ranks; `model` is which of theirs."""
    runner.executor = LeaderExecutor(runner.executor, team, model)
    runner.workers = TensorParallelWorkers(team, model)


class LeaderExecutor(Executor):
    """What the first rank's own executor gives: the others' parts are in its sums and logits."""

    def __init__(self, own: Executor, team: TensorParallelGroup, model: int) -> None:
        self.executor, self.group, self.model = own, team, model
        self.is_batch_invariant = own.is_batch_invariant

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        return run_on_all_ranks(
            self.group, step_message(self.model, packed), lambda: self.executor.forward(packed, taps)
        )


class LeaderHeadOps:
    """What the first rank's part of a head does, with the others."""

    def __init__(self, own: TorchHeadOps, team: TensorParallelGroup) -> None:
        self.ops, self.group = own, team

    def store_hidden_states(self, slots: Tensor, states: Tensor) -> None:
        """The others have kept theirs of every step."""
        self.ops.store_hidden_states(slots, states)

    def run(self, job: HeadOp) -> HeadLogits:
        return run_on_all_ranks(self.group, head_op_message(self.ops.pages.first, job), lambda: self.ops.run(job))


def run_on_all_ranks(team: TensorParallelGroup, message: bytes, run: Callable[[], Result]) -> Result:
    """Tell the others, and do it. What breaks off leaves them in the midst of it: then there is no next time."""
    team.check()
    with uninterrupted():
        try:
            team.broadcast(message)
            return run()
        except RankError:
            raise
        except BaseException as error:
            raise team.fail(error) from error


class TensorParallelWorkers:
    """The other ranks, as a runner knows them."""

    def __init__(self, team: TensorParallelGroup, model: int) -> None:
        self._group, self._model = team, model

    def move(self, source: list[int], target: list[int]) -> None:
        """Move slots as the first rank does."""
        if source != target:
            self._group.broadcast(move_message(self._model, source, target))

    def leader_ops(self, ops: TorchHeadOps) -> LeaderHeadOps:
        """The first rank's part of a head, with theirs."""
        return LeaderHeadOps(ops, self._group)

    def configure_head(self, head: int, config: HeadConfig) -> None:
        """Connect their parts of a head as the first rank's is."""
        self._group.broadcast(head_config_message(head, config))

    def check(self) -> None:
        """Raise if a rank was lost meanwhile: a CUDA device then ends a step as if all were well."""
        self._group.check()

    def on_failure(self, callback: Callable[[RankError], None]) -> None:
        self._group.on_failure(callback)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of what is in here; a second one does not."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        if came:
            before(number, frame)  # type: ignore[arg-type]
        came.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(came[0], None)
