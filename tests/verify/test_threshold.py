"""The rules that are not exact do what they say, and only when asked by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretell.certify.toy import (
    Context,
    Make,
    World,
    bias,
    chain,
    distance,
    law_of,
    mixed_chain,
    plain_law,
    top_tree,
    tree,
    world,
)
from foretell.errors import RequestError
from foretell.types import Draft, VerifyResult
from foretell.verify.lossy import ThresholdSettings, confidence, ensemble, typical
from foretell.verify.randomness import enumerate_chance
from foretell.verify.rules import EXACT, LOSSLESS, LOSSY, find_rule

TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.2, 0.2, 0.6]])


def sure(tokens: tuple[int, ...], confidence: tuple[float, ...], parents: tuple[int, ...] | None = None) -> Draft:
    return Draft(tokens, parents or tuple(range(-1, len(tokens) - 1)), "", None, confidence)


def paths(
    rule: Callable[..., VerifyResult], draft: Draft, probs: Tensor = TARGET, **settings: float
) -> dict[tuple[tuple[int, ...], int], float]:
    chosen = ThresholdSettings(**settings)
    outcomes = enumerate_chance(lambda chance: rule(draft, probs, chance, settings=chosen))
    return {(verdict.accepted_path, verdict.next_token): probability for probability, verdict in outcomes}


def accepted(
    rule: Callable[..., VerifyResult], draft: Draft, probs: Tensor = TARGET, **settings: float
) -> tuple[int, ...]:
    (path,) = {path for path, _ in paths(rule, draft, probs, **settings)}
    return path


def test_a_sure_guess_stands_a_doubtful_one_falls_and_between_the_target_is_asked() -> None:
    assert accepted(confidence, sure((2,), (0.92,))) == (0,), "although the target would not say it"
    assert accepted(confidence, sure((0,), (0.55,))) == (0,)
    assert accepted(confidence, sure((1,), (0.55,))) == ()
    assert accepted(confidence, sure((0,), (0.15,))) == (), "although the target would say it"


def test_the_bounds_are_taken_in() -> None:
    assert accepted(confidence, sure((1,), (0.9,))) == (0,)
    assert accepted(confidence, sure((0,), (0.2,))) == (0,)
    assert accepted(confidence, sure((1,), (0.6,)), upper=0.6) == (0,)
    assert accepted(confidence, sure((0,), (0.6,)), lower=0.7) == ()


def test_after_a_fall_the_target_draws_from_all_of_its_distribution() -> None:
    for rule, draft in ((confidence, sure((0,), (0.1,))), (typical, Draft.chain((2,)))):
        probs = torch.tensor([[0.6, 0.36, 0.04], [1.0, 0.0, 0.0]])
        assert paths(rule, draft, probs) == pytest.approx({((), 0): 0.6, ((), 1): 0.36, ((), 2): 0.04}, abs=1e-6)


def test_a_drawn_node_is_as_sure_as_its_distribution_says() -> None:
    drawn = Draft.chain((1,), probs=torch.tensor([[0.05, 0.95, 0.0]]))
    assert accepted(confidence, drawn) == (0,)
    with pytest.raises(AssertionError, match="state it"):
        accepted(confidence, Draft.chain((1,)))


def test_siblings_are_tried_in_turn() -> None:
    assert accepted(confidence, sure((1, 0, 2), (0.5, 0.5, 0.95), (-1, -1, -1))) == (1,)
    assert accepted(typical, Draft((2, 0, 2), (-1, -1, 1)), torch.eye(3)[[0, 0, 2, 1]]) == (1, 2)


def test_typical_asks_less_where_the_target_is_unsure() -> None:
    flat, sharp = torch.full((2, 100), 0.01), torch.tensor([[0.9, 0.08, 0.02]] * 2)
    assert accepted(typical, Draft.chain((7,)), flat) == (0,)
    assert accepted(typical, Draft.chain((7,)), flat, delta=1.0) == (), "just typical is not above it"
    assert accepted(typical, Draft.chain((1,)), sharp) == ()
    assert accepted(typical, Draft.chain((1,)), sharp, epsilon=0.05) == (0,)


def test_typical_with_a_greedy_target_takes_its_token_alone() -> None:
    greedy = torch.eye(3)[[1, 2]]
    assert accepted(typical, Draft.chain((1,)), greedy) == (0,)
    assert accepted(typical, Draft.chain((0,)), greedy) == ()


def mixture(here: World, weight: float, greedy: bool = False) -> dict[Context, Tensor]:
    guess = {c: torch.eye(here.vocab).double()[row.argmax()] if greedy else row for c, row in here.draft.items()}
    return {context: weight * row + (1 - weight) * guess[context] for context, row in here.target.items()}


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
def test_an_ensemble_writes_the_mixture_exactly(weight: float, make: Make, greedy: bool) -> None:
    """Over two tokens: behind a whole accepted draft there is no guess to mix in."""
    here = world("zeros", 3, 4, seed=2)
    law = law_of(here, make, find_rule("ensemble", ThresholdSettings(weight=weight)), 2)
    assert distance(law, plain_law(mixture(here, weight, greedy), 3, 2)) < 1e-12


def test_the_lossy_rules_are_lossy() -> None:
    here = world("random", 3, 4, seed=1)
    for name in LOSSY:
        assert bias(here, chain(2), find_rule(name, ThresholdSettings(upper=0.5)), 2) > 0.01, name


def test_inputs_stay_as_they_were() -> None:
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


def test_bounds_that_cross_and_unknown_names_are_refused() -> None:
    with pytest.raises(RequestError, match="lower"):
        ThresholdSettings(upper=0.3, lower=0.4)
    with pytest.raises(TypeError, match="upper"):
        ThresholdSettings(uper=0.3)
    with pytest.raises(RequestError, match="narrative"):
        ThresholdSettings.for_workload("narative")
    with pytest.raises(RequestError, match="did you mean 'rejection'"):
        find_rule("rejektion")


def test_rules_go_by_their_names() -> None:
    assert not {*LOSSLESS} & {*LOSSY}
    assert all(find_rule(name) is EXACT[name] for name in EXACT)
    assert ThresholdSettings.for_workload("code").upper == 0.75


def test_settings_and_names_need_no_torch() -> None:
    code = "import sys, foretell.verify.rules, foretell.verify.lossy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
