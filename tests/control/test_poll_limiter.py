"""Polling that does not pay costs almost nothing, and is tried again."""

from __future__ import annotations

from foretell.control.poll_limiter import PollLimiter
from foretell.control.settings import PollTuning
from foretell.sampling_params import SamplingParams
from foretell.types import Request, Sequence

PLAIN_SECONDS = 0.01
TUNING = PollTuning()


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sequences(count: int) -> list[Sequence]:
    return [Sequence(i, Request(str(i), (1,), SamplingParams(), 0, 10_000), [1]) for i in range(count)]


def poll_without_payoff(
    limiter: PollLimiter, clock: Clock, seqs: list[Sequence], steps: int, poll_seconds: float
) -> list[set[int]]:
    """Run steps whose polls save nothing, and return the sequences polled in each."""
    polled = []
    for _ in range(steps):
        selected = limiter.select(seqs, PLAIN_SECONDS)
        clock.now += poll_seconds * len(selected)
        for seq in selected:
            limiter.record_payoff(seq.id, 0.0)
        limiter.finish_polls()
        polled.append({seq.id for seq in selected})
        for seq in seqs:
            assert limiter.was_skipped(seq.id) == (seq.id not in polled[-1])
            seq.tokens.append(1)
    return polled


def test_polls_without_payoff_stay_within_the_refill_of_the_bucket() -> None:
    for count in (1, 8, 64):
        clock = Clock()
        limiter, seqs = PollLimiter(clock), sequences(count)
        first = poll_without_payoff(limiter, clock, seqs, TUNING.initial_polls, 1e-4)
        assert all(len(selected) == count for selected in first)
        clock.now = 0.0
        polled = poll_without_payoff(limiter, clock, seqs, 4000, 1e-4)
        refill = TUNING.refill_step_seconds + TUNING.refill_sequence_seconds * count
        assert clock.now <= 4000 * refill + 2 * PLAIN_SECONDS
        assert any(polled[-1000:]), "some sequence is still polled"


def test_a_sequence_whose_drafts_pay_is_polled_in_every_step() -> None:
    limiter, (seq,) = PollLimiter(), sequences(1)
    for _ in range(100):
        assert limiter.select([seq], PLAIN_SECONDS) == [seq]
        limiter.record_payoff(seq.id, 1.0)
        limiter.finish_polls()


def test_sequences_are_polled_again_one_by_one_when_the_batch_has_shrunk() -> None:
    clock = Clock()
    limiter, seqs = PollLimiter(clock), sequences(32)
    poll_without_payoff(limiter, clock, seqs, 600, 1e-3)
    polled = poll_without_payoff(limiter, clock, seqs[-3:], 3, 1e-3)
    assert [len(selected) for selected in polled] == [1, 2, 3], "and each keeps its credit for a few polls"


def test_a_finished_sequence_leaves_no_state() -> None:
    limiter, seqs = PollLimiter(), sequences(2)
    limiter.select(seqs, PLAIN_SECONDS)
    limiter.forget(0)
    assert len(limiter) == 1


def test_a_sequence_whose_drafts_save_less_than_its_polls_cost_is_rarely_polled() -> None:
    for share, at_least, at_most in ((0.5, 0, 60), (3.0, 200, 200)):
        clock = Clock()
        limiter, (seq,) = PollLimiter(clock), sequences(1)
        count = 0
        for step in range(200):
            selected = limiter.select([seq], PLAIN_SECONDS)
            clock.now += 1e-4 * len(selected)
            for each in selected:  # nothing and twice the share in turn
                limiter.record_payoff(each.id, 0.0 if step % 2 else 2 * share * 1.7e-4)
            limiter.finish_polls()
            seq.tokens.append(1)
            count += len(selected)
        assert at_least <= count <= at_most
