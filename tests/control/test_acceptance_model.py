"""Acceptance rates are counted as output tokens resolve drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.control.acceptance_model import (
    BIN_MIDDLES,
    DEPTHS,
    FIRST_TOKEN,
    AcceptanceModel,
    AcceptanceRates,
    OpenDraft,
    cell,
    temperature_power,
)
from foretell.control.settings import ControllerTuning
from foretell.types import Budget, Draft, DrafterTraits

TUNING = ControllerTuning()
FREE, HEAD = DrafterTraits(is_free=True), DrafterTraits()


def follow(rates: AcceptanceRates, draft: Draft, *outputs: list[int], budget: Budget | None = None) -> OpenDraft:
    """Follow a draft that was made at the length of the first output, through states of the sequence."""
    found = OpenDraft(rates, draft, len(outputs[0]), budget)
    for tokens in outputs[1:]:
        found.follow(tokens)
    return found


def count(rates: AcceptanceRates, at: int, accepted: bool, times: int) -> None:
    for _ in range(times):
        rates.count(at, accepted)


def test_confidence_is_binned() -> None:
    assert [cell(value, 1) // DEPTHS for value in (0.0, 0.19, 0.2, 0.5, 0.94, 0.95, 1.0)] == [0, 0, 1, 2, 4, 5, 5]
    assert cell(None, 1) != cell(0.0, 1)
    assert cell(0.5, DEPTHS) == cell(0.5, 9) != cell(0.5, 2)


def test_a_chain_is_counted_up_to_its_first_wrong_token() -> None:
    rates = AcceptanceRates(FREE)
    draft = follow(rates, Draft.chain([5, 6, 9, 7], "a"), [1, 2], [1, 2, 5])
    assert (rates.trials[cell(None, 1)], rates.trials[cell(None, 2)]) == (1, 0), "the second is still open"
    assert draft.follow([1, 2, 5, 6]) and not draft.follow([1, 2, 5, 6, 8, 7])
    assert rates.accepted[cell(None, 2)] == 1
    assert (rates.trials[cell(None, 3)], rates.accepted[cell(None, 3)]) == (1, 0)
    assert rates.trials[cell(None, 4)] == 0


def test_every_branch_of_a_free_draft_is_counted() -> None:
    rates = AcceptanceRates(FREE)
    follow(rates, Draft((5, 6, 7, 8), (-1, -1, 1, 1), "t", confidence=(0.5, 0.3, 0.9, 0.1)), [1], [1, 6, 8])
    assert (rates.trials[cell(0.5, 1)], rates.accepted[cell(0.5, 1)]) == (1, 0)
    assert (rates.trials[cell(0.3, 1)], rates.accepted[cell(0.3, 1)]) == (1, 1)
    assert (rates.accepted[cell(0.9, 2)], rates.accepted[cell(0.1, 2)]) == (0, 1)


def test_requests_of_about_the_same_temperature_share_their_rates() -> None:
    model = AcceptanceModel({"a": FREE})
    count(model.rates("a", 0.9), FIRST_TOKEN, True, 300)
    assert model.rates("a", 1.3).rate(FIRST_TOKEN) > 0.9
    assert model.rates("a", 0.2) is model.rates("a", 0.8)
    for temperature in (0.0, 0.8):
        other = model.rates("a", temperature).rate(FIRST_TOKEN)
        assert other == pytest.approx(0.5 ** temperature_power(temperature)), "it starts from its prior"


def test_a_rate_is_the_mean_of_a_beta_posterior() -> None:
    rates = AcceptanceRates(replace(FREE, prior_acceptance=0.7), tuning=replace(TUNING, memory=1e12))
    for hit in (True, False, False, True, False, False, False):
        assert 0 < rates.rate(FIRST_TOKEN) < 1, "reading a rate does not freeze it"
        rates.count(FIRST_TOKEN, hit)
    assert rates.rate(FIRST_TOKEN) == pytest.approx((12 * 0.7 + 2) / (12 + 7))


def test_old_counts_decay() -> None:
    rates = AcceptanceRates(FREE)
    count(rates, FIRST_TOKEN, True, 1000)
    assert rates.rate(FIRST_TOKEN) > 0.9
    count(rates, FIRST_TOKEN, False, 300)
    assert rates.rate(FIRST_TOKEN) < 0.1


def test_a_timed_drafter_is_expected_to_be_good_until_it_was_tried() -> None:
    """Optimism by initial values: a drafter that is never used is never measured."""

    def prior(traits: DrafterTraits) -> float:
        return AcceptanceRates(traits).rate(FIRST_TOKEN)

    assert prior(replace(HEAD, prior_acceptance=0.3)) == pytest.approx(TUNING.optimistic_prior)
    assert prior(replace(HEAD, prior_acceptance=0.98)) == pytest.approx(0.98)
    measured = replace(HEAD, prior_acceptance=0.3, acceptance_by_depth=(0.3, 0.3))
    assert prior(measured) == pytest.approx(0.3)
    assert prior(replace(FREE, prior_acceptance=0.3)) == pytest.approx(0.3), (
        "its drafts are followed without being used"
    )
    rates = AcceptanceRates(HEAD)
    count(rates, FIRST_TOKEN, False, 60)
    assert rates.rate(FIRST_TOKEN) < 0.2


def test_a_depth_without_trials_takes_the_rate_of_the_one_before() -> None:
    rates = AcceptanceRates(FREE)
    count(rates, FIRST_TOKEN, True, 200)
    assert rates.rate(cell(None, 3)) > 0.9
    assert rates.rate(cell(0.97, 1)) > 0.95
    assert 0.3 < rates.rate(cell(0.3, 1)) < 0.6, "unless its drafter has low confidence"


def test_shipped_acceptance_by_depth_is_the_prior() -> None:
    known = (0.71, 0.75, 0.8, 0.83)
    rates = AcceptanceRates(DrafterTraits(prior_acceptance=0.71, acceptance_by_depth=known))
    assert [rates.rate(cell(None, depth)) for depth in (1, 2, 3, 4, 7)] == pytest.approx([*known, 0.83])
    count(rates, FIRST_TOKEN, False, 400)
    assert rates.rate(cell(None, 2)) < 0.1, "a head that fails at once is not believed at greater depths"


def test_acceptance_probabilities_multiply_along_a_branch() -> None:
    rates = AcceptanceRates(FREE)
    tree = Draft((1, 2, 3), (-1, 0, 0), "a")
    assert rates.draft_probs(tree, 9) == pytest.approx([0.5, 0.25, 0.25])
    assert rates.draft_probs(tree, 2) == pytest.approx([0.5, 0.25])
    confident = replace(Draft.chain([1, 2], "a"), confidence=(0.99, 0.99))
    prior = TUNING.confidence_trust * BIN_MIDDLES[-1] + (1 - TUNING.confidence_trust) * 0.5
    assert rates.draft_probs(confident, 9) == pytest.approx([prior, prior**2])
    assert rates.chain_probs(3) == pytest.approx([0.5, 0.25, 0.125])
    assert len(rates.chain_probs(16)) == 6, "the seventh token is too unlikely"


def test_the_prior_falls_with_temperature() -> None:
    model = AcceptanceModel({"head": replace(HEAD, acceptance_by_depth=(0.9,), prior_acceptance=0.9)})
    found = [model.rates("head", temperature).rate(FIRST_TOKEN) for temperature in (0.0, 0.7, 1.0)]
    assert found == sorted(found, reverse=True) and found[0] == pytest.approx(0.9) and found[-1] < 0.8
