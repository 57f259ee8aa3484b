"""What steps cost, learnt from restless clocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foretell.control.latency_model import (
    FEATURES,
    KNOTS,
    KNOWN_WELL,
    LESSON,
    LESSON_SHARE,
    THINNED,
    CostPrior,
    DraftCosts,
    StepCosts,
    between_knots,
    in_steps,
    never_falling,
)


def learnt(rows: list[int], seed: int = 0, hiccups: float = 0.0, pace: float = 1.0) -> StepCosts:
    costs, rng = StepCosts(), random.Random(seed)
    for _ in range(300):
        some = rng.choice(rows)
        late = rng.uniform(3, 10) if rng.random() < hiccups else 1.0
        costs.observe(some, 100, pace * late * true_seconds(some, 100) * rng.lognormvariate(0, 0.05))
    return costs


def true_seconds(rows: int, context: int) -> float:
    return 0.03 + 0.002 * rows + 2e-6 * context


def test_nothing_is_known_before_the_first_step() -> None:
    costs = StepCosts()
    assert not costs.known
    assert costs.seconds(4) == 0
    assert not costs.curve(4).any()


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 65, 272, KNOTS[-1] - 1, KNOTS[-1]])
def test_prices_between_knots_are_to_the_bit_what_numpy_has(rows: int) -> None:
    rng = random.Random(rows)
    for _ in range(20):
        values = sorted(rng.uniform(0.001, 0.1) for _ in KNOTS)
        assert between_knots(values, rows) == np.interp(np.arange(rows + 1), KNOTS, values).tolist()


def test_the_last_line_goes_on_behind_the_last_knot() -> None:
    values = [0.01 + 0.001 * knot for knot in KNOTS]
    prices = between_knots(values, 2 * KNOTS[-1])
    assert len(prices) == 2 * KNOTS[-1] + 1
    assert prices[-1] == pytest.approx(0.01 + 0.001 * 2 * KNOTS[-1])


@pytest.mark.parametrize("hiccups", [0.0, 0.1])
def test_what_was_run_is_known_well_and_what_lies_between_too(hiccups: float) -> None:
    costs = learnt([1, 3, 5, 9, 17], hiccups=hiccups)
    for rows in (1, 2, 4, 8, 12, 17):
        assert costs.seconds(rows, 100) == pytest.approx(true_seconds(rows, 100), rel=0.10)


def test_a_row_count_never_run_is_told_by_the_line_through_the_others() -> None:
    assert learnt([4, 8, 16]).seconds(1, 100) == pytest.approx(true_seconds(1, 100), rel=0.15)
    assert learnt([1, 2, 4]).seconds(32, 100) == pytest.approx(true_seconds(32, 100), rel=0.35)


def test_one_stalled_step_moves_little() -> None:
    costs = learnt([1, 4, 8])
    before = costs.seconds(4, 100)
    costs.observe(4, 100, 100 * before)
    assert costs.seconds(4, 100) < 1.15 * before


def test_a_machine_that_slows_down_for_good_is_followed() -> None:
    costs = learnt([1, 4, 8])
    for i in range(120):
        costs.observe((1, 4, 8)[i % 3], 100, 3 * true_seconds((1, 4, 8)[i % 3], 100))
    for rows in (1, 4, 8):
        assert costs.seconds(rows, 100) == pytest.approx(3 * true_seconds(rows, 100), rel=0.15)


def test_the_curve_never_falls() -> None:
    costs = StepCosts()
    for _ in range(200):
        costs.observe(1, 0, 0.04)
        costs.observe(4, 0, 0.03)  # seen on a machine whose kernels like four rows better than one
    curve = costs.curve(64)
    assert (np.diff(curve) >= 0).all()


def test_a_first_step_that_was_odd_is_not_believed() -> None:
    """Else a plain step, which is not run again while guesses seem to pay, stays dear for ever."""
    costs = StepCosts()
    costs.observe(1, 0, 6 * 0.03)
    for rows in (4, 8, 12, 10, 9):
        costs.observe(rows, 0, 0.03 + 0.006 * (rows - 1))
    assert costs.curve(1)[1] < 3 * 0.03
    assert costs.curve(9)[9] > 0.05


def test_where_the_curve_would_fall_what_is_known_less_well_gives_way() -> None:
    assert never_falling([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) == [1.0, 2.0, 3.0]
    assert never_falling([9.0, 2.0, 3.0], [1e9, 1.0, 1.0]) == pytest.approx([2.0, 2.0, 3.0])
    assert never_falling([9.0, 2.0, 3.0], [1.0, 1e9, 1e9]) == pytest.approx([9.0, 9.0, 9.0])
    assert never_falling([2.0, 4.0, 3.0, 5.0], [1.0, 1.0, 1.0, 1.0]) == pytest.approx([2.0, 3.5, 3.5, 5.0])


def test_hiccups_do_not_make_it_believe_in_hiccups() -> None:
    """A usual surprise that is the mean of all is made of the odd ones, and lets the next one through."""
    costs, rng = StepCosts(), random.Random(5)
    for i in range(400):
        costs.observe(1 + i % 2, 0, 0.03 * rng.lognormvariate(0, 0.05) * (rng.uniform(5, 20) if i % 7 == 0 else 1.0))
    assert costs.seconds(1) == pytest.approx(0.03, rel=0.1)


def test_only_some_of_the_steps_that_tell_the_same_are_lessons() -> None:
    costs = learnt([1, 4, 8])
    assert costs.steps >= KNOWN_WELL
    wanted = [costs.wants(rows) for rows in [8, 9, 12, 15] * THINNED]
    assert wanted[0] and sum(wanted) == 4
    assert costs.wants(1), "of a plain step nothing is known lately"
    assert not costs.wants(1)


def test_steps_with_guesses_are_lessons_as_often_as_their_time_allows() -> None:
    costs = learnt([1, 4, 8])
    seconds = costs.seconds(8)
    taught = sum(costs.wants(8, guessed=True) for _ in range(960))
    assert 960 / THINNED < taught <= 960 * min(1.0, LESSON_SHARE * seconds / LESSON) + 1


def test_what_was_learnt_can_be_kept() -> None:
    costs = learnt([1, 4, 8])
    other = StepCosts(CostPrior(row=0.5))
    other.load(costs.dump())
    assert other.seconds(6, 50) == pytest.approx(costs.seconds(6, 50))
    strange = StepCosts()
    strange.load({"mean": [1.0], "spread": [[1.0]], "usual": 0.1})
    assert not strange.known, "another version's numbers are left alone"
    assert len(costs.dump()["mean"]) == FEATURES


def test_drafts_are_priced_by_depth_nodes_and_reading() -> None:
    costs, rng = DraftCosts(0.3), random.Random(1)
    assert costs.seconds(1, 1, 0, 0.03) == pytest.approx(0.009)
    for _ in range(400):
        depth, sequences, read = rng.randint(1, 8), rng.randint(1, 8), rng.choice([0, 0, 0, 300])
        seconds = 0.004 * depth + 0.0005 * depth * sequences + 1e-5 * read
        costs.observe(depth, depth * sequences, read, seconds * rng.lognormvariate(0, 0.05), 0.03)
    assert costs.seconds(4, 4, 0, 0.03) == pytest.approx(0.018, rel=0.1)
    assert costs.seconds(2, 16, 0, 0.03) == pytest.approx(0.016, rel=0.15)
    assert costs.seconds(0, 0, 300, 0.03) == pytest.approx(0.003, rel=0.3)


def test_what_a_draft_costs_to_begin_is_not_taken_for_depth() -> None:
    costs, rng = DraftCosts(0.1, 0.05), random.Random(2)
    for depth in [1, 4] * 8 + [1] * 200:  # once the first few are known, short ones are all that is tried
        costs.observe(depth, depth, 0, (1e-3 + 0.25e-3 * depth) * rng.lognormvariate(0, 0.05), 0.006)
    assert costs.seconds(1, 1, 0, 0.006) == pytest.approx(1.25e-3, rel=0.05)
    assert costs.seconds(4, 4, 0, 0.006) == pytest.approx(2e-3, rel=0.35)  # as all depth it would be 5e-3


def test_rows_that_look_at_long_texts_are_found_dearer() -> None:
    costs, rng = StepCosts(), random.Random(3)
    for i in range(240):
        rows, context = (1, 2, 5, 9)[i % 4], (100, 3000)[i // 4 % 2]
        pairs = (rows - 1) * context
        seconds = 0.005 + 0.0003 * (rows - 1) + 4e-6 * context + 4e-7 * pairs
        costs.observe(rows, context, seconds * rng.lognormvariate(0, 0.05), pairs)
    assert costs.pair == pytest.approx(4e-7, rel=0.25)
    assert costs.seconds(9, 3000, 8 * 3000) > costs.seconds(9, 3000) + 0.006


def test_between_the_sizes_of_steps_a_row_costs_nothing() -> None:
    costs = StepCosts(sizes=(1, 8, 64))
    for rows in (1, 8, 64) * 60:
        costs.observe(rows, 0, 0.01 * {1: 1.0, 8: 1.1, 64: 1.6}[rows])
    for rows in (5, 40) * 30:
        costs.observe(rows, 0, 0.01 * {5: 1.1, 40: 1.6}[rows])
    prices = costs.prices(70)
    assert prices[2:8] == [prices[8]] * 6 and prices[9:64] == [prices[64]] * 55
    assert prices[8] == pytest.approx(0.011, rel=0.02) and prices[64] == pytest.approx(0.016, rel=0.02)
    assert costs.seconds(5) == pytest.approx(prices[8]) and prices[70] > prices[64]
    assert in_steps([1.0, 2.0, 3.0], ()) == [1.0, 2.0, 3.0]
