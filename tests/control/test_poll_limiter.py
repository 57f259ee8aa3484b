"""Polling that does not pay costs almost nothing, and is tried again."""

from __future__ import annotations

import pytest

from foretell.control.acceptance_model import FIRST_TOKEN, AcceptanceRates
from foretell.control.sequence_history import PollLimiter, Probes, SequenceHistory
from foretell.control.settings import ControllerTuning
from foretell.sampling_params import SamplingParams
from foretell.types import DrafterTraits, Request, Sequence

PLAIN_SECONDS = 0.01
TUNING = ControllerTuning()


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sequences(count: int, tokens: int = 10_000) -> list[SequenceHistory]:
    """Return sequences that share a free drafter with an acceptance rate of 0.5."""
    seqs = [Sequence(i, Request(str(i), (1,), SamplingParams(), 0, tokens), [1]) for i in range(count)]
    rates = {"free": AcceptanceRates(DrafterTraits(is_free=True))}
    return [SequenceHistory(seq, rates) for seq in seqs]


def poll_without_payoff(
    limiter: PollLimiter, clock: Clock, states: list[SequenceHistory], steps: int, poll_seconds: float
) -> list[set[int]]:
    """Run steps whose polls save nothing, and return the sequences polled in each."""
    polled, before = [], max(state.polled_at for state in states)
    for step in range(before + 1, before + steps + 1):
        selected = limiter.select(states, step, PLAIN_SECONDS)
        clock.now += poll_seconds * len(selected)
        for state in selected:
            limiter.record(state, 0.0)
        limiter.finish_polls()
        polled.append({state.seq.id for state in selected})
        for state in states:
            assert (state.polled_at == step) == (state.seq.id in polled[-1])
            state.seq.tokens.append(1)
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


def first_polls(accepted: bool, tokens: int) -> int:
    """Return the polls of a new sequence on credit, after 400 drafts that were accepted or rejected."""
    clock = Clock()
    limiter, (state,) = PollLimiter(clock), sequences(1, tokens)
    for _ in range(400):
        state.rates["free"].count(FIRST_TOKEN, accepted)
    return [bool(each) for each in poll_without_payoff(limiter, clock, [state], 200, 1e-4)].index(False)


def test_a_new_sequence_has_credit_for_more_polls_where_drafts_are_accepted() -> None:
    assert first_polls(accepted=True, tokens=60) > 3 * first_polls(accepted=False, tokens=60)
    assert first_polls(accepted=False, tokens=2) == 3, "the least"


def test_a_sequence_without_a_free_drafter_has_no_more_than_the_least_credit() -> None:
    limiter, (state,) = PollLimiter(Clock()), sequences(1)
    state.rates = {"head": AcceptanceRates(DrafterTraits())}
    limiter.select([state], 1, PLAIN_SECONDS)
    assert state.poll_credit == 3 * limiter.poll_seconds


def test_a_sequence_that_is_late_is_polled_without_credit() -> None:
    clock = Clock()
    limiter, (late, other) = PollLimiter(clock), sequences(2)
    poll_without_payoff(limiter, clock, [late, other], 500, 1e-4)
    polled = [limiter.select([late, other], step, PLAIN_SECONDS, {late.seq.id}) for step in range(501, 506)]
    assert all(late in each for each in polled) and sum(other in each for each in polled) <= 1


def test_a_sequence_whose_drafts_pay_is_polled_in_every_step() -> None:
    limiter, (state,) = PollLimiter(Clock()), sequences(1)
    for step in range(100):
        assert limiter.select([state], step, PLAIN_SECONDS) == [state]
        limiter.record(state, 1.0)
        limiter.finish_polls()


def test_sequences_are_polled_more_often_once_the_batch_has_shrunk() -> None:
    clock = Clock()
    limiter, seqs = PollLimiter(clock), sequences(32)
    before = poll_without_payoff(limiter, clock, seqs, 4000, 1e-4)[2000:]
    after = poll_without_payoff(limiter, clock, seqs[:2], 2000, 1e-4)
    polls = [sum(0 in selected for selected in steps) for steps in (before, after)]
    assert polls[1] > 3 * polls[0] > 0


@pytest.mark.parametrize(("share", "at_least", "at_most"), [(0.5, 0, 900), (3.0, 1000, 1000)])
def test_a_sequence_whose_drafts_save_less_than_its_polls_cost_is_rarely_polled(
    share: float, at_least: int, at_most: int
) -> None:
    clock = Clock()
    limiter, (state,) = PollLimiter(clock), sequences(1, tokens=2000)
    polled = []
    for step in range(1000):
        selected = limiter.select([state], step, PLAIN_SECONDS)
        clock.now += 1e-4 * len(selected)
        for each in selected:  # nothing and twice the share in turn
            limiter.record(each, 0.0 if step % 2 else 2 * share * 1.7e-4)
        limiter.finish_polls()
        state.seq.tokens.append(1)
        polled.append(len(selected))
    assert at_least <= sum(polled) <= at_most
    assert share > 1 or sum(polled[500:]) <= 150


def test_probes_stay_within_their_share_of_time_and_back_off() -> None:
    scheduler, probes = Probes(), []
    for step in range(20_000):
        if scheduler.is_due("head", used=False, step=step, cost=0.4):
            scheduler.begin("head", step)
            probes.append(step)
    waits = [after - before for before, after in zip(probes, probes[1:], strict=False)]
    assert waits == sorted(waits) and waits[-1] == 32 * TUNING.probe_interval
    assert len(probes) * 0.4 <= TUNING.probe_time_share * 20_000
    scheduler.reset_backoff("head")
    step = probes[-1] + 40
    assert scheduler.is_due("head", used=False, step=step, cost=0.4), "an accepted token ends the backoff"
    assert not scheduler.is_due("head", used=False, step=step, cost=5.0), "an expensive probe waits longer"
