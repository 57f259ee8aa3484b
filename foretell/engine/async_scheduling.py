"""Async scheduling: launch a step on the device before the host has finished the previous one.

A device that runs alongside the host is idle from the end of a step until the next one is launched. `Engine.step`
shortens this gap in two ways; both change when tokens arrive and never which.

- A plain decode step is launched before the tokens of the previous step are known to the host (`overlap`). The device
  samples them and reads them as the inputs of the next step. That is possible while the batch stays as it is, no
  sequence is to be drafted for, and each token depends on its own logits row only. A sequence that turns out to have
  finished has run one row in vain.
- Any other step is launched, with its drafts, right after the previous one is committed (`launch_next`). Detokenizing
  and emitting the deltas then overlap with the device's work.

The launched step is kept in `AsyncScheduler.in_flight` until the next call of `Engine.step` takes it. It is discarded
if its KV is gone by then: after a preemption, or after something else ran on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from foretell.control.controller import Controller
from foretell.draft.mix import MixDrafter
from foretell.runner.cuda.graphs import TimingGuard, mark_outlier
from foretell.runner.executor import StepOutput, StepTokens
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.cuda_sampler import SamplingBatch
from foretell.types import NO_DRAFT, Budget, Draft, ScheduledSequence, Sequence, StepTimes

from .scheduler import Scheduler

if TYPE_CHECKING:
    from .verifier import Verifier

LOG = logging.getLogger("foretell")
MAX_DEVICE_DRAFT_ROWS = 64  # rows of a step whose draft tokens stay on the device
LATE_SHARE = 0.9  # share of a step that the host may be away before its measured time counts as an outlier


@dataclass
class InFlightStep:
    """A step between scheduling and commit. Times are `perf_counter` seconds."""

    scheduled: list[ScheduledSequence]
    began_at: float  # start of scheduling
    drafts: list[Draft] = field(default_factory=list)
    output: StepOutput = field(init=False, repr=False)  # set when the step is launched
    drafted_at: float = 0.0
    launched_at: float = 0.0
    tokens_at: float = 0.0  # when the host had its tokens; verification comes after
    propose_seconds: float = 0.0  # time in drafters
    topk_seconds: float = 0.0  # time to compute top-k tokens that only drafters learn from
    caller_seconds: float = 0.0  # `StepTimer.caller_seconds` at launch
    epoch: tuple[int, int] = (0, 0)  # `AsyncScheduler.epoch` at launch
    is_launched: bool = False
    is_async: bool = False  # launched before the tokens it starts from were known to the host
    is_outlier: bool = False  # took longer than it will again, for example because a CUDA graph was captured
    wait_tokens: Callable[[], StepTokens] | None = None  # set if a step was launched after it; its logits are gone

    @property
    def yields_first_token(self) -> bool:
        """Return whether a sequence gets its first output token from this step."""
        return any(each.reaches_end and each.length == len(each.seq.request.prompt) for each in self.scheduled)

    def set_device_drafts(self, drafts: list[Draft], now: float) -> None:
        """Replace device-resident drafts by their tokens; the forward pass did not begin before they existed."""
        self.propose_seconds += now - self.drafted_at
        self.drafted_at = now
        self.launched_at = max(self.launched_at, now)
        self.drafts = drafts


class AsyncScheduler:
    """Launches steps early and owns the step in flight between two calls of `Engine.step`.

    Used as a context manager around a step: it measures the time between steps, and discards the step in flight if the
    current one fails.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.timer = StepTimer()
        self.in_flight: InFlightStep | None = None

    def __enter__(self) -> AsyncScheduler:
        self.timer.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.timer.leave()
        if kind is not None:
            self.in_flight = None

    @property
    def epoch(self) -> tuple[int, int]:
        """Return the device's step count and the preemptions. A step in flight is valid while neither changes."""
        return self.runner.num_steps if self.runner.supports_async else 0, self.scheduler.preemptions

    def stamp(self, step: InFlightStep) -> None:
        """Record at launch what is needed later to validate and to time the step."""
        step.epoch = self.epoch
        step.caller_seconds = self.timer.caller_seconds

    def take(self, verifier: Verifier) -> InFlightStep | None:
        """Return the step that was launched early, if it is still valid for at least one sequence."""
        step, self.in_flight = self.in_flight, None
        if step is None or step.epoch != self.epoch or not any(map(verifier.is_current, step.scheduled)):
            return None
        return step

    def overlap(self, step: InFlightStep, controller: Controller, verifier: Verifier) -> None:
        """Use the time while the device runs `step`: launch a plain step after it, and let drafters prefill."""
        if self.runner.supports_async:
            self.in_flight = self._launch_plain(step, controller, verifier)
            self._prepare_drafters(step, verifier)

    def launch_next(self, step: InFlightStep, launch: Callable[[], InFlightStep | None]) -> None:
        """Launch the step after `step`, which is committed, before its deltas are emitted.

        Not if it has first tokens: they are not to wait for drafts. If the launch fails, nothing of `step` is lost; the
        next call of `Engine.step` tries again and raises.
        """
        if not self.runner.supports_async or self.in_flight is not None or step.yields_first_token:
            return
        try:
            with TimingGuard() as guard:
                following = launch()
        except Exception:
            LOG.warning("a step could not be launched early; the next step tries again", exc_info=True)
            return
        if following is not None:
            following.is_outlier = guard.is_outlier
        self.in_flight = following

    def step_times(self, step: InFlightStep) -> StepTimes:
        """Return the times of a committed step."""
        return self.timer.async_times(step) if self.runner.supports_async else self.timer.sync_times(step)

    def discard(self) -> None:
        """Drop the step in flight. No token is lost: the next step computes the same ones again."""
        self.in_flight = None

    def go_idle(self) -> None:
        """Drop the step in flight and restart the timer, because no sequence is left."""
        self.in_flight = None
        self.timer.reset()

    def _launch_plain(self, step: InFlightStep, controller: Controller, verifier: Verifier) -> InFlightStep | None:
        """Launch a decode step without drafts on the tokens that `step` samples, if the next step will be such."""
        running = self.scheduler.running
        if step.is_async and not _stays_plain(running, controller, verifier):
            return None
        if not controller.expects_plain_step(running):
            return None
        rows = self._continuing_rows(step, verifier)
        scheduled = [_next_token(step.scheduled[row]) for row in rows]
        if not scheduled or not all(self.runner.reserve(each.seq, each.length) for each in scheduled):
            return None
        top_k = verifier.drafter.top_k
        if top_k and not any(map(verifier.wants_topk, step.scheduled, step.drafts)):
            top_k = 0
        began_at = perf_counter()
        with TimingGuard() as guard:
            launched = self.runner.forward_async(scheduled, rows, _draws(step), top_k)
        if guard.is_outlier:  # the current step waited for it
            mark_outlier()
        if launched is None:
            return None
        step.wait_tokens = launched.wait_previous_tokens
        following = InFlightStep(
            scheduled,
            began_at,
            drafts=[NO_DRAFT] * len(scheduled),
            drafted_at=began_at,
            launched_at=perf_counter(),
            epoch=self.epoch,
            is_launched=True,
            is_async=True,
            is_outlier=guard.is_outlier,
        )
        following.output = launched.output
        return following

    def _continuing_rows(self, step: InFlightStep, verifier: Verifier) -> list[int]:
        """Return the rows of a step whose sequences continue in the next one, or none if that cannot be launched yet.

        It can if every running sequence is in the step and generates exactly one token that the device can sample, and
        no waiting sequence could be admitted.
        """
        if step.output.argmax is None or any(map(len, step.drafts)):
            return []
        continuing: list[int] = []
        num_current = 0
        for row, each in enumerate(step.scheduled):
            seq = each.seq
            if not each.reaches_end:
                return []
            if not verifier.is_current(each):
                continue
            num_current += 1
            if not verifier.states[seq.id].can_sample_on_device:
                return []
            if each.num_new_tokens > 1 and seq.request.drafters and len(step.scheduled) == 1:
                return []  # after the prefill of a single sequence drafts may pay at once; no drafter was polled yet
            if seq.remaining_tokens > 1:
                continuing.append(row)
        can_admit = len(continuing) < self.scheduler.max_num_seqs and self.scheduler.may_admit
        return [] if can_admit or num_current < len(self.scheduler.running) else continuing

    def _prepare_drafters(self, step: InFlightStep, verifier: Verifier) -> None:
        """Let drafters process new prompts while the device prefills them."""
        first = [each.seq for each in step.scheduled if each.reaches_end and not each.seq.num_output_tokens]
        new = [seq for seq in first if seq.request.drafters and seq.id in verifier.states]
        if new:
            began_at = perf_counter()
            verifier.drafter.prepare(new)
            self.timer.caller_seconds += perf_counter() - began_at  # the device may have been done long before


