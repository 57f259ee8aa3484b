"""Distributions of a float32 softmax never give a NaN or an impossible token."""

from __future__ import annotations

import pytest
import torch

from foretell.types import Draft
from foretell.verify.randomness import StepRandom, enumerate_outcomes
from foretell.verify.rejection import acceptance_ratio
from foretell.verify.rules import EXACT, Rule

rules = pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)


def test_a_token_of_draft_probability_0_is_decided_by_the_target_alone() -> None:
    assert acceptance_ratio(0.3, 0.0) == 1
    assert acceptance_ratio(0.0, 0.0) == 0
    assert acceptance_ratio(1.0, 5e-324) < float("inf")


@rules
def test_underflow_in_the_draft_gives_no_nan(rule: Rule) -> None:
    target = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.2, 0.6]])
    draft_probs = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1e-45, 1.0]])
    outcomes = enumerate_outcomes(lambda random: rule(Draft.chain((0, 1), probs=draft_probs), target, random))
    assert sum(probability for probability, _ in outcomes) == pytest.approx(1)
    assert {result.accepted_path for _, result in outcomes} == {(0,)}


@rules
@pytest.mark.parametrize("seed", range(20))
def test_equal_distributions_in_single_precision_accept_the_whole_draft(rule: Rule, seed: int) -> None:
    torch.manual_seed(seed)
    probs = torch.randn(5, 300).softmax(-1)
    tokens = tuple(int(row.multinomial(1)) for row in probs[:4])
    result = rule(Draft.chain(tokens, probs=probs[:4]), probs, StepRandom(seed, 7))
    assert result.accepted_path == (0, 1, 2, 3)


@rules
def test_a_zero_residual_falls_back_to_the_target(rule: Rule) -> None:
    """Rounding can leave q above p at every token; a rejection then has a probability of about 1e-7."""
    target = torch.tensor([[0.5, 0.4999999]])
    draft = Draft((0, 1), (-1, -1), "", (True, True), None, torch.tensor([[0.5000001, 0.5]] * 2))
    outcomes = enumerate_outcomes(lambda random: rule(draft, torch.cat([target] * 3), random))
    assert sum(probability for probability, _ in outcomes) == pytest.approx(1)


@rules
def test_a_draft_token_of_target_probability_0_is_never_emitted(rule: Rule) -> None:
    target, draft_probs = torch.tensor([[0.0, 0.7, 0.3]] * 3), torch.tensor([[0.9, 0.1, 0.0]] * 2)
    for draft in (Draft.chain((0, 0), probs=draft_probs), Draft.chain((0, 1))):
        for _, result in enumerate_outcomes(lambda random, draft=draft: rule(draft, target, random)):
            assert result.accepted_path == ()
            assert result.next_token != 0


@rules
def test_verification_does_not_modify_its_inputs(rule: Rule) -> None:
    target, draft_probs = torch.rand(3, 4).double().softmax(-1), torch.rand(2, 4).double().softmax(-1)
    before = target.clone(), draft_probs.clone()
    rule(Draft.chain((3, 3), probs=draft_probs), target, StepRandom(1, 1))
    assert target.equal(before[0])
    assert draft_probs.equal(before[1])
