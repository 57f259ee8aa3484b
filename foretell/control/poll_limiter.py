"""Rate limit for polling free drafters, so that speculation that does not pay costs almost nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from foretell.types import Sequence

from .settings import PollTuning


@dataclass(slots=True)
class _PollState:
    """Poll budget of one sequence and when it was last polled."""

    credit: float = 0.0  # polls
    next_step: int = 0  # earliest step of the next poll
    last_step: int = 0
    length: int = 0  # tokens at the last poll
    batch_size: int = 0  # decoding sequences at the last poll


class PollLimiter:
    """Decides which sequences to poll in a step.

    A poll asks free drafters (n-gram, suffix) for a draft before the step is scheduled. It costs host time and earns
    the time that its draft is expected to save; both are booked per sequence. A sequence without credit is polled from
    a token bucket shared by all, which refills with a small share of step time. Drafters catch up on the tokens
    generated since their last poll, so the cost of a poll grows with that gap. At high batch size the bucket serves the
    oldest sequences, and the others are not polled.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter, tuning: PollTuning = PollTuning()) -> None:
        self.clock, self.tuning = clock, tuning
        self.step = 0
        self._states: dict[int, _PollState] = {}
        self._seconds_per_token = 1e-6  # measured cost of catching up on one token
        self._bucket = 0.0  # seconds
        self._refill = 0.0  # seconds per step
        self._plain_seconds = 0.0  # expected time of a step without drafts
        self._mean_payoff = 1.0  # net earning of a poll, in polls, over all sequences
        self._batch_size = 0
        self._tokens_polled = 0  # cost of this step's polls, in tokens
        self._tokens_from_bucket = 0  # the part of it that the bucket pays
        self._began = 0.0  # when the polls of this step began
        self._revived = False  # whether this step re-polls a sequence because the batch has shrunk

    def select(self, seqs: list[Sequence], plain_seconds: float) -> list[Sequence]:
        """Start a step and return the sequences to poll. `plain_seconds` is the expected time without drafts."""
        tuning, batch_size = self.tuning, len(seqs)
        self._plain_seconds = plain_seconds
        limit = tuning.refill_step_seconds + tuning.refill_sequence_seconds * batch_size
        self._refill = min(tuning.refill_time_share * plain_seconds, limit)
        self._bucket = min(self._bucket + self._refill, 2 * plain_seconds)
        self.step += 1
        self._batch_size = batch_size
        self._tokens_polled = self._tokens_from_bucket = 0
        self._began = self.clock()
        self._revived = False
        step, shrunk, states, selected = self.step, tuning.batch_shrink * batch_size, self._states, []
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
        """Return the polls that a new sequence gets on credit."""
        tuning = self.tuning
        if self._mean_payoff <= 0:
            return tuning.initial_polls_after_losses
        decode_seconds = seq.remaining_tokens * self._plain_seconds / self._batch_size
        polls = tuning.initial_time_share * decode_seconds / (tuning.base_cost_tokens * self._seconds_per_token)
        return min(max(polls, tuning.initial_polls_after_losses), tuning.initial_polls)

    def _may_poll(self, state: _PollState, length: int) -> bool:
        tuning = self.tuning
        cost = tuning.base_cost_tokens + length - state.length
        if state.credit <= 0:
            if state.batch_size >= tuning.batch_shrink * self._batch_size:
                if self._revived:  # one per step, since they may have many tokens to catch up on
                    return False
                state.credit, self._revived = tuning.initial_polls_after_losses, True
            elif (missing := self._seconds_per_token * (self._tokens_from_bucket + cost) - self._bucket) > 0:
                interval = min(tuning.max_interval, int(missing / max(self._refill, 1e-9)))
                state.next_step = self.step + 1 + interval
                return False
            else:
                self._tokens_from_bucket += cost
        self._tokens_polled += cost
        state.last_step, state.length, state.batch_size = self.step, length, self._batch_size
        return True

    def force(self, seq: Sequence) -> None:
        """Poll a sequence in this step whatever its credit."""
        state = self._states[seq.id]
        state.credit = max(state.credit, self.tuning.initial_polls_after_losses)
        state.last_step, state.length, state.batch_size = self.step, len(seq.tokens), self._batch_size

    def record_payoff(self, seq_id: int, saved_seconds: float, late: bool = False) -> None:
        """Credit a poll with the time that its draft is expected to save.

        `late`: the step was already in flight. Such a poll cannot save anything, so it does not enter the mean payoff.
        """
        state, tuning = self._states[seq_id], self.tuning
        earned = saved_seconds / (tuning.base_cost_tokens * self._seconds_per_token)
        net = min(earned, tuning.max_credit) - 1
        state.credit = min(max(state.credit, 0.0) + net, tuning.max_credit)
        if not late:
            self._mean_payoff += tuning.payoff_ema * (net - self._mean_payoff)
        state.next_step = self.step + 1 if state.credit > 0 else self.step + 2

    def poll_next_step(self, seq_id: int) -> None:
        """Poll a sequence again in the next step, because this step was in flight before its draft was found."""
        state = self._states[seq_id]
        state.credit = max(state.credit, 1.0)
        state.next_step = self.step + 1

    def finish_polls(self) -> None:
        """Measure what this step's polls cost and charge the bucket."""
        if self._tokens_polled:
            seconds_per_token = self.tuning.after_poll_factor * (self.clock() - self._began) / self._tokens_polled
            self._seconds_per_token += self.tuning.cost_ema * (seconds_per_token - self._seconds_per_token)
            self._bucket -= seconds_per_token * self._tokens_from_bucket

    def was_skipped(self, seq_id: int) -> bool:
        """Return whether a sequence is known and was not polled in this step."""
        state = self._states.get(seq_id)
        return state is not None and state.last_step != self.step

    def forget(self, seq_id: int) -> None:
        """Drop the state of a finished sequence."""
        self._states.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._states)
