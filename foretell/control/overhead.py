"""Limits on what looking costs: polls of free drafters, probes of unused ones, plain baseline steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from foretell.types import Sequence

from .settings import ControllerTuning

CATCH_UP_TOKENS = 100  # a poll costs as much as catching up on so many tokens


@dataclass(slots=True)
class _PollState:
    """Poll budget of one sequence and when it was last polled."""

    credit: float = 0.0  # seconds
    next_step: int = 0  # earliest step of the next poll
    last_step: int = 0
    length: int = 0  # tokens at the last poll
    batch_size: int = 0  # decoding sequences at the last poll


class PollLimiter:
    """Decides which sequences to poll in a step.

    A poll asks free drafters (n-gram, suffix) for a draft before the step is scheduled. It costs host time and earns
    the time that its draft saves beyond what other drafters would save; both are booked per sequence. A new sequence
    has a small share of its decode time on credit. One without credit shares a token bucket that refills with a small
    share of step time. Drafters catch up on the tokens generated since their last poll, so the cost grows with them.
    """

    def __init__(
        self, clock: Callable[[], float] = perf_counter, tuning: ControllerTuning = ControllerTuning()
    ) -> None:
        self.clock, self.tuning = clock, tuning
        self.step = 0
        self._states: dict[int, _PollState] = {}
        self._token_seconds = 1e-6  # measured cost of catching up on one token
        self._bucket = self._refill = 0.0  # seconds, and seconds per step
        self._plain_seconds = 0.0  # expected time of a step without drafts
        self._mean_payoff = 1.0  # net earning of a poll, in polls, over all sequences
        self._batch_size = 0
        self._cost = self._bucket_cost = 0.0  # of this step's polls in tokens, and the part that the bucket pays
        self._began = 0.0  # when the polls of this step began
        self._revived = False  # whether this step polls a sequence again because the batch has shrunk

    @property
    def poll_seconds(self) -> float:
        """Return the expected cost of one poll."""
        return self._token_seconds * CATCH_UP_TOKENS

    def select(self, seqs: list[Sequence], plain_seconds: float) -> list[Sequence]:
        """Start a step and return the sequences to poll. `plain_seconds` is the expected time without drafts."""
        self.step += 1
        self._cost = self._bucket_cost = 0.0
        if not seqs:
            return seqs
        self._plain_seconds, self._batch_size = plain_seconds, len(seqs)
        limit = self.tuning.poll_refill_seconds * (1 + 0.1 * len(seqs))
        self._refill = min(self.tuning.poll_refill_share * plain_seconds, limit)
        self._bucket = min(self._bucket + self._refill, 2 * plain_seconds)
        self._began, self._revived = self.clock(), False
        step, shrunk, states, selected = self.step, 2 * len(seqs), self._states, []
        for seq in seqs:
            state = states.get(seq.id)
            if state is None:
                state = states[seq.id] = _PollState(self._initial_credit(seq))
            elif state.next_step > step and state.batch_size < shrunk:  # the usual case while speculation is off
                continue
            if self._may_poll(state, len(seq.tokens)):
                selected.append(seq)
        return selected

    def _initial_credit(self, seq: Sequence) -> float:
        """Return the seconds of polls that a new sequence gets on credit: three polls if others did not pay."""
        decode_seconds = seq.remaining_tokens * self._plain_seconds / self._batch_size
        share = self.tuning.poll_start_share * decode_seconds if self._mean_payoff > 0 else 0.0
        return max(share, 3 * self.poll_seconds)

    def _may_poll(self, state: _PollState, length: int) -> bool:
        cost = CATCH_UP_TOKENS + length - state.length
        if state.credit <= 0:
            if state.batch_size >= 2 * self._batch_size:
                if self._revived:  # one per step, since they may have many tokens to catch up on
                    return False
                state.credit, self._revived = 3 * self.poll_seconds, True
            elif (missing := self._token_seconds * (self._bucket_cost + cost) - self._bucket) > 0:
                state.next_step = self.step + 1 + min(16, int(missing / max(self._refill, 1e-9)))
                return False
            else:
                self._bucket_cost += cost
        self._cost += cost
        state.last_step, state.length, state.batch_size = self.step, length, self._batch_size
        return True

    def force(self, seq: Sequence) -> None:
        """Poll a sequence in this step whatever its credit."""
        state = self._states.setdefault(seq.id, _PollState())
        state.credit = max(state.credit, 3 * self.poll_seconds)
        state.last_step, state.length, state.batch_size = self.step, len(seq.tokens), max(1, self._batch_size)

    def record_payoff(self, seq_id: int, saved_seconds: float, late: bool = False) -> None:
        """Credit a poll with the time that its draft is expected to save.

        `late`: the step was already in flight. Such a poll cannot save anything, so it does not enter the mean payoff.
        """
        state, one, most = self._states[seq_id], self.poll_seconds, self.tuning.poll_max_credit
        net = min(saved_seconds / one, most) - 1
        state.credit = min(max(state.credit, 0.0) + net * one, most * one)
        if not late:
            self._mean_payoff += 0.02 * (net - self._mean_payoff)
        state.next_step = self.step + 1 if state.credit > 0 else self.step + 2

    def poll_next_step(self, seq_id: int) -> None:
        """Poll a sequence again in the next step, because this step was in flight before its draft was found."""
        state = self._states[seq_id]
        state.credit, state.next_step = max(state.credit, self.poll_seconds), self.step + 1

    def finish_polls(self) -> None:
        """Measure what this step's polls cost and charge the bucket."""
        if self._cost:
            seconds = self.tuning.poll_host_factor * (self.clock() - self._began) / self._cost
            self._token_seconds += 0.1 * (seconds - self._token_seconds)
            self._bucket -= seconds * self._bucket_cost

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


class Exploration:
    """Schedules probes of unused drafters and plain baseline steps, both with exponential backoff.

    Without a baseline step the cost of plain decoding would never be measured again while drafts seem to pay.
    """

    def __init__(self, tuning: ControllerTuning = ControllerTuning()) -> None:
        self.tuning = tuning
        self._last: dict[str, int] = {}  # by drafter: step of its last use or probe
        self._backoff: dict[str, int] = {}  # by drafter: steps to wait since then
        self._speculative = 0  # steps since the last plain one
        self._baseline = tuning.baseline_interval // 8  # of these until a plain one

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

    def wants_baseline(self, speedup: float, is_known: bool) -> bool:
        """Return whether this step should be plain. The larger the expected `speedup`, the less that would change.

        `is_known`: costs were measured at start or in enough steps, so there is no hurry.
        """
        if self._speculative < max(self._baseline, self.tuning.baseline_interval if is_known else 0) * speedup:
            return False
        self._baseline = min(2 * self._baseline, 4 * self.tuning.baseline_interval)
        return True

    def record_step(self, speculative: bool) -> None:
        """Count a step."""
        self._speculative = self._speculative + 1 if speculative else 0
