"""Guesses are counted as the text finds them out."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from foretell.control.acceptance_model import (
    ALIKE,
    CELLS,
    DEPTHS,
    DRAFTER,
    HEATS,
    KIND,
    MIDDLES,
    REQUEST,
    TRUST,
    AcceptancePrior,
    AcceptanceRates,
    cell,
    mean_power,
)
from foretell.control.acceptance_tracker import Acceptance, Calibration, OpenDraft
from foretell.types import Budget, Draft


def test_confidence_falls_into_levels() -> None:
    assert [cell(value, 1) // DEPTHS for value in (0.0, 0.19, 0.2, 0.5, 0.94, 0.95, 1.0)] == [0, 0, 1, 2, 4, 5, 5]
    assert cell(None, 1) != cell(0.0, 1)
    assert cell(0.5, 3) == cell(0.5, 9) != cell(0.5, 2)


def test_a_chain_is_counted_up_to_its_first_wrong_guess_and_no_further() -> None:
    acceptance = Acceptance()
    ledger = acceptance.ledger(0, "greedy")
    acceptance.note(ledger, OpenDraft("a", Draft.chain([5, 6, 9, 7], "a"), 2))
    rates = acceptance.rates(ledger, "a")
    acceptance.learn(ledger, [1, 2, 5])
    assert (rates.tried[cell(None, 1)], rates.tried[cell(None, 2)]) == (1, 0), "the second is still open"
    acceptance.learn(ledger, [1, 2, 5, 6, 8, 7])
    assert rates.stood[cell(None, 2)] == 1
    assert (rates.tried[cell(None, 3)], rates.stood[cell(None, 3)]) == (1, 0)
    assert not ledger.open


def test_every_branch_of_a_tree_is_found_out() -> None:
    acceptance = Acceptance()
    ledger = acceptance.ledger(0, "greedy")
    tree = Draft((5, 6, 7, 8), (-1, -1, 1, 1), "t", confidence=(0.5, 0.3, 0.9, 0.1))
    acceptance.note(ledger, OpenDraft("t", tree, 1))
    acceptance.learn(ledger, [1, 6, 8])
    rates = acceptance.rates(ledger, "t")
    assert (rates.tried[cell(0.5, 1)], rates.stood[cell(0.5, 1)]) == (1, 0)
    assert (rates.tried[cell(0.3, 1)], rates.stood[cell(0.3, 1)]) == (1, 1)
    assert (rates.stood[cell(0.9, 2)], rates.stood[cell(0.1, 2)]) == (0, 1)


def taught(rates_of_requests: list[float], rng: random.Random) -> Acceptance:
    """Requests of one kind, one after another, in which first guesses stood so often."""
    acceptance = Acceptance()
    for request, rate in enumerate(rates_of_requests):
        rates = acceptance.rates(acceptance.ledger(request, "warm"), "a")
        for _ in range(30):
            rates.count(cell(None, 1), rng.random() < rate)
        acceptance.forget(request)
    return acceptance


def test_a_new_request_is_hoped_for_as_far_as_requests_differ() -> None:
    """Where some are good, what failed in others is tried anew in each; where all are alike it is not."""
    alike, apart = (taught(rates, random.Random(1)) for rates in ([0.25] * 60, [0.1, 0.4] * 30))
    mean = [each.rates(each.ledger(99, "warm"), "a").rate(cell(None, 1)) for each in (alike, apart)]
    assert mean == [pytest.approx(0.25, abs=0.06)] * 2
    hoped = [each.unseen(each.ledger(99, "warm"), "a", 1)[0] for each in (alike, apart)]
    assert hoped[0] < mean[0] + 0.06 and mean[1] + 0.1 < hoped[1] < mean[1] + 0.2
    rates = apart.rates(apart.ledger(99, "warm"), "a")
    for _ in range(8):
        rates.count(cell(None, 1), False)
    assert rates.hope(cell(None, 1)) == rates.rate(cell(None, 1)), "this one is known by now"


def test_a_request_starts_from_what_its_kind_has_taught() -> None:
    acceptance = Acceptance()
    for request in range(20):
        ledger = acceptance.ledger(request, "greedy")
        for place in range(10):
            acceptance.note(ledger, OpenDraft("a", Draft.chain([9], "a"), place))
            acceptance.learn(ledger, [9] * (place + 1))
        acceptance.forget(request)
    fresh = acceptance.unseen(acceptance.ledger(99, "greedy"), "a", 1)[0]
    bound = acceptance.unseen(acceptance.ledger(98, "greedy, grammar"), "a", 1)[0]
    assert 0.9 < fresh < 1, "nothing is hoped for beyond what was seen for long"
    assert bound > 0.9, "another kind that draws as freely starts from the drafter's own"
    drawn = acceptance.unseen(acceptance.ledger(96, "warm"), "a", 1, hopeful=False)
    assert drawn == [pytest.approx(1 / (1 + HEATS["warm"]))], "one that draws does not"
    assert acceptance.unseen(acceptance.ledger(97, "greedy"), "b", 1) == [1.0], "who was never tried is hoped for"
    assert acceptance.unseen(acceptance.ledger(97, "greedy"), "b", 1, hopeful=False) == [0.5]
    assert Acceptance({"b": AcceptancePrior(0.9)}).first_rate("b", "greedy") == 0.9
    assert 0.9 ** HEATS["warm"] < Acceptance({"b": AcceptancePrior(0.9)}).first_rate("b", "warm") < 0.9


@pytest.mark.parametrize("mean", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("power", HEATS.values())
def test_of_a_drafter_that_may_be_good_or_bad_the_mean_is_believed(mean: float, power: float) -> None:
    chances = np.random.default_rng(0).beta(2 * mean, 2 * (1 - mean), 200_000)
    assert mean_power(mean, power) == pytest.approx((chances**power).mean(), rel=0.02)
    assert mean_power(mean, power) >= mean**power
    assert 0 <= mean_power(0.0, power) < 0.01 and 0.99 < mean_power(1.0, power) <= 1


def test_hope_goes_as_tries_come() -> None:
    rates = AcceptanceRates(AcceptanceRates(None, KIND), REQUEST)
    hopes = []
    for tries in range(200):
        rates.count(cell(None, 1), tries % 5 == 0)
        hopes.append(rates.hope(cell(None, 1)) - rates.rate(cell(None, 1)))
    assert hopes[0] > 0.3 > 0.1 > hopes[30] > hopes[-1]


def by_definition(rates: AcceptanceRates, at: int, tried: float = 0.0, stood: float = 0.0) -> float:
    """What is above tells what is not known here; `tried` and `stood` were counted below and must not count twice."""
    mine, right = rates.tried[at], rates.stood[at]
    prior = rates._alike(at) if rates.above is None else by_definition(rates.above, at, mine, right)
    mine, right = max(mine - tried, 0.0), max(right - stood, 0.0)
    return (rates.weight * prior + min(right, mine)) / (rates.weight + mine)


def test_a_rate_is_made_of_all_that_was_counted_above_it() -> None:
    rng = random.Random(0)
    top = AcceptanceRates(None, DRAFTER, AcceptancePrior(0.7, TRUST, 1.5))
    kinds = [AcceptanceRates(top, KIND) for _ in range(2)]
    requests = [AcceptanceRates(kind, REQUEST) for kind in kinds for _ in range(3)]
    for _ in range(300):
        rng.choice(requests).count(cell(None, rng.randrange(1, 4)), rng.random() < 0.6, cell(rng.random(), 1))
        some = rng.choice([top, *kinds, *requests])
        at = rng.randrange(CELLS)
        assert some.rate(at) == by_definition(some, at)


def test_a_depth_never_tried_is_believed_like_the_one_before() -> None:
    rates = AcceptanceRates(None, (0.999, 2.0))
    for _ in range(50):
        rates.count(cell(None, 1), True)
    assert rates.rate(cell(None, 3)) > 0.9
    assert rates.rate(cell(0.97, 1)) > 0.95
    assert 0.3 < rates.rate(cell(0.3, 1)) < 0.6, "unless its drafter is less sure itself"


def test_survival_multiplies_along_a_branch() -> None:
    acceptance = Acceptance()
    ledger = acceptance.ledger(0, "greedy")
    found = acceptance.survival(ledger, "a", Draft((1, 2, 3), (-1, 0, 0), "a"))
    assert found == pytest.approx([0.5, 0.25, 0.25])
    sure = replace(Draft.chain([1, 2], "a"), confidence=(0.99, 0.99))
    believed = TRUST * MIDDLES[-1] + (1 - TRUST) * 0.5
    assert acceptance.survival(ledger, "a", sure) == pytest.approx([believed, believed**2])


def test_luck_that_runs_out_when_counted_on_is_noticed() -> None:
    honesty = Calibration()
    for _ in range(300):
        honesty.count(1.0, 0)
    assert honesty.factor < 0.2
    lucky = Calibration()
    for _ in range(300):
        lucky.count(0.5, 2)
    assert lucky.factor == 1.0


def test_who_is_asked_where_others_are_sure_is_not_judged_by_places_where_they_are_not() -> None:
    """A drafter that takes time is used where free ones have nothing, which is where guessing is hard."""
    acceptance = Acceptance({"head": AcceptancePrior(0.6, ALIKE)})
    ledger, budget = acceptance.ledger(0, "greedy"), Budget(1, "head")
    for place in range(1, 60):
        acceptance.note(ledger, OpenDraft("head", Draft.chain([9], "head"), place, budget=budget, beside=0.0))
        acceptance.learn(ledger, [1] * (place + 1))
    alone, beside = (acceptance.unseen(ledger, "head", 1, hopeful=False, beside=sure)[0] for sure in (0.0, 0.9))
    assert alone < 0.1 < beside


def test_what_is_drawn_is_believed_to_stand_less_often() -> None:
    acceptance = Acceptance({"head": AcceptancePrior(0.6)})
    found = [acceptance.unseen(acceptance.ledger(i, kind), "head", 1, hopeful=False)[0] for i, kind in enumerate(HEATS)]
    assert found[0] == 0.6 and found == sorted(found, reverse=True) and found[-1] < 0.4
