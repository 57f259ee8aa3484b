"""Distributions as they come out of a float32 softmax: nothing may turn into a NaN or an impossible token."""

from __future__ import annotations

import pytest
import torch

from foretell.types import Draft
from foretell.verify.randomness import StepRandom, enumerate_chance
from foretell.verify.rejection import ratio
from foretell.verify.rules import EXACT, Rule

rules = pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)


def test_a_token_the_drafter_gave_0_is_judged_by_the_target_alone() -> None:
    assert ratio(0.3, 0.0) == 1
    assert ratio(0.0, 0.0) == 0
    assert ratio(1.0, 5e-324) < float("inf")


@rules
def test_underflow_in_the_draft_makes_no_nan(rule: Rule) -> None:
    target = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.2, 0.6]])
    guess = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1e-45, 1.0]])
    outcomes = enumerate_chance(lambda chance: rule(Draft.chain((0, 1), probs=guess), target, chance))
    assert sum(probability for probability, _ in outcomes) == pytest.approx(1)
    assert {verdict.accepted_path for _, verdict in outcomes} == {(0,)}


@rules
@pytest.mark.parametrize("seed", range(20))
def test_equal_distributions_in_single_precision_are_accepted_whole(rule: Rule, seed: int) -> None:
    torch.manual_seed(seed)
    probs = torch.randn(5, 300).softmax(-1)
    tokens = tuple(int(row.multinomial(1)) for row in probs[:4])
    verdict = rule(Draft.chain(tokens, probs=probs[:4]), probs, StepRandom(seed, 7))
    assert verdict.accepted_path == (0, 1, 2, 3)


@rules
def test_a_residual_of_nothing_falls_back_to_the_target(rule: Rule) -> None:
    """Rounding can leave the draft above the target at every token; the coin then falls once in ten million times."""
    target = torch.tensor([[0.5, 0.4999999]])
    draft = Draft((0, 1), (-1, -1), "", (True, True), None, torch.tensor([[0.5000001, 0.5]] * 2))
    outcomes = enumerate_chance(lambda chance: rule(draft, torch.cat([target] * 3), chance))
    assert sum(probability for probability, _ in outcomes) == pytest.approx(1)


@rules
def test_a_target_that_cannot_say_the_guess_never_does(rule: Rule) -> None:
    target, guess = torch.tensor([[0.0, 0.7, 0.3]] * 3), torch.tensor([[0.9, 0.1, 0.0]] * 2)
    for draft in (Draft.chain((0, 0), probs=guess), Draft.chain((0, 1))):
        for _, verdict in enumerate_chance(lambda chance, draft=draft: rule(draft, target, chance)):
            assert verdict.accepted_path == ()
            assert verdict.next_token != 0


@rules
def test_inputs_stay_as_they_were(rule: Rule) -> None:
    target, guess = torch.rand(3, 4).double().softmax(-1), torch.rand(2, 4).double().softmax(-1)
    before = target.clone(), guess.clone()
    rule(Draft.chain((3, 3), probs=guess), target, StepRandom(1, 1))
    assert target.equal(before[0])
    assert guess.equal(before[1])
