"""Lossy rules accept what their definitions say and are used only by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretell.certify.toy import (
    Context,
    ToyDrafter,
    ToyLanguage,
    bias,
    chain,
    mixed_chain,
    output_distribution,
    target_distribution,
    top_tree,
    total_variation,
    toy_language,
    tree,
)
from foretell.errors import RequestError
from foretell.types import Draft, VerifyResult
from foretell.verify.lossy import ThresholdSettings, confidence, ensemble, typical
from foretell.verify.randomness import enumerate_outcomes
from foretell.verify.rules import EXACT, LOSSLESS, LOSSY, find_rule

TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.2, 0.2, 0.6]])


def confident(tokens: tuple[int, ...], confidence: tuple[float, ...], parents: tuple[int, ...] | None = None) -> Draft:
    return Draft(tokens, parents or tuple(range(-1, len(tokens) - 1)), "", None, confidence)


def paths(
    rule: Callable[..., VerifyResult], draft: Draft, probs: Tensor = TARGET, **settings: float
) -> dict[tuple[tuple[int, ...], int], float]:
    chosen = ThresholdSettings(**settings)
    outcomes = enumerate_outcomes(lambda random: rule(draft, probs, random, settings=chosen))
    return {(result.accepted_path, result.next_token): probability for probability, result in outcomes}


def accepted(
    rule: Callable[..., VerifyResult], draft: Draft, probs: Tensor = TARGET, **settings: float
) -> tuple[int, ...]:
    (path,) = {path for path, _ in paths(rule, draft, probs, **settings)}
    return path


def test_confidence_accepts_above_upper_rejects_below_lower_and_between_asks_the_target() -> None:
    assert accepted(confidence, confident((2,), (0.92,))) == (0,), "although it is not the argmax"
    assert accepted(confidence, confident((0,), (0.55,))) == (0,)
    assert accepted(confidence, confident((1,), (0.55,))) == ()
    assert accepted(confidence, confident((0,), (0.15,))) == (), "although it is the argmax"


def test_thresholds_are_inclusive() -> None:
    assert accepted(confidence, confident((1,), (0.9,))) == (0,)
    assert accepted(confidence, confident((0,), (0.2,))) == (0,)
    assert accepted(confidence, confident((1,), (0.6,)), upper=0.6) == (0,)
    assert accepted(confidence, confident((0,), (0.6,)), lower=0.7) == ()


def test_after_a_rejection_the_token_is_sampled_from_the_target() -> None:
    for rule, draft in ((confidence, confident((0,), (0.1,))), (typical, Draft.chain((2,)))):
        probs = torch.tensor([[0.6, 0.36, 0.04], [1.0, 0.0, 0.0]])
        assert paths(rule, draft, probs) == pytest.approx({((), 0): 0.6, ((), 1): 0.36, ((), 2): 0.04}, abs=1e-6)


def test_the_confidence_of_a_sampled_node_is_its_draft_probability() -> None:
    sampled = Draft.chain((1,), probs=torch.tensor([[0.05, 0.95, 0.0]]))
    assert accepted(confidence, sampled) == (0,)
    with pytest.raises(AssertionError, match="states its confidence"):
        accepted(confidence, Draft.chain((1,)))


def test_siblings_are_tried_in_order() -> None:
    assert accepted(confidence, confident((1, 0, 2), (0.5, 0.5, 0.95), (-1, -1, -1))) == (1,)
    assert accepted(typical, Draft((2, 0, 2), (-1, -1, 1)), torch.eye(3)[[0, 0, 2, 1]]) == (1, 2)


def test_typical_lowers_its_threshold_where_the_target_has_high_entropy() -> None:
    flat, sharp = torch.full((2, 100), 0.01), torch.tensor([[0.9, 0.08, 0.02]] * 2)
    assert accepted(typical, Draft.chain((7,)), flat) == (0,)
    assert accepted(typical, Draft.chain((7,)), flat, delta=1.0) == (), "the threshold is exclusive"
    assert accepted(typical, Draft.chain((1,)), sharp) == ()
    assert accepted(typical, Draft.chain((1,)), sharp, epsilon=0.05) == (0,)


def test_typical_with_a_greedy_target_accepts_its_argmax_alone() -> None:
    greedy = torch.eye(3)[[1, 2]]
    assert accepted(typical, Draft.chain((1,)), greedy) == (0,)
    assert accepted(typical, Draft.chain((0,)), greedy) == ()


def mixture(language: ToyLanguage, weight: float, greedy: bool = False) -> dict[Context, Tensor]:
    draft = {
        c: torch.eye(language.vocab).double()[row.argmax()] if greedy else row for c, row in language.draft.items()
    }
    return {context: weight * row + (1 - weight) * draft[context] for context, row in language.target.items()}


@pytest.mark.parametrize("weight", [1.0, 0.7, 0.3, 0.0])
@pytest.mark.parametrize(
    ("make", "greedy"),
    [
        (chain(2), False),
        (tree([[[]], [[], []]], True), False),
        (tree([[[]], [[], []]], False), False),
        (mixed_chain((False, False)), True),
        (top_tree(1, 2), True),
    ],
)
def test_an_ensemble_samples_the_mixture_exactly(weight: float, make: ToyDrafter, greedy: bool) -> None:
    """Over two tokens, because after a fully accepted draft there is no draft distribution to mix in."""
    language = toy_language("zeros", 3, 4, seed=2)
    outputs = output_distribution(language, make, find_rule("ensemble", ThresholdSettings(weight=weight)), 2)
    assert total_variation(outputs, target_distribution(mixture(language, weight, greedy), 3, 2)) < 1e-12


def test_the_lossy_rules_are_lossy() -> None:
    language = toy_language("random", 3, 4, seed=1)
    for name in LOSSY:
        assert bias(language, chain(2), find_rule(name, ThresholdSettings(upper=0.5)), 2) > 0.01, name


def test_verification_does_not_modify_its_inputs() -> None:
    probs = TARGET.double()
    paths(ensemble, Draft.chain((0, 1)), probs)
    assert probs.equal(TARGET.double())


@pytest.mark.parametrize(
    ("field", "value"), [("upper", 1.5), ("lower", -0.1), ("epsilon", float("nan")), ("weight", "1"), ("delta", True)]
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        ThresholdSettings(**{field: value})
    assert caught.value.field == field


def test_crossed_thresholds_and_unknown_names_are_refused() -> None:
    with pytest.raises(RequestError, match="lower"):
        ThresholdSettings(upper=0.3, lower=0.4)
    with pytest.raises(TypeError, match="upper"):
        ThresholdSettings(uper=0.3)
    with pytest.raises(RequestError, match="narrative"):
        ThresholdSettings.for_workload("narative")
    with pytest.raises(RequestError, match="did you mean 'rejection'"):
        find_rule("rejektion")


def test_rules_are_found_by_name() -> None:
    assert not {*LOSSLESS} & {*LOSSY}
    assert all(find_rule(name) is EXACT[name] for name in EXACT)
    assert ThresholdSettings.for_workload("code").upper == 0.75


def test_settings_and_rule_names_do_not_import_torch() -> None:
    code = "import sys, foretell.verify.rules, foretell.verify.lossy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