def _stays_plain(running: list[Sequence], controller: Controller, verifier: Verifier) -> bool:
    """Poll free drafters while a step runs that was launched without drafts; their drafts come too late for it."""
    polled, max_nodes = controller.wants_free_drafts(running)
    return controller.keeps_plain(running, verifier.drafter.free_drafts(polled, max_nodes))


def _next_token(scheduled: ScheduledSequence) -> ScheduledSequence:
    """Schedule the one token that follows those of `scheduled`."""
    return ScheduledSequence(scheduled.seq, 1, start=scheduled.length, length=scheduled.length + 1)


def _draws(step: InFlightStep) -> SamplingBatch | None:
    """Return how the device samples each row of a step; None if all are greedy."""
    requests = [each.seq.request for each in step.scheduled]
    if all(request.params.temperature == 0 for request in requests):
        return None
    params, seeds = [request.params for request in requests], [request.seed for request in requests]
    return SamplingBatch(params, seeds, [each.length for each in step.scheduled])


def can_draft_on_device(
    scheduled: list[ScheduledSequence], budgets: list[Budget], drafter: MixDrafter, device: str
) -> bool:
    """Return whether a step on `device` can run draft tokens that the host has not seen.

    It can if all come from one drafter on that device, every sequence decodes under the rule `match`, and the step has
    so few rows that there is no need to drop unlikely draft tokens.
    """
    names = {budget.drafter for budget in budgets if budget.nodes}
    if len(names) != 1 or any(each.num_new_tokens > 1 or each.seq.request.rule != "match" for each in scheduled):
        return False
    (name,) = names
    rows = sum(1 + budget.nodes for budget in budgets)
    return drafter.drafters.get(name, drafter).traits.draft_device == device and rows <= MAX_DEVICE_DRAFT_ROWS


