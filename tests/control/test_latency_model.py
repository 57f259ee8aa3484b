"""Step costs and draft costs, learned from noisy measurements."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foretell.control.latency_model import FEATURES, KNOTS, CostPrior, DraftCosts, StepCosts, interpolate_knots
from foretell.control.settings import ControllerTuning

TUNING = ControllerTuning()


def fitted(rows: list[int], seed: int = 0, outliers: float = 0.0, pace: float = 1.0) -> StepCosts:
    costs, rng = StepCosts(), random.Random(seed)
    for _ in range(300):
        count = rng.choice(rows)
        slow = rng.uniform(3, 10) if rng.random() < outliers else 1.0
        costs.observe(count, 100, pace * slow * true_seconds(count, 100) * rng.lognormvariate(0, 0.05))
    return costs


def true_seconds(rows: int, context: int) -> float:
    return 0.03 + 0.002 * rows + 2e-6 * context


def test_costs_are_unknown_before_the_first_step() -> None:
    costs = StepCosts()
    assert not costs.is_known
    assert costs.seconds(4) == 0
    assert not any(costs.curve(4))


def test_the_prior_has_the_pace_of_the_first_step() -> None:
    costs = StepCosts(CostPrior(row=0.1))
    costs.observe(5, 0, 0.07)
    assert costs.seconds(5) == pytest.approx(0.07)
    assert costs.single_row_seconds == pytest.approx(0.05), "the prior has four further rows at a tenth each"


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 65, 272, KNOTS[-1] - 1, KNOTS[-1]])
def test_interpolation_equals_numpy_bit_for_bit(rows: int) -> None:
    rng = random.Random(rows)
    for _ in range(20):
        values = sorted(rng.uniform(0.001, 0.1) for _ in KNOTS)
        assert interpolate_knots(values, rows) == np.interp(np.arange(rows + 1), KNOTS, values).tolist()


def test_the_last_segment_is_extended_beyond_the_last_knot() -> None:
    values = [0.01 + 0.001 * knot for knot in KNOTS]
    curve = interpolate_knots(values, 2 * KNOTS[-1])
    assert len(curve) == 2 * KNOTS[-1] + 1
    assert curve[-1] == pytest.approx(0.01 + 0.001 * 2 * KNOTS[-1])


@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_measured_row_counts_and_those_between_are_accurate(outliers: float) -> None:
    costs = fitted([1, 3, 5, 9, 17], outliers=outliers)
    for rows in (1, 2, 4, 8, 12, 17):
        assert costs.seconds(rows, 100) == pytest.approx(true_seconds(rows, 100), rel=0.10)


def test_a_row_count_without_measurements_is_extrapolated() -> None:
    assert fitted([4, 8, 16]).seconds(1, 100) == pytest.approx(true_seconds(1, 100), rel=0.15)
    assert fitted([1, 2, 4]).seconds(32, 100) == pytest.approx(true_seconds(32, 100), rel=0.35)


def test_one_outlier_changes_little() -> None:
    costs = fitted([1, 4, 8])
    before = costs.seconds(4, 100)
    costs.observe(4, 100, 100 * before)
    assert costs.seconds(4, 100) < 1.15 * before


def test_a_lasting_slowdown_is_followed() -> None:
    costs = fitted([1, 4, 8])
    for i in range(120):
        costs.observe((1, 4, 8)[i % 3], 100, 3 * true_seconds((1, 4, 8)[i % 3], 100))
    for rows in (1, 4, 8):
        assert costs.seconds(rows, 100) == pytest.approx(3 * true_seconds(rows, 100), rel=0.15)


def test_the_curve_never_decreases() -> None:
    costs = StepCosts()
    for _ in range(200):
        costs.observe(1, 0, 0.04)
        costs.observe(4, 0, 0.03)  # seen on a machine whose kernels are faster with four rows than with one
    curve = costs.curve(64)
    assert (np.diff(np.array(curve)) >= 0).all()
    assert curve[1] == pytest.approx(costs.seconds(1)), "the maximum of the knots so far"


def test_an_outlier_as_the_first_step_is_corrected() -> None:
    """Else a plain step, which does not run again while drafts seem to pay, would stay expensive for ever."""
    costs = StepCosts()
    costs.observe(1, 0, 6 * 0.03)
    for rows in (4, 8, 12, 10, 9):
        costs.observe(rows, 0, 0.03 + 0.006 * (rows - 1))
    assert costs.curve(1)[1] < 3 * 0.03
    assert costs.curve(9)[9] > 0.05


def test_outliers_do_not_raise_the_clipping_limit() -> None:
    """A mean of the residuals instead of their median would let the next outlier through."""
    costs, rng = StepCosts(), random.Random(5)
    for i in range(400):
        costs.observe(1 + i % 2, 0, 0.03 * rng.lognormvariate(0, 0.05) * (rng.uniform(5, 20) if i % 7 == 0 else 1.0))
    assert costs.seconds(1) == pytest.approx(0.03, rel=0.1)


def test_steps_of_similar_size_are_subsampled() -> None:
    costs = fitted([1, 4, 8])
    assert costs.steps >= TUNING.warm_steps
    observed = [costs.should_observe(rows) for rows in [8, 9, 12, 15] * TUNING.subsample]
    assert observed[0] and sum(observed) == 4
    assert costs.should_observe(1), "no plain step was observed lately"
    assert not costs.should_observe(1)


def test_a_step_of_a_rare_size_is_always_an_update() -> None:
    """While drafts pay, plain steps are rare, and each tells what drafts are compared with."""
    costs = fitted([1, 4, 8])
    for _ in range(5):
        assert costs.should_observe(1)
        assert sum(costs.should_observe(4) for _ in range(TUNING.subsample)) == 1


def test_costs_can_be_saved_and_loaded() -> None:
    costs = fitted([1, 4, 8])
    other = StepCosts(CostPrior(row=0.5))
    other.load(costs.dump())
    assert other.seconds(6, 50) == pytest.approx(costs.seconds(6, 50))
    damaged = StepCosts()
    damaged.load({"mean": [1.0], "spread": [[1.0]], "usual": 0.1})
    assert not damaged.is_known, "values of another version are ignored"
    assert len(costs.dump()["mean"]) == FEATURES


def test_draft_costs_depend_on_depth_nodes_and_prefill() -> None:
    costs, rng = DraftCosts(0.3), random.Random(1)
    assert costs.prices(0.03).seconds(1, 1) == pytest.approx(0.009)
    for _ in range(400):
        depth, sequences, prefill = rng.randint(1, 8), rng.randint(1, 8), rng.choice([0, 0, 0, 300])
        seconds = 0.004 * depth + 0.0005 * depth * sequences + 1e-5 * prefill
        costs.observe(depth, depth * sequences, prefill, seconds * rng.lognormvariate(0, 0.05), 0.03)
    prices = costs.prices(0.03)
    assert prices.seconds(4, 4) == pytest.approx(0.018, rel=0.1)
    assert prices.seconds(2, 16) == pytest.approx(0.016, rel=0.15)
    assert prices.seconds(0, 0, 300) == pytest.approx(0.003, rel=0.3)


def test_the_start_of_a_draft_is_not_mistaken_for_depth() -> None:
    costs, rng = DraftCosts(0.1), random.Random(2)
    for depth in [1, 4] * 8 + [1] * 200:  # short drafts alone after the first few
        costs.observe(depth, depth, 0, (1e-3 + 0.25e-3 * depth) * rng.lognormvariate(0, 0.05), 0.006)
    prices = costs.prices(0.006)
    assert prices.seconds(1, 1) == pytest.approx(1.25e-3, rel=0.05)
    assert prices.seconds(4, 4) == pytest.approx(2e-3, rel=0.35)  # 5e-3 if all of it were depth


def test_prices_that_cannot_be_negative_do_not_push_others_up() -> None:
    """A draft costs 0.6 ms a level and was expected to cost three times that and more to start."""
    costs = DraftCosts(0.3)
    for depth in [6] * 5 + [3] * 10 + [2] * 100 + [1] * 60 + [2] * 200:
        costs.observe(depth, depth, 0, 0.6e-3 * depth, 0.008)
    for depth in (1, 2, 6):
        assert costs.prices(0.008).seconds(depth, depth) == pytest.approx(0.6e-3 * depth, rel=0.05)


def test_rows_over_a_long_context_cost_more() -> None:
    costs, rng = StepCosts(), random.Random(3)
    for i in range(240):
        rows, context = (1, 2, 5, 9)[i % 4], (100, 3000)[i // 4 % 2]
        pairs = (rows - 1) * context
        seconds = 0.005 + 0.0003 * (rows - 1) + 4e-6 * context + 4e-7 * pairs
        costs.observe(rows, context, seconds * rng.lognormvariate(0, 0.05), pairs)
    assert costs.pair_seconds == pytest.approx(4e-7, rel=0.25)
    assert costs.seconds(9, 3000, 8 * 3000) > costs.seconds(9, 3000) + 0.006


def test_rows_that_only_pad_a_step_cost_nothing() -> None:
    costs = StepCosts(sizes=(1, 8, 64))
    for rows in (1, 8, 64) * 60:
        costs.observe(rows, 0, 0.01 * {1: 1.0, 8: 1.1, 64: 1.6}[rows])
    for rows in (5, 40) * 30:
        costs.observe(rows, 0, 0.01 * {5: 1.1, 40: 1.6}[rows])
    curve = costs.curve(70)
    assert curve[2:8] == [curve[8]] * 6 and curve[9:64] == [curve[64]] * 55
    assert curve[8] == pytest.approx(0.011, rel=0.02) and curve[64] == pytest.approx(0.016, rel=0.02)
    assert costs.seconds(5) == pytest.approx(curve[8]) and curve[70] > curve[64]
