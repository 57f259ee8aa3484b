"""Recovery from a failed step: run its sequences one by one, so that only those that fail alone are lost."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretell.control.controller import Controller, FreeDrafts
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Delta, Draft, Request, ScheduledSequence, Sequence, StepResult, StepTimes

if TYPE_CHECKING:
    from .engine import Engine
    from .sequence_state import SequenceState

LOG = logging.getLogger("foretell")


class PartialCommit(Exception):
    """A step failed within the commit of a sequence, whose tokens can no longer be trusted."""


class NoDraftController(Controller):
    """Drafts nothing, so that no draft can be what fails; otherwise the controller it wraps."""

    allows_early_start = False  # the next step may be of another sequence

    def __init__(self, inner: Controller) -> None:
        self.inner, self.decisions = inner, inner.decisions

    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        return [Budget()] * len(seqs)

    def expects_plain_step(self, seqs: list[Sequence]) -> bool:
        return False

    def observe(self, results: list[StepResult], times: StepTimes) -> None:
        self.inner.observe(results, times)

    def learns_from(self, seq: Sequence) -> bool:
        return self.inner.learns_from(seq)

    def plain_seconds(self, batch: int, context: int) -> float | None:
        return self.inner.plain_seconds(batch, context)

    def forget(self, seq: Sequence) -> None:
        self.inner.forget(seq)


@dataclass
class Recovery:
    """The outcome of a failed step for each of its sequences."""

    deltas: list[Delta] = field(default_factory=list)  # of sequences that were committed nevertheless
    failed: dict[str, Exception] = field(default_factory=dict)  # by request id
    num_continued: int = 0  # sequences that ran alone


def recover(engine: Engine, states: Iterable[SequenceState], error: Exception) -> Recovery:
    """Run every sequence of a failed step alone; `states` are those whose callers wait.

    What was committed before the failure stays, and its deltas wait in the outboxes. The other sequences have not
    changed: their KV past `num_computed_tokens` is overwritten by the next step. If no sequence runs, the oldest
    waiting one could not be admitted, and fails with `error`.
    """
    states = list(states)
    recovery = Recovery([delta for state in states for delta in state.outbox])
    if not engine.scheduler.running:
        recovery.failed |= {seq.request.id: error for seq in list(engine.scheduler.waiting)[:1]}
    for seq in engine.scheduler.running[::-1]:  # youngest first: it is the one to wait if pages do not suffice
        state = engine.states[seq.id]
        if state.outbox:
            engine.release(seq)
        else:
            _step_alone(engine, state, recovery)
    engine.scheduler.preempt_excess()  # a step alone may have run out of memory, which lowers the limits for all
    for state in states:  # sequences that finished in the step and whose delta could not be made
        request_id = state.seq.request.id
        if state.has_pending_delta and request_id not in recovery.failed:
            recovery.failed[request_id] = PartialCommit(f"the output of request {request_id} could not be emitted")
    return recovery


def _step_alone(engine: Engine, state: SequenceState, recovery: Recovery) -> None:
    seq = state.seq
    try:
        if (
            state.has_pending_delta
            or seq.finish_reason is not None
            or state.detokenizer.num_tokens != seq.num_output_tokens
            or _grammar_is_ahead(state)
        ):
            raise PartialCommit(f"the last step of request {seq.request.id} was only partly committed")
        with _only(engine, seq):
            engine.step()
    except Exception as error:
        if not state.outbox:
            LOG.exception("a sequence failed alone and is aborted; the others of its step continue")
            recovery.failed[seq.request.id] = error
            return
    recovery.deltas += state.outbox
    recovery.num_continued += 1


def _grammar_is_ahead(state: SequenceState) -> bool:
    return state.matcher is not None and state.matcher.num_tokens != state.seq.num_output_tokens


@contextmanager
def _only(engine: Engine, seq: Sequence) -> Iterator[None]:
    """Let the engine see only `seq`; the other sequences keep their pages and their order."""
    scheduler, controller = engine.scheduler, engine.controller
    running, waiting = scheduler.running, scheduler.waiting
    position = running.index(seq)
    scheduler.running = [seq]
    scheduler.waiting = deque()
    engine.controller = NoDraftController(controller)
    try:
        yield
    finally:
        running[position : position + 1] = scheduler.running
        waiting.extendleft(scheduler.waiting)
        scheduler.running = running
        scheduler.waiting = waiting
        engine.controller = controller


def is_healthy(engine: Engine) -> bool:
    """Return whether a dummy sequence can run; then the sequences were at fault, not the engine."""
    request = Request("health-check", (0,), SamplingParams(), 0, 1)
    seq = Sequence(-1, request, [0])
    try:
        if engine.runner.reserve(seq, 1):
            engine.runner.forward([ScheduledSequence.of(seq, 1)], [Draft()]).logits.argmax(-1).tolist()
        return True
    except Exception:
        LOG.exception("even a dummy sequence cannot run")
        return False
    finally:
        engine.runner.trim(seq, 0)