class StepTimer:
    """Measures steps.

    Without async scheduling all host work belongs to the step it is done for. With it, the host works alongside the
    device, and a step lasts from the time the device was free for it until its tokens arrived.
    """

    def __init__(self) -> None:
        self.caller_seconds = 0.0  # time outside of `Engine.step` since the tokens of the last step arrived
        self.last_tokens_at: float | None = None  # when they arrived
        self._last_batch = 0  # sequences in that step if each ran one token, else 0
        self._left_at: float | None = None  # when `Engine.step` returned

    def enter(self) -> None:
        """Count the time since the last step returned as the caller's."""
        if self._left_at is not None:
            self.caller_seconds += perf_counter() - self._left_at
            self._left_at = None

    def leave(self) -> None:
        """Record that a step returns to its caller."""
        self._left_at = perf_counter()

    def sync_times(self, step: InFlightStep) -> StepTimes:
        """Return the times of a step without async scheduling, up to now."""
        draft_seconds = step.drafted_at - step.began_at + step.topk_seconds
        target_seconds = perf_counter() - step.drafted_at - step.topk_seconds
        return StepTimes(draft_seconds, target_seconds, step.propose_seconds, step.is_outlier)

    def async_times(self, step: InFlightStep) -> StepTimes:
        """Return the times of a step on a device with async scheduling.

        What the host does with its tokens is not part of the step but of the host gap before the next one, unless that
        was launched early. Otherwise a step would seem longer only because the host was watching.
        """
        previous_at, previous_batch = self.last_tokens_at, self._last_batch
        away = self.caller_seconds - step.caller_seconds  # caller time while this step ran
        self.last_tokens_at = step.tokens_at
        self.caller_seconds = 0.0
        self._last_batch = len(step.scheduled) if all(each.num_new_tokens == 1 for each in step.scheduled) else 0
        free_at = step.launched_at if previous_at is None else max(previous_at, step.launched_at)
        draft_seconds = 0.0 if step.is_async else step.drafted_at - step.began_at
        host_gap = None
        if previous_at is not None and not step.is_async and 0 < self._last_batch == previous_batch:
            host_gap = max(0.0, free_at - previous_at - step.caller_seconds - step.propose_seconds)
        target_seconds = step.tokens_at - free_at
        is_outlier = step.is_outlier or away > LATE_SHARE * target_seconds
        return StepTimes(draft_seconds + step.topk_seconds, target_seconds, step.propose_seconds, is_outlier, host_gap)

    def reset(self) -> None:
        """Forget the last step: until the next request the device waits for nothing."""
        self.last_tokens_at = None
        self._left_at = None
        self.caller_seconds = 0.0
