"""After a step that failed: its texts are run one by one, and only those that fail alone are lost."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretell.control.controller import Controller, FreeDrafts
from foretell.control.decision_log import Decision
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Delta, Draft, Request, ScheduledSequence, Sequence, StepResult, StepTimes

if TYPE_CHECKING:
    from .engine import Engine
    from .sequence_state import SequenceState

LOG = logging.getLogger("foretell")


class PartialCommit(Exception):
    """A step broke off in the midst of a text's own commit: what it has written cannot be trusted."""


class NoDraftController(Controller):
    """Lets nothing be guessed, so that no draft can be what fails; all else is left to whom it stands in for."""

    allows_early_start = False  # each step is one of its own

    def __init__(self, inner: Controller) -> None:
        self.inner = inner

    def choose_draft_lengths(self, seqs: list[Sequence], offers: FreeDrafts) -> list[Budget]:
        return [Budget()] * len(seqs)

    def expects_plain_step(self, seqs: list[Sequence]) -> bool:
        return False

    def observe(self, outcomes: list[StepResult], times: StepTimes) -> None:
        self.inner.observe(outcomes, times)

    def learns_from(self, seq: Sequence) -> bool:
        return self.inner.learns_from(seq)

    @property
    def decision_counts(self) -> dict[Decision, int]:
        return self.inner.decision_counts

    @property
    def speculation_state(self) -> tuple[bool, str]:
        return self.inner.speculation_state

    @property
    def num_switches(self) -> int:
        return self.inner.num_switches

    def plain_seconds(self, batch: int, context: int) -> float | None:
        return self.inner.plain_seconds(batch, context)

    def forget(self, seq: Sequence) -> None:
        self.inner.forget(seq)


@dataclass
class Rescue:
    """What a failed step leaves: what was written all the same, and the requests that are lost, with their reasons."""

    deltas: list[Delta] = field(default_factory=list)
    lost: dict[str, Exception] = field(default_factory=dict)
    went_on: int = 0  # texts


def rescue(engine: Engine, tracks: Iterable[SequenceState], error: Exception) -> Rescue:
    """Bring every running text a step further, those apart that cannot be; `tracks` are all whose caller waits.

    What was committed before the failure stays and waits in its outbox. Of the others nothing has changed: their keys
    and values lie behind `cached`, where the next step writes them anew. Where nobody runs, it was the oldest of those
    who wait that could not be taken up, with `error`.
    """
    tracks = list(tracks)
    found = Rescue([delta for track in tracks for delta in track.outbox])
    if not engine.scheduler.running:
        found.lost |= {seq.request.id: error for seq in list(engine.scheduler.waiting)[:1]}
    for seq in engine.scheduler.running[::-1]:  # where pages do not suffice, it is the youngest that waits
        track = engine.states[seq.id]
        if track.outbox:
            engine.settle(seq)
        else:
            _go_on(engine, track, found)
    engine.scheduler.preempt_excess()  # a step alone may have run out of memory, which lowers the limits for all
    for track in tracks:  # one that ended in the step, and nobody can be told of it
        if track.untold and track.seq.request.id not in found.lost:
            found.lost[track.seq.request.id] = PartialCommit(
                f"what was written of text {track.seq.request.id} cannot be told"
            )
    return found


def _go_on(engine: Engine, track: SequenceState, found: Rescue) -> None:
    seq = track.seq
    try:
        if (
            track.untold
            or seq.finish_reason is not None
            or track.writer.count != seq.num_output_tokens
            or _grammar_is_ahead(track)
        ):
            raise PartialCommit(f"text {seq.request.id} was left half written")
        with _alone(engine, seq):
            engine.step()
    except Exception as error:
        if not track.outbox:
            LOG.exception("a text fails, and is lost; those beside it go on")
            found.lost[seq.request.id] = error
            return
    found.deltas += track.outbox
    found.went_on += 1


def _grammar_is_ahead(track: SequenceState) -> bool:
    return track.matcher is not None and track.matcher.num_tokens != track.seq.num_output_tokens


@contextmanager
def _alone(engine: Engine, seq: Sequence) -> Iterator[None]:
    """As if nobody else were there; the others keep their pages and their places."""
    scheduler, controller = engine.scheduler, engine.controller
    running, waiting = scheduler.running, scheduler.waiting
    place = running.index(seq)
    scheduler.running, scheduler.waiting, engine.controller = [seq], deque(), NoDraftController(controller)
    try:
        yield
    finally:
        running[place : place + 1] = scheduler.running
        waiting.extendleft(scheduler.waiting)
        scheduler.running, scheduler.waiting, engine.controller = running, waiting, controller


def is_well(engine: Engine) -> bool:
    """Whether a made-up text can be run: then it was the texts that failed, and not the engine."""
    request = Request("trial", (0,), SamplingParams(), 0, 1)
    seq = Sequence(-1, request, [0])
    try:
        if engine.runner.reserve(seq, 1):
            engine.runner.forward([ScheduledSequence.of(seq, 1)], [Draft()]).logits.argmax(-1).tolist()
        return True
    except Exception:
        LOG.exception("not even a made-up text can be run")
        return False
    finally:
        engine.runner.trim(seq, 0)
