"""State of one sequence, whether it is late on its SLO, and the limits on what polls and probes may cost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from foretell.types import ScheduledSequence, Sequence

from .acceptance_model import FIRST_TOKEN, AcceptanceRates, OpenDraft
from .settings import ControllerTuning


@dataclass(slots=True)
class SequenceHistory:
    """All that the controller keeps of one sequence."""

    seq: Sequence
    rates: dict[str, AcceptanceRates]  # by drafter
    has_free: bool = field(init=False)  # some of its drafters are free, and some
    has_timed: bool = field(init=False)  # take time
    has_slo: bool = field(init=False)  # the request asks for a minimum speed or a deadline
    open_drafts: list[OpenDraft] = field(default_factory=list)  # that the output has not decided yet
    limit: int = 0  # most draft tokens of a chain in this step
    prefilled: dict[str, int] = field(default_factory=dict)  # tokens that each drafter has in its KV cache
    timed_speedup: float = 1.0  # of its last choice without a free draft
    poll_credit: float | None = None  # seconds that polls of its free drafters may still cost; None before the first
    polled_at: int = 0  # step of its last poll
    skip_reason: str = ""  # why it had no draft in the last step
    admitted: float = 0.0  # seconds; of sequences with an SLO
    first_token: float | None = None  # seconds, when it was seen
    best_speed: float = float("inf")  # tokens per second of the best plan for it alone
    best_until: float = float("-inf")  # seconds until which that estimate is used

    def __post_init__(self) -> None:
        self.has_free = any(rates.is_free for rates in self.rates.values())
        self.has_timed = not all(rates.is_free for rates in self.rates.values())
        choice = self.seq.request.speculation
        self.has_slo = choice.min_tokens_per_second is not None or choice.deadline is not None

    def resolve(self) -> None:
        """Count what the output tokens say about the open drafts."""
        if self.open_drafts:
            self.open_drafts = [draft for draft in self.open_drafts if draft.follow(self.seq.tokens)]

    def prefill(self, scheduled: ScheduledSequence) -> int:
        """Record that a drafter has prefilled the sequence, and return the tokens that were new to it."""
        drafter = scheduled.budget.drafter
        before, self.prefilled[drafter] = self.prefilled.get(drafter, 0), scheduled.length
        return scheduled.length - before

    def is_late(self, now: float, plain_seconds: float, tuning: ControllerTuning) -> bool:
        """Return whether it will miss its SLO at its current speed, but can still meet it."""
        seq, choice = self.seq, self.seq.request.speculation
        num_output, remaining = seq.num_output_tokens, seq.remaining_tokens
        if not num_output:
            return False  # still in prefill, which drafts cannot speed up
        self.first_token = now if self.first_token is None else self.first_token
        elapsed, min_speed = now - self.first_token, choice.min_tokens_per_second
        fastest = tuning.slo_optimism * self.best_speed if now < self.best_until else float("inf")
        if min_speed is not None and min_speed <= fastest and num_output - 1 < tuning.slo_lead * min_speed * elapsed:
            return True
        if choice.deadline is None or now + remaining / fastest > self.admitted + choice.deadline:
            return False  # there is no deadline, or it is missed in any case
        is_known = num_output > 4 and elapsed > 0
        token_seconds = elapsed / (num_output - 1) if is_known else plain_seconds
        return now + tuning.slo_lead * remaining * token_seconds > self.admitted + choice.deadline


class PollLimiter:
    """Decides which sequences to poll in a step.

    A poll asks free drafters (n-gram, suffix) for a draft before the step is scheduled. It costs host time and earns
    the time that its draft saves beyond what other drafters would save; both are booked per sequence. A new sequence
    has a share of its decode time on credit, less where drafts are rarely accepted. Without credit it is polled at the
    interval at which the polls of all sequences would take a small share of step time.
    """

    def __init__(self, clock: Callable[[], float], tuning: ControllerTuning = ControllerTuning()) -> None:
        self.clock, self.tuning = clock, tuning
        self.poll_seconds = 1e-4  # measured time of one poll, and the host work that follows
        self._num_polls = 0  # in this step
        self._began = 0.0  # when the polls of this step began

    def select(
        self, states: list[SequenceHistory], step: int, plain_seconds: float, always: Collection[int] = ()
    ) -> list[SequenceHistory]:
        """Start a step and return the sequences to poll, those in `always` in any case.

        `plain_seconds` is the expected time without drafts.
        """
        self._num_polls = 0
        if not states:
            return states
        tuning, count, selected = self.tuning, len(states), []
        refill = min(tuning.poll_refill_share * plain_seconds, tuning.poll_refill_seconds * (1 + 0.1 * count))
        due = step - count * self.poll_seconds / max(refill, 1e-9)
        for state in states:
            if state.poll_credit is None:
                rate = max([rates.rate(FIRST_TOKEN) for rates in state.rates.values() if rates.is_free], default=0.0)
                seconds = tuning.poll_start_share * rate * state.seq.remaining_tokens * plain_seconds / count
                state.poll_credit = max(seconds, 3 * self.poll_seconds)
            if state.poll_credit > 0 or state.polled_at < due or state.seq.id in always:
                state.polled_at = step
                selected.append(state)
        self._num_polls = len(selected)
        if selected:
            self._began = self.clock()
        return selected

    def record(self, state: SequenceHistory, saved_seconds: float) -> None:
        """Credit a poll with the time that its draft is expected to save, less what it cost."""
        one, most = self.poll_seconds, self.tuning.poll_max_credit
        net = min(saved_seconds, most * one) - one
        state.poll_credit = min(max(state.poll_credit or 0.0, 0.0) + net, most * one)

    def finish_polls(self) -> None:
        """Measure what this step's polls cost."""
        if self._num_polls:
            seconds = self.tuning.poll_host_factor * (self.clock() - self._began) / self._num_polls
            self.poll_seconds += 0.1 * (seconds - self.poll_seconds)


class Probes:
    """Schedules short drafts of drafters that are not in use, with exponential backoff.

    Without them a drafter that becomes good is never found, because a draft that is not made is not counted.
    """

    def __init__(self, tuning: ControllerTuning = ControllerTuning()) -> None:
        self.tuning = tuning
        self._last: dict[str, int] = {}  # by drafter: step of its last use or probe
        self._backoff: dict[str, int] = {}  # by drafter: steps to wait since then

    def is_due(self, drafter: str, used: bool, step: int, cost: float) -> bool:
        """Return whether a drafter was unused for so long that a probe of this cost, in plain steps, is worth it."""
        if used or drafter not in self._last:
            self._last[drafter] = step
        wait = max(self._backoff.get(drafter, 0), self.tuning.probe_interval, cost / self.tuning.probe_time_share)
        return step - self._last[drafter] >= wait

    def begin(self, drafter: str, step: int) -> None:
        """Record a probe and double the wait until the next one."""
        interval = self.tuning.probe_interval
        self._last[drafter] = step
        self._backoff[drafter] = min(2 * self._backoff.get(drafter, interval), 32 * interval)

    def reset_backoff(self, drafter: str) -> None:
        """Start the backoff again, because a draft token of the drafter was accepted."""
        self._backoff.pop(drafter, None)
