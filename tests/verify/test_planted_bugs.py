"""The exact checks detect bugs: each planted one must bias the output distribution clearly."""

from __future__ import annotations

import pytest

from foretell.certify.toy import (
    Context,
    ToyDraftBuilder,
    ToyDrafter,
    ToyLanguage,
    bias,
    chain,
    mixed_chain,
    toy_language,
    tree,
)
from foretell.types import Draft
from foretell.verify.randomness import RandomSource
from foretell.verify.rejection import acceptance_ratio
from foretell.verify.rules import EXACT

MIN_BIAS = 0.01
LANGUAGE = toy_language("random", 3, 5, seed=1)

rules = pytest.mark.parametrize("name", EXACT)


@rules
def test_an_inverted_acceptance_ratio_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"foretell.verify.{name}.acceptance_ratio", lambda p, q: acceptance_ratio(q, p))
    assert bias(LANGUAGE, chain(2), EXACT[name], 3) > MIN_BIAS


@rules
@pytest.mark.parametrize("make", [chain(2), mixed_chain((False, False)), tree([[], []], True)])
def test_a_residual_that_is_not_subtracted_is_detected(
    name: str, make: ToyDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"foretell.verify.{name}.normalize_residual", lambda residual, fallback: fallback)
    assert bias(LANGUAGE, make, EXACT[name], 3) > MIN_BIAS


def test_a_node_that_keeps_its_weight_after_a_rejection_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.verify.block.acceptance_probability", lambda residual_sum, weight: weight)
    assert bias(LANGUAGE, chain(2), EXACT["block"], 3) > MIN_BIAS


@rules
def test_an_argmax_token_passed_off_as_sampled_is_detected(name: str) -> None:
    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        builder = ToyDraftBuilder(language, context)
        row = language.draft[context]
        builder.add(-1, int(row.argmax()), row)
        return builder.finish()

    assert bias(LANGUAGE, make, EXACT[name], 2) > MIN_BIAS


@rules
def test_a_sampled_token_dropped_because_of_its_value_is_detected(name: str) -> None:
    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        draft = chain(2)(language, context, random)
        assert draft.probs is not None
        dropped = [float(draft.probs[i, token]) < 0.4 for i, token in enumerate(draft.tokens)]
        return draft.truncate(dropped.index(True)) if any(dropped) else draft

    assert bias(LANGUAGE, make, EXACT[name], 3) > MIN_BIAS


@rules
def test_siblings_out_of_sampling_order_are_detected(name: str) -> None:
    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        draft = tree([[], []], False)(language, context, random)
        assert draft.probs is not None
        return Draft(draft.tokens[::-1], draft.parents, "", draft.sampled, None, draft.probs.flip(0))

    assert bias(LANGUAGE, make, EXACT[name], 2) > MIN_BIAS


@rules
def test_a_sibling_sampled_without_replacement_but_verified_as_with_is_detected(name: str) -> None:
    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        draft = tree([[], []], False)(language, context, random)
        assert draft.probs is not None
        return Draft(draft.tokens, draft.parents, "", draft.sampled, None, draft.probs[[0, 0]])

    assert bias(LANGUAGE, make, EXACT[name], 2) > MIN_BIAS
