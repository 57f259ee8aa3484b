"""State of one sequence, whether it is late on its SLO, and the limit on what polling it may cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from foretell.types import Budget, ScheduledSequence, Sequence

from .acceptance_model import RequestAcceptance
from .settings import ControllerTuning


@dataclass(slots=True)
class SequenceHistory:
    """All that the controller keeps of one sequence."""

    seq: Sequence
    acceptance: RequestAcceptance
    limit: int = 0  # most draft tokens of a chain in this step
    prefilled: dict[str, int] = field(default_factory=dict)  # tokens that each drafter has in its KV cache
    draft_steps: float = 0.0  # what its last draft by a timed drafter added to the step, in plain steps
    lost_steps: float = 0.0  # plain steps that such drafts have cost, less the tokens that they gained
    poll_credit: float | None = None  # seconds that polls of its free drafters may still cost; None before the first
    polled_at: int = 0  # step of its last poll
    considered_at: int = 0  # last step in which it could draft
    skip_reason: str = ""  # why it had no draft then
    wait: int = 0  # steps until its timed drafters are considered again, doubled while they do not pay
    wait_until: int = 0  # step in which they are
    admitted: float = 0.0  # seconds; of sequences with an SLO
    first_token: float | None = None  # seconds, when it was seen
    best_speed: float = float("inf")  # tokens per second of the best plan for it alone
    best_until: float = float("-inf")  # seconds until which that estimate is used

    def prefill(self, scheduled: ScheduledSequence) -> int:
        """Record that a drafter has prefilled the sequence, and return the tokens that were new to it."""
        drafter = scheduled.budget.drafter
        before, self.prefilled[drafter] = self.prefilled.get(drafter, 0), scheduled.length
        return scheduled.length - before

    @property
    def has_slo(self) -> bool:
        """Return whether the request asks for a minimum speed or a deadline."""
        choice = self.seq.request.speculation
        return choice.min_tokens_per_second is not None or choice.deadline is not None

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


@dataclass
class HeldChoice:
    """A choice that stands for some steps: rates and costs change slowly, and choosing takes host time."""

    key: list[tuple[int, bool]] = field(default_factory=list)  # sequences that may draft, and whether each was polled
    num_running: int = 0
    budgets: dict[int, Budget] = field(default_factory=dict)  # by sequence
    steps_left: int = 0

    @classmethod
    def of(
        cls, states: list[SequenceHistory], step: int, num_running: int, budgets: dict[int, Budget], steps: int
    ) -> HeldChoice:
        """Hold budgets of the sequences considered in this step, for so many further steps."""
        return cls([(state.seq.id, state.polled_at == step) for state in states], num_running, budgets, steps)

    def reuse(self, seqs: list[Sequence], states: list[SequenceHistory], step: int) -> dict[int, Budget] | None:
        """Return the budgets for one more step, or None if sequences changed or one is too near its end."""
        if self.steps_left <= 0 or self.num_running != len(seqs) or any(seq.pending != 1 for seq in seqs):
            return None
        if self.key != [(state.seq.id, state.polled_at == step) for state in states]:
            return None
        if any(self.budgets[state.seq.id].depth > state.limit for state in states if state.seq.id in self.budgets):
            return None
        self.steps_left -= 1
        return dict(self.budgets)


class PollLimiter:
    """Decides which sequences to poll in a step.

    A poll asks free drafters (n-gram, suffix) for a draft before the step is scheduled. It costs host time and earns
    the time that its draft saves beyond what other drafters would save; both are booked per sequence. A new sequence
    has a small share of its decode time on credit. Without credit it is polled at the interval at which the polls of
    all sequences would take a small share of step time.
    """

    def __init__(self, clock: Callable[[], float], tuning: ControllerTuning = ControllerTuning()) -> None:
        self.clock, self.tuning = clock, tuning
        self.poll_seconds = 1e-4  # measured time of one poll, and the host work that follows
        self._mean_payoff = 1.0  # net earning of a poll, in polls, over all sequences
        self._num_polls = 0  # in this step
        self._began = 0.0  # when the polls of this step began

    def interval(self, count: int, plain_seconds: float) -> float:
        """Return the steps between two polls of a sequence without credit in a batch of `count`."""
        tuning = self.tuning
        refill = min(tuning.poll_refill_share * plain_seconds, tuning.poll_refill_seconds * (1 + 0.1 * count))
        return count * self.poll_seconds / max(refill, 1e-9)

    def select(self, states: list[SequenceHistory], step: int, plain_seconds: float) -> list[SequenceHistory]:
        """Start a step and return the sequences to poll. `plain_seconds` is the expected time without drafts."""
        self._num_polls = 0
        if not states:
            return states
        self._began, count, selected = self.clock(), len(states), []
        due = step - self.interval(count, plain_seconds)
        for state in states:
            if state.poll_credit is None:
                state.poll_credit = self._initial_credit(state.seq, plain_seconds / count)
            if state.poll_credit > 0 or state.polled_at < due:
                state.polled_at = step
                selected.append(state)
        self._num_polls = len(selected)
        return selected

    def _initial_credit(self, seq: Sequence, token_seconds: float) -> float:
        """Return the seconds of polls that a new sequence gets on credit: three polls if others did not pay."""
        share = self.tuning.poll_start_share * seq.remaining_tokens * token_seconds if self._mean_payoff > 0 else 0.0
        return max(share, 3 * self.poll_seconds)

    def record_payoff(self, state: SequenceHistory, saved_seconds: float) -> None:
        """Credit a poll with the time that its draft is expected to save."""
        net = self._book(state, saved_seconds)
        self._mean_payoff += 0.02 * (net - self._mean_payoff)

    def record_late(self, state: SequenceHistory, found: bool) -> None:
        """Charge a poll whose step was already in flight, so that it could not save anything.

        If it `found` a draft, the sequence is polled again in the next step.
        """
        self._book(state, 0.0)
        if found:
            state.poll_credit = max(state.poll_credit or 0.0, self.poll_seconds)

    def _book(self, state: SequenceHistory, saved_seconds: float) -> float:
        one, most = self.poll_seconds, self.tuning.poll_max_credit
        net = min(saved_seconds / one, most) - 1
        state.poll_credit = min(max(state.poll_credit or 0.0, 0.0) + net * one, most * one)
        return net

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

    def is_idle(self, drafter: str, used: bool, step: int) -> bool:
        """Return whether a drafter was unused for long enough for a probe, its cost aside."""
        if used or drafter not in self._last:
            self._last[drafter] = step
        return step - self._last[drafter] >= self._backoff.get(drafter, self.tuning.probe_interval)

    def begin(self, drafter: str, step: int, seconds: float, plain_seconds: float) -> bool:
        """Return whether a probe of these seconds is within its share of time; if so record it and double the wait."""
        interval = self.tuning.probe_interval
        wait = max(self._backoff.get(drafter, interval), int(seconds / (self.tuning.probe_time_share * plain_seconds)))
        if step - self._last[drafter] < wait:
            return False
        self._backoff[drafter], self._last[drafter] = min(2 * wait, 32 * interval), step
        return True

    def reset_backoff(self, drafter: str) -> None:
        """Start the backoff again, because a draft token of the drafter was accepted."""
        self._backoff.pop(drafter, None)
