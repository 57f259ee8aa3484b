"""Ratios and how sure they are."""

from __future__ import annotations

import random

import pytest

from foretell.bench.intervals import half_width, interval, mean_of, ratio_of, redraw, shown


def test_a_bad_moment_does_not_move_the_ratio() -> None:
    assert ratio_of([[2.0, 2.0, 0.01]]) == pytest.approx(2.0)


def test_texts_count_as_ratios_do_twice_as_fast_makes_up_for_half() -> None:
    assert ratio_of([[2.0], [0.5]]) == pytest.approx(1.0)


def test_the_same_seed_draws_the_same() -> None:
    pairs = [[1.0, 1.2, 1.1], [2.0, 1.9, 2.3]]
    assert redraw(pairs, "one", texts=True) == redraw(pairs, "one", texts=True)
    assert redraw(pairs, "one", texts=True) != redraw(pairs, "two", texts=True)


def test_texts_that_differ_widen_the_interval_and_not_the_noise() -> None:
    pairs = [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert half_width(redraw(pairs, "", texts=False)) == pytest.approx(0.0)
    low, high = interval(redraw(pairs, "", texts=True))
    assert low < 1.4 < ratio_of(pairs) < 2.4 < high


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(5)
    covered = 0
    for run in range(60):
        pairs = [[rng.lognormvariate(0.0, 0.2)] for _ in range(16)]  # the true ratio is 1
        low, high = interval(redraw(pairs, str(run), texts=True))
        covered += low <= 1.0 <= high
    assert 0.83 <= covered / 60 < 1


def test_more_of_the_same_narrows_the_interval() -> None:
    rng = random.Random(7)
    pairs = [[rng.lognormvariate(0.0, 0.3)] for _ in range(64)]
    assert half_width(redraw(pairs, "", texts=True)) < 0.6 * half_width(redraw(pairs[:12], "", texts=True))


def test_the_mean_of_many_is_surer_than_each() -> None:
    rng = random.Random(9)
    draws = [redraw([[rng.lognormvariate(0.0, 0.3)] for _ in range(8)], str(i), texts=True) for i in range(9)]
    widths = [half_width(each) for each in draws]
    assert half_width(mean_of(draws)) < 0.5 * sum(widths) / len(widths)


def test_a_ratio_is_shown_with_how_sure_it_is() -> None:
    assert shown(1.234, (1.2, 1.27)) == "1.23 (1.20 to 1.27)"
    assert shown(1.234, None) == "1.23"
    assert shown(None, None) == "-" and shown(None, None, "too short") == "too short"
