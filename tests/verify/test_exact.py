"""What comes out is what the target alone would have said: exact probabilities of every text, for every rule."""

from __future__ import annotations

import pytest
import torch

from foretell.certify.toy import (
    KINDS,
    Context,
    Make,
    Sketch,
    World,
    bias,
    chain,
    mean_accepted,
    mixed_chain,
    mixed_tree,
    top_tree,
    tree,
    unsure_stops,
    world,
)
from foretell.types import Draft
from foretell.verify.randomness import RandomSource
from foretell.verify.rules import EXACT, LOSSLESS, Rule

EXACTLY = 1e-12

DRAFTERS: dict[str, Make] = {
    "nothing": chain(0),
    "one": chain(1),
    "two": chain(2),
    "stops after a doubtful token": chain(2, lambda row, token: float(row[token]) < 0.4),
    "stops before a toss-up": unsure_stops(2),
    "fixed": mixed_chain((False, False)),
    "drawn, fixed": mixed_chain((True, False)),
    "fixed, drawn": mixed_chain((False, True)),
    "siblings with replacement": tree([[], []], True),
    "siblings without replacement": tree([[], [], []], False),
    "two levels with replacement": tree([[[]], [[]]], True),
    "two levels without replacement": tree([[[], []], [[]]], False),
    "likeliest two": top_tree(2, 1),
    "likeliest two, two levels": top_tree(2, 2),
    "mixed tree": mixed_tree,
}

rules = pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)


def test_every_lossless_rule_is_here_or_matches_tokens() -> None:
    assert {*EXACT, "match"} == {*LOSSLESS}


@rules
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafting_keeps_the_law(rule: Rule, make: Make, kind: str) -> None:
    assert bias(world(kind, 3, 4, seed=1), make, rule, 3) < EXACTLY


DEEP: dict[str, Make] = {
    "three": chain(3),
    "three, may stop": chain(3, lambda row, token: float(row[token]) < 0.3),
    "drawn, fixed, drawn": mixed_chain((True, False, True)),
    "three levels": tree([[[[]], []], [[[]]]], True),
    "three levels without replacement": tree([[[[]], []], [[[]]]], False),
}


@rules
@pytest.mark.parametrize("make", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize("kind", ["random", "zeros"])
def test_long_drafts_over_several_steps_keep_the_law(rule: Rule, make: Make, kind: str) -> None:
    assert bias(world(kind, 2, 7, seed=5), make, rule, 4) < EXACTLY


@rules
def test_a_larger_vocabulary_keeps_the_law(rule: Rule) -> None:
    assert bias(world("zeros", 4, 4, seed=2), chain(2), rule, 2) < EXACTLY
    assert bias(world("random", 4, 4, seed=3), tree([[], [], []], False), rule, 2) < EXACTLY


@rules
@pytest.mark.parametrize("seed", range(6))
def test_any_tree_of_drawn_and_fixed_nodes_keeps_the_law(rule: Rule, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, node, (), generator=random)) if node else -1 for node in range(4)]
    drawn = (torch.rand(4, generator=random) < 0.6).tolist()

    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        sketch = Sketch(here, context)
        for parent, at_random in zip(parents, drawn, strict=True):
            row = here.draft[sketch.context(parent)]
            sketch.add(parent, chance.pick(row) if at_random else int(row.argmin()), row if at_random else None)
        return sketch.finish()

    assert bias(world("random", 2, 6, seed), make, rule, 3) < EXACTLY


@rules
def test_a_token_judged_as_fixed_may_come_from_anywhere(rule: Rule) -> None:
    def make(here: World, context: Context, chance: RandomSource) -> Draft:
        draft = chain(2)(here, context, chance)
        doubtful = [token == 0 for token in draft.tokens]
        return Draft.chain(draft.tokens).truncate(doubtful.index(True) if any(doubtful) else 2)

    assert bias(world("random", 3, 4, seed=1), make, rule, 3) < EXACTLY


def test_block_accepts_more_than_rejection_by_as_much_as_its_paper_says() -> None:
    target, draft = torch.tensor([1.0, 2.0]).double() / 3, torch.tensor([2.0, 1.0]).double() / 3
    contexts = world("random", 2, 3).target
    here = World(2, dict.fromkeys(contexts, target), dict.fromkeys(contexts, draft))
    assert mean_accepted(here, chain(2), EXACT["rejection"]) == pytest.approx(10 / 9, abs=1e-12)
    assert mean_accepted(here, chain(2), EXACT["block"]) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_block_never_accepts_less(seed: int) -> None:
    here = world("random", 3, 4, seed)
    for make in (chain(1), chain(3), tree([[[]], [[]]], True), tree([[[], []], [[]]], False)):
        token_by_token = mean_accepted(here, make, EXACT["rejection"])
        assert mean_accepted(here, make, EXACT["block"]) >= token_by_token - EXACTLY


def test_siblings_without_replacement_are_accepted_more_often() -> None:
    here = world("random", 3, 2, seed=4)
    for rule in EXACT.values():
        again = mean_accepted(here, tree([[], []], True), rule)
        assert mean_accepted(here, tree([[], []], False), rule) > again + 0.01


@rules
def test_a_greedy_target_takes_its_own_token_and_nothing_else(rule: Rule) -> None:
    here = world("greedy", 3, 3, seed=6)
    likeliest = int(here.target[()].argmax())
    assert mean_accepted(here, lambda *_: Draft.chain((likeliest,)), rule) == 1
    assert mean_accepted(here, lambda *_: Draft.chain(((likeliest + 1) % 3,)), rule) == 0
