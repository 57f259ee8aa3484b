"""The exact checks are only worth something if they see a fault: each planted one must move the law clearly."""

from __future__ import annotations

import pytest

from foretell.certify.toy import Context, Make, Sketch, World, bias, chain, mixed_chain, tree, world
from foretell.types import Draft
from foretell.verify.randomness import RandomSource
from foretell.verify.rejection import ratio
from foretell.verify.rules import EXACT

CLEARLY = 0.01
HERE = world("random", 3, 5, seed=1)

rules = pytest.mark.parametrize("name", EXACT)


@rules
def test_a_ratio_upside_down_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"foretell.verify.{name}.ratio", lambda wanted, offered: ratio(offered, wanted))
    assert bias(HERE, chain(2), EXACT[name], 3) > CLEARLY


@rules
@pytest.mark.parametrize("make", [chain(2), mixed_chain((False, False)), tree([[], []], True)])
def test_a_residual_that_is_not_subtracted_is_seen(name: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"foretell.verify.{name}.scaled", lambda rest, fallback: fallback)
    assert bias(HERE, make, EXACT[name], 3) > CLEARLY


def test_a_node_that_keeps_its_weight_after_a_fall_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.verify.block.share", lambda rest, weight: weight)
    assert bias(HERE, chain(2), EXACT["block"], 3) > CLEARLY


@rules
def test_a_likeliest_token_passed_off_as_drawn_is_seen(name: str) -> None:
    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        sketch = Sketch(here, context)
        row = here.draft[context]
        sketch.add(-1, int(row.argmax()), row)
        return sketch.finish()

    assert bias(HERE, make, EXACT[name], 2) > CLEARLY


@rules
def test_a_token_dropped_for_its_own_value_is_seen(name: str) -> None:
    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        draft = chain(2)(here, context, chance)
        assert draft.probs is not None
        doubtful = [float(draft.probs[i, token]) < 0.4 for i, token in enumerate(draft.tokens)]
        return draft.truncate(doubtful.index(True)) if any(doubtful) else draft

    assert bias(HERE, make, EXACT[name], 3) > CLEARLY


@rules
def test_siblings_out_of_the_order_they_were_drawn_in_are_seen(name: str) -> None:
    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        draft = tree([[], []], False)(here, context, chance)
        assert draft.probs is not None
        return Draft(draft.tokens[::-1], draft.parents, "", draft.sampled, None, draft.probs.flip(0))

    assert bias(HERE, make, EXACT[name], 2) > CLEARLY


@rules
def test_a_sibling_drawn_without_replacement_but_judged_as_with_is_seen(name: str) -> None:
    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        draft = tree([[], []], False)(here, context, chance)
        assert draft.probs is not None
        return Draft(draft.tokens, draft.parents, "", draft.sampled, None, draft.probs[[0, 0]])

    assert bias(HERE, make, EXACT[name], 2) > CLEARLY
