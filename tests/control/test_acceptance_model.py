"""Acceptance rates are counted as output tokens resolve drafts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from foretell.control.acceptance_model import (
    BIN_MIDDLES,
    DEPTHS,
    FIRST_TOKEN,
    TEMPERATURE_POWERS,
    AcceptanceModel,
    ClassRates,
    OpenDraft,
    RequestAcceptance,
    cell,
    mean_power,
)
from foretell.control.settings import ControllerTuning
from foretell.types import Budget, Draft, DrafterTraits

TUNING = ControllerTuning()
FREE, HEAD = DrafterTraits(is_free=True), DrafterTraits()


def request_of(traits: dict[str, DrafterTraits], request_class: str = "greedy") -> RequestAcceptance:
    """Return the first request of a new model."""
    return AcceptanceModel(traits).request(request_class, traits)


def follow(request: RequestAcceptance, name: str, draft: Draft, *outputs: list[int], **options: object) -> ClassRates:
    """Follow a draft that was made at the length of the first output, through states of the sequence."""
    request.open.append(OpenDraft(request.rates[name], draft, len(outputs[0]), **options))  # type: ignore[arg-type]
    for tokens in outputs[1:]:
        request.resolve(tokens)
    return request.rates[name].group


def test_confidence_is_binned() -> None:
    assert [cell(value, 1) // DEPTHS for value in (0.0, 0.19, 0.2, 0.5, 0.94, 0.95, 1.0)] == [0, 0, 1, 2, 4, 5, 5]
    assert cell(None, 1) != cell(0.0, 1)
    assert cell(0.5, DEPTHS) == cell(0.5, 9) != cell(0.5, 2)


def test_a_chain_is_counted_up_to_its_first_wrong_token() -> None:
    request = request_of({"a": FREE})
    group = follow(request, "a", Draft.chain([5, 6, 9, 7], "a"), [1, 2], [1, 2, 5])
    assert (group.trials[cell(None, 1)], group.trials[cell(None, 2)]) == (1, 0), "the second is still open"
    request.resolve([1, 2, 5, 6, 8, 7])
    assert group.accepted[cell(None, 2)] == 1
    assert (group.trials[cell(None, 3)], group.accepted[cell(None, 3)]) == (1, 0)
    assert not request.open


def test_every_branch_of_a_tree_is_counted() -> None:
    tree = Draft((5, 6, 7, 8), (-1, -1, 1, 1), "t", confidence=(0.5, 0.3, 0.9, 0.1))
    group = follow(request_of({"t": FREE}), "t", tree, [1], [1, 6, 8])
    assert (group.trials[cell(0.5, 1)], group.accepted[cell(0.5, 1)]) == (1, 0)
    assert (group.trials[cell(0.3, 1)], group.accepted[cell(0.3, 1)]) == (1, 1)
    assert (group.accepted[cell(0.9, 2)], group.accepted[cell(0.1, 2)]) == (0, 1)


def test_a_request_starts_from_the_rates_of_its_class() -> None:
    model, rng = AcceptanceModel({"a": FREE}), random.Random(1)
    for _ in range(20):
        rates = model.request("greedy", "a").rates["a"]
        for _ in range(30):
            rates.count(cell(None, 1), rng.random() < 0.9)
    assert model.request("greedy", "a").rates["a"].rate(cell(None, 1)) == pytest.approx(0.9, abs=0.05)
    other = model.request("high", "a").rates["a"].rate(cell(None, 1))
    assert other == pytest.approx(1 / (1 + TEMPERATURE_POWERS["high"])), "another temperature starts from its prior"


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_a_request_shifts_the_odds_of_its_class(rate: float) -> None:
    """What it shows at one confidence applies to all of them, and other requests hardly change."""
    model, rng = AcceptanceModel({"a": FREE}), random.Random(2)
    for _ in range(40):
        rates = model.request("greedy", "a").rates["a"]
        for _ in range(20):
            rates.count(cell(None, 1), rng.random() < 0.5, cell(0.5, 1))
    own, other = (model.request("greedy", "a").rates["a"] for _ in range(2))
    before = own.rate(cell(0.9, 2))
    for _ in range(60):
        own.count(cell(None, 1), rng.random() < rate, cell(0.5, 1))
    assert own.rate(cell(0.5, 1)) == pytest.approx(rate, abs=0.15)
    assert (own.rate(cell(0.9, 2)) - before) * (rate - 0.5) > 0
    assert other.rate(cell(0.5, 1)) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("every", [2, 5])
def test_a_request_that_is_like_its_class_keeps_its_odds(every: int) -> None:
    rates = request_of({"a": FREE}).rates["a"]
    for trial in range(900):
        rates.count(cell(None, 1), trial % every == 0)
    assert rates.odds == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("mean", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("power", TEMPERATURE_POWERS.values())
def test_the_prior_is_the_mean_over_a_beta_distribution(mean: float, power: float) -> None:
    samples = np.random.default_rng(0).beta(2 * mean, 2 * (1 - mean), 200_000)
    assert mean_power(mean, power) == pytest.approx((samples**power).mean(), rel=0.02)
    assert mean_power(mean, power) >= mean**power - 1e-9
    assert 0 <= mean_power(0.0, power) < 0.01 and 0.99 < mean_power(1.0, power) <= 1


def test_the_optimism_bonus_fades_with_the_trials_of_its_depth() -> None:
    request = request_of({"a": HEAD})
    group, bonus = request.rates["a"].group, []
    for trial in range(200):
        request.rates["a"].count(cell(None, 1), trial % 5 == 0)
        bonus.append(group.bonus(group.rate(FIRST_TOKEN), 1))
    assert bonus[0] > 0.2 > 0.1 > bonus[30] > bonus[-1] == 0
    assert group.bonus(0.5, 2) == 0.5, "nothing was counted there"


def test_a_rate_is_the_mean_of_a_beta_posterior() -> None:
    rng = random.Random(0)
    group = ClassRates(replace(FREE, prior_acceptance=0.7), tuning=replace(TUNING, class_memory=1e12))
    hits = [rng.random() < 0.4 for _ in range(300)]
    for hit in hits:
        group.count(cell(None, 1), hit)
    group.known_rates.clear()
    assert group.rate(cell(None, 1)) == pytest.approx((12 * 0.7 + sum(hits)) / (12 + 300))


def test_a_depth_without_trials_takes_the_rate_of_the_one_before() -> None:
    group = ClassRates(FREE)
    for _ in range(200):
        group.count(cell(None, 1), True)
    assert group.rate(cell(None, 3)) > 0.9
    assert group.rate(cell(0.97, 1)) > 0.95
    assert 0.3 < group.rate(cell(0.3, 1)) < 0.6, "unless its drafter has low confidence"


def test_shipped_acceptance_by_depth_is_the_prior() -> None:
    known = (0.71, 0.75, 0.8, 0.83)
    group = ClassRates(DrafterTraits(prior_acceptance=0.71, acceptance_by_depth=known))
    assert [group.rate(cell(None, depth)) for depth in (1, 2, 3, 4, 7)] == pytest.approx([*known, 0.83])
    for _ in range(400):
        group.count(cell(None, 1), False)
    assert group.rate(cell(None, 2)) < 0.1, "a head that fails at once is not believed at greater depths"


def test_acceptance_probabilities_multiply_along_a_branch() -> None:
    request = request_of({"a": FREE})
    assert request.free_probs("a", Draft((1, 2, 3), (-1, 0, 0), "a")) == pytest.approx([0.5, 0.25, 0.25])
    confident = replace(Draft.chain([1, 2], "a"), confidence=(0.99, 0.99))
    prior = TUNING.confidence_trust * BIN_MIDDLES[-1] + (1 - TUNING.confidence_trust) * 0.5
    assert request.free_probs("a", confident) == pytest.approx([prior, prior**2])
    chain = request.chain_probs("a", 3, optimistic=False)
    assert chain == pytest.approx([0.5, 0.25, 0.125])


def test_a_timed_drafter_is_rated_by_the_confidence_of_free_drafts() -> None:
    """A timed drafter is used where free drafters have no draft, which is where drafting is hard."""
    request, budget = request_of({"head": replace(HEAD, prior_acceptance=0.6)}), Budget(1, "head")
    for length in range(1, 60):
        output = [1] * length
        follow(request, "head", Draft.chain([9], "head"), output, [*output, 1], budget=budget, free_confidence=0.0)
    group = request.rates["head"].group
    assert group.rate(cell(0.0, 1)) < 0.15 < group.rate(cell(0.9, 1))


def test_the_prior_falls_with_temperature() -> None:
    model = AcceptanceModel({"head": replace(HEAD, prior_acceptance=0.6)})
    found = [model.class_rates("head", name).rate(FIRST_TOKEN) for name in TEMPERATURE_POWERS]
    assert found[0] == 0.6 and found == sorted(found, reverse=True) and found[-1] < 0.4
