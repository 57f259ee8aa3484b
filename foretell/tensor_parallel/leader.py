"""The leader: sends each step to the workers, then runs it on its own shard."""

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


def make_leader(runner: ModelRunner, group: TensorParallelGroup, model: int = 0) -> None:
    """Make a runner the leader of a group; `model` is the index of its model on the workers."""
    runner.executor = LeaderExecutor(runner.executor, group, model)
    runner.workers = TensorParallelWorkers(group, model)


class LeaderExecutor(Executor):
    """Runs steps on all ranks. The collectives of the leader's own executor combine the shards."""

    def __init__(self, executor: Executor, group: TensorParallelGroup, model: int) -> None:
        self.executor, self.group, self.model = executor, group, model
        self.is_batch_invariant = executor.is_batch_invariant

    def forward(self, packed: BatchLayout, hidden_layers: tuple[int, ...]) -> StepOutput:
        return run_on_all_ranks(
            self.group, step_message(self.model, packed), lambda: self.executor.forward(packed, hidden_layers)
        )


class LeaderHeadOps:
    """Runs the operations of a head on all ranks."""

    def __init__(self, ops: TorchHeadOps, group: TensorParallelGroup) -> None:
        self.ops, self.group = ops, group

    def store_hidden_states(self, slots: Tensor, states: Tensor) -> None:
        """Store the leader's part; the workers have stored theirs after every step."""
        self.ops.store_hidden_states(slots, states)

    def run(self, op: HeadOp) -> HeadLogits:
        return run_on_all_ranks(self.group, head_op_message(self.ops.pages.first, op), lambda: self.ops.run(op))


def run_on_all_ranks(group: TensorParallelGroup, message: bytes, run: Callable[[], Result]) -> Result:
    """Send a message to the workers and run it here. If that fails, the ranks are out of step and the group ends."""
    group.check()
    with uninterrupted():
        try:
            group.broadcast(message)
            return run()
        except RankError:
            raise
        except BaseException as error:
            raise group.fail(error) from error


class TensorParallelWorkers:
    """The workers of a runner; see `Workers`."""

    def __init__(self, group: TensorParallelGroup, model: int) -> None:
        self._group, self._model = group, model

    def move(self, source: list[int], target: list[int]) -> None:
        """Move KV slots as the leader does."""
        if source != target:
            self._group.broadcast(move_message(self._model, source, target))

    def leader_ops(self, ops: TorchHeadOps) -> LeaderHeadOps:
        """Return operations that run on all shards of a head."""
        return LeaderHeadOps(ops, self._group)

    def configure_head(self, head: int, config: HeadConfig) -> None:
        """Send the leader's config of a head to the workers."""
        self._group.broadcast(head_config_message(head, config))

    def check(self) -> None:
        """Raise if a rank was lost; a CUDA device finishes such a step as if nothing had happened."""
        self._group.check()

    def on_failure(self, callback: Callable[[RankError], None]) -> None:
        self._group.on_failure(callback)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of this context; a second Ctrl-C interrupts at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    received: list[int] = []

    def remember(number: int, frame: object) -> None:
        if received:
            before(number, frame)  # type: ignore[arg-type]
        received.append(number)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        before(received[0], None)
