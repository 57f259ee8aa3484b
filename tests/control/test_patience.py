"""Being off costs next to nothing, and is not for ever."""

from __future__ import annotations

from foretell.control.poll_limiter import PATIENCE, STEP_SECONDS, TEXT_SECONDS, PollLimiter
from foretell.sampling_params import SamplingParams
from foretell.types import Request, Sequence

PLAIN = 0.01


class Time:
    """Looks take what they are set to take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def texts(count: int) -> list[Sequence]:
    return [Sequence(i, Request(str(i), (1,), SamplingParams(), 0, 10_000), [1]) for i in range(count)]


def in_vain(patience: PollLimiter, time: Time, seqs: list[Sequence], steps: int, look: float) -> list[set[int]]:
    """Whom each step looks at."""
    found = []
    for _ in range(steps):
        due = patience.due(seqs, PLAIN)
        time.now += look * len(due)
        for seq in due:
            patience.note(seq.id, 0.0)
        patience.done()
        found.append({seq.id for seq in due})
        for seq in seqs:
            assert patience.left_alone(seq.id) == (seq.id not in found[-1])
            seq.tokens.append(1)
    return found


def test_looks_in_vain_take_no_more_time_than_is_allowed() -> None:
    for count in (1, 8, 64):
        time = Time()
        patience, seqs = PollLimiter(time), texts(count)
        begun = in_vain(patience, time, seqs, PATIENCE, 1e-4)
        assert all(len(due) == count for due in begun)
        time.now = 0.0
        looks = in_vain(patience, time, seqs, 4000, 1e-4)
        assert time.now <= 4000 * (STEP_SECONDS + TEXT_SECONDS * count) + 2 * PLAIN
        assert any(looks[-1000:]), "somebody stays awake"


def test_a_sequence_that_drafts_is_looked_at_in_every_step() -> None:
    patience, (seq,) = PollLimiter(), texts(1)
    for _ in range(100):
        assert patience.due([seq], PLAIN) == [seq]
        patience.note(seq.id, 1.0)
        patience.done()


def test_a_crowd_that_slept_wakes_one_by_one_when_it_has_thinned_out() -> None:
    time = Time()
    patience, seqs = PollLimiter(time), texts(32)
    in_vain(patience, time, seqs, 600, 1e-3)
    woken = in_vain(patience, time, seqs[-3:], 3, 1e-3)
    assert [len(due) for due in woken] == [1, 2, 3], "and who is awake stays so for a while"


def test_nothing_is_kept_of_who_has_left() -> None:
    patience, seqs = PollLimiter(), texts(2)
    patience.due(seqs, PLAIN)
    patience.forget(0)
    assert len(patience) == 1


def test_a_sequence_whose_guesses_save_less_than_the_looks_cost_is_left_alone() -> None:
    for share, at_least, at_most in ((0.5, 0, 60), (3.0, 200, 200)):
        time = Time()
        patience, (seq,) = PollLimiter(time), texts(1)
        seen = 0
        for step in range(200):
            due = patience.due([seq], PLAIN)
            time.now += 1e-4 * len(due)
            for each in due:
                patience.note(each.id, 0.0 if step % 2 else 2 * share * 1.7e-4)  # by turns nothing and twice as much
            patience.done()
            seq.tokens.append(1)
            seen += len(due)
        assert at_least <= seen <= at_most
