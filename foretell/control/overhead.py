"""Limits on what deciding costs: polls of free drafters, choices that stand, probes, plain baseline steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from foretell.types import Budget, Sequence

from .settings import ControllerTuning


@dataclass(slots=True)
class _PollState:
    """Poll budget of one sequence and when it was last polled."""

    credit: float  # seconds
    last_step: int = 0


class PollLimiter:
    """Decides which sequences to poll in a step.

    A poll asks free drafters (n-gram, suffix) for a draft before the step is scheduled. It costs host time and earns
    the time that its draft saves beyond what other drafters would save; both are booked per sequence. A new sequence
    has a small share of its decode time on credit. Without credit it is polled at the interval at which the polls of
    all sequences would take a small share of step time.
    """

    def __init__(
        self, clock: Callable[[], float] = perf_counter, tuning: ControllerTuning = ControllerTuning()
    ) -> None:
        self.clock, self.tuning = clock, tuning
        self.step = 0
        self.poll_seconds = 1e-4  # measured time of one poll, and the host work that follows
        self._states: dict[int, _PollState] = {}
        self._mean_payoff = 1.0  # net earning of a poll, in polls, over all sequences
        self._num_polls = 0  # in this step
        self._began = 0.0  # when the polls of this step began

    def select(self, seqs: list[Sequence], plain_seconds: float) -> list[Sequence]:
        """Start a step and return the sequences to poll. `plain_seconds` is the expected time without drafts."""
        self.step += 1
        self._num_polls = 0
        if not seqs:
            return seqs
        self._began, tuning, count, states = self.clock(), self.tuning, len(seqs), self._states
        refill = min(tuning.poll_refill_share * plain_seconds, tuning.poll_refill_seconds * (1 + 0.1 * count))
        due, selected = self.step - count * self.poll_seconds / max(refill, 1e-9), []
        for seq in seqs:
            state = states.get(seq.id)
            if state is None:
                state = states[seq.id] = _PollState(self._initial_credit(seq, plain_seconds / count))
            if state.credit > 0 or state.last_step < due:
                state.last_step = self.step
                selected.append(seq)
        self._num_polls = len(selected)
        return selected

    def _initial_credit(self, seq: Sequence, token_seconds: float) -> float:
        """Return the seconds of polls that a new sequence gets on credit: three polls if others did not pay."""
        share = self.tuning.poll_start_share * seq.remaining_tokens * token_seconds if self._mean_payoff > 0 else 0.0
        return max(share, 3 * self.poll_seconds)

    def force(self, seq: Sequence) -> None:
        """Poll a sequence in this step whatever its credit."""
        state = self._states.setdefault(seq.id, _PollState(0.0))
        state.credit, state.last_step = max(state.credit, 3 * self.poll_seconds), self.step

    def record_payoff(self, seq_id: int, saved_seconds: float, late: bool = False) -> None:
        """Credit a poll with the time that its draft is expected to save.

        `late`: the step was already in flight. Such a poll cannot save anything, so it does not enter the mean payoff.
        """
        state, one, most = self._states[seq_id], self.poll_seconds, self.tuning.poll_max_credit
        net = min(saved_seconds / one, most) - 1
        state.credit = min(max(state.credit, 0.0) + net * one, most * one)
        if not late:
            self._mean_payoff += 0.02 * (net - self._mean_payoff)

    def poll_next_step(self, seq_id: int) -> None:
        """Poll a sequence again in the next step, because this step was in flight before its draft was found."""
        self._states[seq_id].credit = max(self._states[seq_id].credit, self.poll_seconds)

    def finish_polls(self) -> None:
        """Measure what this step's polls cost."""
        if self._num_polls:
            seconds = self.tuning.poll_host_factor * (self.clock() - self._began) / self._num_polls
            self.poll_seconds += 0.1 * (seconds - self.poll_seconds)

    def was_polled(self, seq_id: int) -> bool:
        """Return whether a sequence was polled in this step."""
        state = self._states.get(seq_id)
        return state is not None and state.last_step == self.step

    def was_skipped(self, seq_id: int) -> bool:
        """Return whether a sequence is known and was not polled in this step."""
        return seq_id in self._states and not self.was_polled(seq_id)

    def forget(self, seq_id: int) -> None:
        """Drop the state of a finished sequence."""
        self._states.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._states)


@dataclass
class HeldChoice:
    """A choice that stands for some steps: rates and costs change slowly, and choosing takes host time."""

    key: tuple[tuple[int, bool], ...] = ()  # sequences that may draft, and whether each was polled
    num_running: int = 0
    budgets: dict[int, Budget] = field(default_factory=dict)  # by sequence
    steps_left: int = 0

    def reuse(
        self, seqs: list[Sequence], key: tuple[tuple[int, bool], ...], max_length: Callable[[Sequence], int]
    ) -> dict[int, Budget] | None:
        """Return the budgets for one more step, or None if sequences changed or one is too near its end."""
        if self.steps_left <= 0 or self.num_running != len(seqs) or self.key != key:
            return None
        for seq in seqs:
            budget = self.budgets.get(seq.id)
            if seq.pending != 1 or (budget is not None and budget.depth > max_length(seq)):
                return None
        self.steps_left -= 1
        return dict(self.budgets)


class Exploration:
    """Schedules probes of unused drafters, with exponential backoff, and plain baseline steps.

    Without a baseline step the cost of plain decoding would never be measured again while drafts seem to pay.
    """

    def __init__(self, tuning: ControllerTuning = ControllerTuning()) -> None:
        self.tuning = tuning
        self._last: dict[str, int] = {}  # by drafter: step of its last use or probe
        self._backoff: dict[str, int] = {}  # by drafter: steps to wait since then
        self._speculative = 0  # steps since the last plain one

    def is_idle(self, drafter: str, used: bool, step: int) -> bool:
        """Return whether a drafter was unused for long enough for a probe, its cost aside."""
        if used or drafter not in self._last:
            self._last[drafter] = step
        return step - self._last[drafter] >= max(self.tuning.probe_interval, self._backoff.get(drafter, 0))

    def begin_probe(self, drafter: str, step: int, seconds: float, plain_seconds: float) -> bool:
        """Return whether a probe of these seconds is within its share of time; if so record it and double the wait."""
        tuning = self.tuning
        wait = max(tuning.probe_interval, int(seconds / (tuning.probe_time_share * plain_seconds)))
        wait = max(wait, self._backoff.get(drafter, 0))
        if step - self._last[drafter] < wait:
            return False
        self._backoff[drafter], self._last[drafter] = min(2 * wait, 32 * tuning.probe_interval), step
        return True

    def reset_backoff(self, drafter: str) -> None:
        """Start the backoff again, because a draft token of the drafter was accepted."""
        self._backoff.pop(drafter, None)

    def wants_baseline(self, speedup: float) -> bool:
        """Return whether this step should be plain. The larger the expected `speedup`, the less that would change."""
        return self._speculative >= self.tuning.baseline_interval * speedup

    def record_step(self, speculative: bool) -> None:
        """Count a step."""
        self._speculative = self._speculative + 1 if speculative else 0
