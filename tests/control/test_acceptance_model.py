"""Acceptance rates are counted as output tokens resolve drafts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from foretell.control.acceptance_model import (
    BIN_MIDDLES,
    CELLS,
    DEPTHS,
    TEMPERATURE_POWERS,
    AcceptanceCalibration,
    AcceptanceModel,
    AcceptancePrior,
    AcceptanceRates,
    RequestAcceptance,
    cell,
    mean_power,
)
from foretell.control.acceptance_tracker import AcceptanceTracker, OpenDraft
from foretell.control.settings import AcceptanceTuning, CountDecay
from foretell.types import Budget, Draft

TUNING = AcceptanceTuning()


class Tracked:
    """An acceptance model with a tracker and one request."""

    def __init__(self, priors: dict[str, AcceptancePrior] | None = None, request_class: str = "greedy") -> None:
        self.model = AcceptanceModel(priors)
        self.tracker = AcceptanceTracker(self.model, lambda drafter: True)
        self.request: RequestAcceptance = self.model.request(0, request_class)

    def resolve(self, draft: OpenDraft, *outputs: list[int]) -> AcceptanceRates:
        """Follow a draft through one or more states of the sequence."""
        self.tracker.add_draft(0, draft)
        for tokens in outputs:
            self.tracker.resolve(0, self.request, tokens)
        return self.model.rates(self.request, draft.drafter)


def test_confidence_is_binned() -> None:
    assert [cell(value, 1) // DEPTHS for value in (0.0, 0.19, 0.2, 0.5, 0.94, 0.95, 1.0)] == [0, 0, 1, 2, 4, 5, 5]
    assert cell(None, 1) != cell(0.0, 1)
    assert cell(0.5, 3) == cell(0.5, 9) != cell(0.5, 2)


def test_a_chain_is_counted_up_to_its_first_wrong_token() -> None:
    tracked = Tracked()
    rates = tracked.resolve(OpenDraft("a", Draft.chain([5, 6, 9, 7], "a"), 2), [1, 2, 5])
    assert (rates.trials[cell(None, 1)], rates.trials[cell(None, 2)]) == (1, 0), "the second is still open"
    tracked.tracker.resolve(0, tracked.request, [1, 2, 5, 6, 8, 7])
    assert rates.accepted[cell(None, 2)] == 1
    assert (rates.trials[cell(None, 3)], rates.accepted[cell(None, 3)]) == (1, 0)
    assert not tracked.tracker._open[0]


def test_every_branch_of_a_tree_is_counted() -> None:
    tree = Draft((5, 6, 7, 8), (-1, -1, 1, 1), "t", confidence=(0.5, 0.3, 0.9, 0.1))
    rates = Tracked().resolve(OpenDraft("t", tree, 1), [1, 6, 8])
    assert (rates.trials[cell(0.5, 1)], rates.accepted[cell(0.5, 1)]) == (1, 0)
    assert (rates.trials[cell(0.3, 1)], rates.accepted[cell(0.3, 1)]) == (1, 1)
    assert (rates.accepted[cell(0.9, 2)], rates.accepted[cell(0.1, 2)]) == (0, 1)


def trained(rates_of_requests: list[float], rng: random.Random) -> AcceptanceModel:
    """Return a model after requests of one class with these acceptance rates of first tokens."""
    model = AcceptanceModel()
    for request, rate in enumerate(rates_of_requests):
        rates = model.rates(model.request(request, "high"), "a")
        for _ in range(30):
            rates.count(cell(None, 1), rng.random() < rate)
        model.forget(request)
    return model


def test_a_new_request_gets_a_bonus_as_far_as_requests_differ() -> None:
    """If some requests are good, a drafter that failed in others is tried in each; if all are alike it is not."""
    alike, apart = (trained(rates, random.Random(1)) for rates in ([0.25] * 60, [0.1, 0.4] * 30))
    mean = [each.rates(each.request(99, "high"), "a").rate(cell(None, 1)) for each in (alike, apart)]
    assert mean == [pytest.approx(0.25, abs=0.06)] * 2
    optimistic = [each.expected_accept_probs(each.request(99, "high"), "a", 1)[0] for each in (alike, apart)]
    assert optimistic[0] < mean[0] + 0.06 and mean[1] + 0.1 < optimistic[1] < mean[1] + 0.2
    rates = apart.rates(apart.request(99, "high"), "a")
    for _ in range(8):
        rates.count(cell(None, 1), False)
    assert rates.optimistic_rate(cell(None, 1)) == rates.rate(cell(None, 1)), "this one is known by now"


def test_a_request_starts_from_the_rates_of_its_class() -> None:
    model = AcceptanceModel()
    tracker = AcceptanceTracker(model, lambda drafter: True)
    for number in range(20):
        request = model.request(number, "greedy")
        for position in range(10):
            tracker.add_draft(number, OpenDraft("a", Draft.chain([9], "a"), position))
            tracker.resolve(number, request, [9] * (position + 1))
        model.forget(number)
    new = model.expected_accept_probs(model.request(99, "greedy"), "a", 1)[0]
    with_grammar = model.expected_accept_probs(model.request(98, "greedy, grammar"), "a", 1)[0]
    assert 0.9 < new < 1, "no bonus beyond what was seen for long"
    assert with_grammar > 0.9, "another class of the same temperature starts from the drafter's rates"
    sampled = model.expected_accept_probs(model.request(96, "high"), "a", 1, optimistic=False)
    assert sampled == [pytest.approx(1 / (1 + TEMPERATURE_POWERS["high"]))], "another temperature does not"
    unknown = model.request(97, "greedy")
    assert model.expected_accept_probs(unknown, "b", 1) == [1.0], "a drafter without trials gets the full bonus"
    assert model.expected_accept_probs(unknown, "b", 1, optimistic=False) == [0.5]
    assert AcceptanceModel({"b": AcceptancePrior(0.9)}).first_rate("b", "greedy") == 0.9
    high = AcceptanceModel({"b": AcceptancePrior(0.9)}).first_rate("b", "high")
    assert 0.9 ** TEMPERATURE_POWERS["high"] < high < 0.9


@pytest.mark.parametrize("mean", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("power", TEMPERATURE_POWERS.values())
def test_the_prior_is_the_mean_over_a_beta_distribution(mean: float, power: float) -> None:
    samples = np.random.default_rng(0).beta(2 * mean, 2 * (1 - mean), 200_000)
    assert mean_power(mean, power) == pytest.approx((samples**power).mean(), rel=0.02)
    assert mean_power(mean, power) >= mean**power
    assert 0 <= mean_power(0.0, power) < 0.01 and 0.99 < mean_power(1.0, power) <= 1


def test_the_optimism_bonus_fades_with_trials() -> None:
    rates = AcceptanceRates(AcceptanceRates(None, TUNING.request_class), TUNING.request)
    bonus = []
    for trial in range(200):
        rates.count(cell(None, 1), trial % 5 == 0)
        bonus.append(rates.optimistic_rate(cell(None, 1)) - rates.rate(cell(None, 1)))
    assert bonus[0] > 0.3 > 0.1 > bonus[30] > bonus[-1]


def by_definition(rates: AcceptanceRates, at: int, child_trials: float = 0.0, child_accepted: float = 0.0) -> float:
    """Return the rate by recursion: the parent's rate is the prior mean, and a child's counts do not count twice."""
    trials, accepted = rates.trials[at], rates.accepted[at]
    prior = rates._prior_rate(at) if rates.parent is None else by_definition(rates.parent, at, trials, accepted)
    trials, accepted = max(trials - child_trials, 0.0), max(accepted - child_accepted, 0.0)
    return (rates.prior_weight * prior + min(accepted, trials)) / (rates.prior_weight + trials)


def test_a_rate_combines_all_levels_by_shrinkage() -> None:
    rng = random.Random(0)
    top = AcceptanceRates(None, TUNING.drafter, AcceptancePrior(0.7, TUNING.confidence_trust, 1.5))
    classes = [AcceptanceRates(top, TUNING.request_class) for _ in range(2)]
    requests = [AcceptanceRates(parent, TUNING.request) for parent in classes for _ in range(3)]
    for _ in range(300):
        rng.choice(requests).count(cell(None, rng.randrange(1, 4)), rng.random() < 0.6, cell(rng.random(), 1))
        some = rng.choice([top, *classes, *requests])
        at = rng.randrange(CELLS)
        assert some.rate(at) == by_definition(some, at)


def test_a_depth_without_trials_takes_the_rate_of_the_one_before() -> None:
    rates = AcceptanceRates(None, CountDecay(0.999, 2.0))
    for _ in range(50):
        rates.count(cell(None, 1), True)
    assert rates.rate(cell(None, 3)) > 0.9
    assert rates.rate(cell(0.97, 1)) > 0.95
    assert 0.3 < rates.rate(cell(0.3, 1)) < 0.6, "unless its drafter has low confidence"


def test_acceptance_probabilities_multiply_along_a_branch() -> None:
    model = AcceptanceModel()
    request = model.request(0, "greedy")
    assert model.accept_probs(request, "a", Draft((1, 2, 3), (-1, 0, 0), "a")) == pytest.approx([0.5, 0.25, 0.25])
    confident = replace(Draft.chain([1, 2], "a"), confidence=(0.99, 0.99))
    prior = TUNING.confidence_trust * BIN_MIDDLES[-1] + (1 - TUNING.confidence_trust) * 0.5
    assert model.accept_probs(request, "a", confident) == pytest.approx([prior, prior**2])


def test_calibration_falls_if_fewer_tokens_are_accepted_than_expected() -> None:
    optimistic = AcceptanceCalibration()
    for _ in range(300):
        optimistic.count(1.0, 0)
    assert optimistic.factor < 0.2
    pessimistic = AcceptanceCalibration()
    for _ in range(300):
        pessimistic.count(0.5, 2)
    assert pessimistic.factor == 1.0


def test_a_timed_drafter_is_rated_by_the_confidence_of_free_drafts() -> None:
    """A timed drafter is used where free drafters have no draft, which is where drafting is hard."""
    tracked, budget = Tracked({"head": AcceptancePrior(0.6, TUNING.cross_trust)}), Budget(1, "head")
    for position in range(1, 60):
        draft = OpenDraft("head", Draft.chain([9], "head"), position, budget=budget, free_confidence=0.0)
        tracked.resolve(draft, [1] * (position + 1))
    without, confident = (
        tracked.model.expected_accept_probs(tracked.request, "head", 1, optimistic=False, free_confidence=value)[0]
        for value in (0.0, 0.9)
    )
    assert without < 0.1 < confident


def test_the_prior_falls_with_temperature() -> None:
    model = AcceptanceModel({"head": AcceptancePrior(0.6)})
    found = [
        model.expected_accept_probs(model.request(i, name), "head", 1, optimistic=False)[0]
        for i, name in enumerate(TEMPERATURE_POWERS)
    ]
    assert found[0] == 0.6 and found == sorted(found, reverse=True) and found[-1] < 0.4
