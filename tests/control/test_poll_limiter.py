"""Polling that does not pay costs almost nothing, and is tried again."""

from __future__ import annotations

import pytest

from foretell.control.overhead import Exploration, PollLimiter
from foretell.control.settings import ControllerTuning
from foretell.sampling_params import SamplingParams
from foretell.types import Request, Sequence

PLAIN_SECONDS = 0.01
TUNING = ControllerTuning()


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sequences(count: int, tokens: int = 10_000) -> list[Sequence]:
    return [Sequence(i, Request(str(i), (1,), SamplingParams(), 0, tokens), [1]) for i in range(count)]


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


@pytest.mark.parametrize("count", [1, 8, 64])
def test_polls_without_payoff_stay_within_their_share_of_step_time(count: int) -> None:
    clock = Clock()
    limiter, seqs = PollLimiter(clock), sequences(count)
    poll_without_payoff(limiter, clock, seqs, 2000, 1e-4)
    clock.now = 0.0
    polled = poll_without_payoff(limiter, clock, seqs, 4000, 1e-4)
    refill = TUNING.poll_refill_seconds * (1 + 0.1 * count)
    assert clock.now <= 4000 * refill
    assert any(polled[-1000:]), "some sequence is still polled"


@pytest.mark.parametrize("poll_seconds", [1e-3, 2e-3])
def test_polls_of_a_short_output_cost_a_bounded_share_of_its_time(poll_seconds: float) -> None:
    """96 tokens seen first: what looking may cost is the share on credit, plus a few polls until a price is known."""
    clock = Clock()
    limiter, seqs = PollLimiter(clock), sequences(1, tokens=96)
    poll_without_payoff(limiter, clock, seqs, 96, poll_seconds)
    assert clock.now <= (TUNING.poll_start_share + TUNING.poll_refill_share) * 96 * PLAIN_SECONDS + 8 * poll_seconds


def test_a_sequence_whose_drafts_pay_is_polled_in_every_step() -> None:
    limiter, (seq,) = PollLimiter(), sequences(1)
    for _ in range(100):
        assert limiter.select([seq], PLAIN_SECONDS) == [seq]
        limiter.record_payoff(seq.id, 1.0)
        limiter.finish_polls()


def test_sequences_are_polled_more_often_once_the_batch_has_shrunk() -> None:
    clock = Clock()
    limiter, seqs = PollLimiter(clock), sequences(32)
    before = poll_without_payoff(limiter, clock, seqs, 4000, 1e-4)[2000:]
    after = poll_without_payoff(limiter, clock, seqs[:2], 2000, 1e-4)
    polls = [sum(0 in selected for selected in steps) for steps in (before, after)]
    assert polls[1] > 3 * polls[0] > 0


def test_a_finished_sequence_leaves_no_state() -> None:
    limiter, seqs = PollLimiter(), sequences(2)
    limiter.select(seqs, PLAIN_SECONDS)
    limiter.forget(0)
    assert len(limiter) == 1


@pytest.mark.parametrize(("share", "at_least", "at_most"), [(0.5, 0, 900), (3.0, 1000, 1000)])
def test_a_sequence_whose_drafts_save_less_than_its_polls_cost_is_rarely_polled(
    share: float, at_least: int, at_most: int
) -> None:
    clock = Clock()
    limiter, (seq,) = PollLimiter(clock), sequences(1, tokens=2000)
    polled = []
    for step in range(1000):
        selected = limiter.select([seq], PLAIN_SECONDS)
        clock.now += 1e-4 * len(selected)
        for each in selected:  # nothing and twice the share in turn
            limiter.record_payoff(each.id, 0.0 if step % 2 else 2 * share * 1.7e-4)
        limiter.finish_polls()
        seq.tokens.append(1)
        polled.append(len(selected))
    assert at_least <= sum(polled) <= at_most
    assert share > 1 or sum(polled[500:]) <= 150


def test_probes_stay_within_their_share_of_time_and_back_off() -> None:
    exploration, probes = Exploration(), []
    for step in range(20_000):
        if exploration.is_idle("head", used=False, step=step) and exploration.begin_probe("head", step, 0.004, 0.01):
            probes.append(step)
    waits = [after - before for before, after in zip(probes, probes[1:], strict=False)]
    assert waits == sorted(waits) and waits[-1] == 32 * TUNING.probe_interval
    assert len(probes) * 0.004 <= TUNING.probe_time_share * 20_000 * 0.01
    exploration.reset_backoff("head")
    step = probes[-1] + 40
    assert exploration.begin_probe("head", step, 0.004, 0.01), "an accepted token ends the backoff"


def test_baseline_steps_are_rare() -> None:
    exploration, plain = Exploration(), []
    for step in range(4000):
        due = exploration.wants_baseline(1.3)
        exploration.record_step(not due)
        plain += [step] if due else []
    assert plain[0] >= 1.3 * TUNING.baseline_interval
    waits = {after - before for before, after in zip(plain, plain[1:], strict=False)}
    assert waits == {plain[0] + 1}
