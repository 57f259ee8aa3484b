"""Speedup ratios and their intervals: coverage is checked by simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import median

import pytest

from foretell.bench.intervals import (
    Estimate,
    Pairs,
    half_width,
    interval,
    mean_of,
    over_prompts,
    over_rounds,
    over_tasks,
    ratio_of,
    shown,
    t_quantile,
)

RUNS = 600
LEAST, MOST = 0.93, 0.99  # at a true coverage of 95%, 600 runs give less than 93% once in fifty
TASK, PROMPT, ROUND = 0.3, 0.2, 0.03  # standard deviations of log ratios

Draw = Callable[[random.Random], tuple[Estimate | None, float]]


def test_one_slow_round_does_not_move_the_ratio() -> None:
    assert ratio_of([[2.0, 2.0, 0.01]]) == pytest.approx(2.0)


def test_the_mean_over_prompts_is_geometric() -> None:
    assert ratio_of([[2.0], [0.5]]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("level", "freedom", "quantile"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 10, 2.22814),
        (0.95, 4, 2.13185),
        (0.9875, 8, 2.7515),
        (0.975, 1e6, 1.95997),
        (0.5, 3, 0.0),
    ],
)
def test_quantiles_are_those_of_the_tables(level: float, freedom: float, quantile: float) -> None:
    assert t_quantile(level, freedom) == pytest.approx(quantile, rel=1e-4, abs=1e-9)


def test_quantiles_between_whole_degrees_of_freedom_are_monotonic() -> None:
    found = [t_quantile(0.975, 1 + i / 4) for i in range(40)]
    assert found == sorted(found, reverse=True)


def noisy(rng: random.Random, log: float, rounds: int) -> list[float]:
    return [math.exp(rng.gauss(log, ROUND)) for _ in range(rounds)]


def prompts(rng: random.Random, log: float, count: int, rounds: int) -> list[list[float]]:
    return [noisy(rng, rng.gauss(log, PROMPT), rounds) for _ in range(count)]


def rounds_design(rounds: int) -> Draw:
    return lambda rng: (over_rounds([noisy(rng, 0.4, rounds)]), 0.4)


def prompts_design(count: int, rounds: int) -> Draw:
    return lambda rng: (over_prompts(prompts(rng, 0.4, count, rounds)), 0.4)


def tasks_design(tasks: int, count: int, rounds: int) -> Draw:
    def draw(rng: random.Random) -> tuple[Estimate | None, float]:
        true = [rng.gauss(0.3, TASK) for _ in range(tasks)]
        return over_tasks([prompts(rng, log, count, rounds) for log in true]), sum(true) / tasks

    return draw


def shared_rounds_design(tasks: int, count: int, rounds: int) -> Draw:
    """Each round slows or speeds up all tasks alike, for a round runs all of them."""

    def draw(rng: random.Random) -> tuple[Estimate | None, float]:
        true = [rng.gauss(0.3, TASK) for _ in range(tasks)]
        shared = [rng.gauss(0.0, ROUND) for _ in range(rounds)]
        found = [
            [[ratio * math.exp(noise) for ratio, noise in zip(each, shared, strict=True)] for each in pairs]
            for pairs in (prompts(rng, log, count, rounds) for log in true)
        ]
        return over_tasks(found), sum(true) / tasks

    return draw


@pytest.mark.parametrize(
    ("design", "widest"),
    [
        (rounds_design(2), 0.7),
        (rounds_design(3), 0.15),
        (prompts_design(2, 3), 3.5),
        (prompts_design(4, 3), 0.5),
        (prompts_design(8, 3), 0.25),
        (tasks_design(10, 2, 3), 0.2),
        (tasks_design(10, 2, 1), 0.2),
        (shared_rounds_design(11, 2, 3), 0.3),
        (shared_rounds_design(6, 8, 3), 0.3),
    ],
    ids=["1x2", "1x3", "2x3", "4x3", "8x3", "10x2x3", "10x2x1", "11x2x3 shared", "6x8x3 shared"],
)
def test_the_interval_covers_the_truth_as_often_as_it_says(design: Draw, widest: float) -> None:
    """`widest` bounds the median half-width: an interval that is always right by being endless is of no use."""
    rng = random.Random(26)
    covered, widths = 0, []
    for _ in range(RUNS):
        estimate, true = design(rng)
        between = interval(estimate)
        assert between is not None
        covered += between[0] <= math.exp(true) <= between[1]
        widths.append(math.log(between[1] / between[0]) / 2)
    assert LEAST <= covered / RUNS <= MOST
    assert median(widths) < widest


def test_tasks_whose_prompts_differ_more_than_others_do_not_break_coverage() -> None:
    rng, covered = random.Random(3), 0
    spreads = [0.02 * 1.35**i for i in range(10)]
    for _ in range(RUNS):
        tasks = [[[math.exp(rng.gauss(0.0, spread))] for _ in range(2)] for spread in spreads]
        between = interval(over_tasks(tasks))
        assert between is not None
        covered += between[0] <= 1.0 <= between[1]
    assert covered / RUNS >= LEAST


@pytest.mark.parametrize("pairs", [[], [[1.2]]])
def test_one_measurement_has_no_interval(pairs: Pairs) -> None:
    assert over_prompts(pairs) is None and over_rounds(pairs) is None
    assert interval(None) is None and half_width(None) is None


def test_one_prompt_does_not_tell_what_other_prompts_would_give() -> None:
    assert over_prompts([[1.2, 1.3, 1.1]]) is None
    assert over_rounds([[1.2, 1.3, 1.1]]) is not None


def test_prompts_that_differ_widen_the_interval_over_prompts_alone() -> None:
    pairs = [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert half_width(over_rounds(pairs)) == pytest.approx(0.0)
    between = interval(over_prompts(pairs))
    assert between is not None and between[0] < 1.0 and between[1] > 3.0


def test_noise_that_all_prompts_share_widens_the_interval_over_prompts() -> None:
    factors = (1.0, 1.1, 0.9)
    between = interval(over_prompts([[2.0 * factor for factor in factors]] * 3))
    assert between is not None and between[0] < 1.8 < 2.2 < between[1]


def test_a_round_that_was_stopped_counts_for_no_prompt() -> None:
    whole, stopped = [[1.0, 1.1], [2.0, 2.2]], [[1.0, 1.1, 9.0], [2.0, 2.2]]
    assert over_rounds(stopped) == over_rounds(whole)


def test_a_mean_has_an_interval_only_where_all_its_parts_have() -> None:
    part = over_rounds([[1.0, 1.1]])
    assert mean_of([part, None]) is None and mean_of([]) is None and mean_of([part, part]) is not None


def test_equal_measurements_have_an_interval_of_no_width() -> None:
    part = over_rounds([[2.0, 2.0]])
    assert interval(mean_of([part, part])) == pytest.approx((2.0, 2.0))


def test_a_ratio_is_shown_with_its_interval() -> None:
    assert shown(1.234, (1.2, 1.27)) == "1.23 (1.20 to 1.27)"
    assert shown(1.234, None) == "1.23 (no interval)"
    assert shown(None, None) == "-" and shown(None, None, "too short") == "too short"
