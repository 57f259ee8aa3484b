"""Outputs have the target's distribution under every lossless rule, by exact enumeration."""

from __future__ import annotations

import pytest
import torch

from foretell.certify.toy import (
    KINDS,
    Context,
    ToyDraftBuilder,
    ToyDrafter,
    ToyLanguage,
    bias,
    chain,
    mean_accepted,
    mixed_chain,
    mixed_tree,
    stop_when_uncertain,
    top_tree,
    toy_language,
    tree,
)
from foretell.types import Draft
from foretell.verify.randomness import RandomSource
from foretell.verify.rules import EXACT, LOSSLESS, Rule

MAX_DISTANCE = 1e-12

DRAFTERS: dict[str, ToyDrafter] = {
    "no draft": chain(0),
    "one token": chain(1),
    "two tokens": chain(2),
    "stops after an unlikely token": chain(2, lambda row, token: float(row[token]) < 0.4),
    "stops when uncertain": stop_when_uncertain(2),
    "fixed": mixed_chain((False, False)),
    "sampled, fixed": mixed_chain((True, False)),
    "fixed, sampled": mixed_chain((False, True)),
    "siblings with replacement": tree([[], []], True),
    "siblings without replacement": tree([[], [], []], False),
    "two levels with replacement": tree([[[]], [[]]], True),
    "two levels without replacement": tree([[[], []], [[]]], False),
    "top 2": top_tree(2, 1),
    "top 2, two levels": top_tree(2, 2),
    "mixed tree": mixed_tree,
}

rules = pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)


def test_every_lossless_rule_but_match_is_exact() -> None:
    assert {*EXACT, "match"} == {*LOSSLESS}


@rules
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_keep_the_distribution(rule: Rule, make: ToyDrafter, kind: str) -> None:
    assert bias(toy_language(kind, 3, 4, seed=1), make, rule, 3) < MAX_DISTANCE


DEEP: dict[str, ToyDrafter] = {
    "three tokens": chain(3),
    "three tokens, may stop": chain(3, lambda row, token: float(row[token]) < 0.3),
    "sampled, fixed, sampled": mixed_chain((True, False, True)),
    "three levels": tree([[[[]], []], [[[]]]], True),
    "three levels without replacement": tree([[[[]], []], [[[]]]], False),
}


@rules
@pytest.mark.parametrize("make", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize("kind", ["random", "zeros"])
def test_long_drafts_over_several_steps_keep_the_distribution(rule: Rule, make: ToyDrafter, kind: str) -> None:
    assert bias(toy_language(kind, 2, 7, seed=5), make, rule, 4) < MAX_DISTANCE


@rules
def test_a_larger_vocabulary_keeps_the_distribution(rule: Rule) -> None:
    assert bias(toy_language("zeros", 4, 4, seed=2), chain(2), rule, 2) < MAX_DISTANCE
    assert bias(toy_language("random", 4, 4, seed=3), tree([[], [], []], False), rule, 2) < MAX_DISTANCE


@rules
@pytest.mark.parametrize("seed", range(6))
def test_any_tree_of_sampled_and_fixed_nodes_keeps_the_distribution(rule: Rule, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(4)]
    sampled = (torch.rand(4, generator=generator) < 0.6).tolist()

    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        builder = ToyDraftBuilder(language, context)
        for parent, is_sampled in zip(parents, sampled, strict=True):
            row = language.draft[builder.context(parent)]
            builder.add(parent, random.sample(row) if is_sampled else int(row.argmin()), row if is_sampled else None)
        return builder.finish()

    assert bias(toy_language("random", 2, 6, seed), make, rule, 3) < MAX_DISTANCE


@rules
def test_a_token_verified_as_fixed_may_be_dropped_by_value(rule: Rule) -> None:
    def make(language: ToyLanguage, context: Context, random: RandomSource) -> Draft:
        draft = chain(2)(language, context, random)
        dropped = [token == 0 for token in draft.tokens]
        return Draft.chain(draft.tokens).truncate(dropped.index(True) if any(dropped) else 2)

    assert bias(toy_language("random", 3, 4, seed=1), make, rule, 3) < MAX_DISTANCE


def test_block_accepts_as_much_more_than_rejection_as_its_paper_states() -> None:
    target, draft = torch.tensor([1.0, 2.0]).double() / 3, torch.tensor([2.0, 1.0]).double() / 3
    contexts = toy_language("random", 2, 3).target
    language = ToyLanguage(2, dict.fromkeys(contexts, target), dict.fromkeys(contexts, draft))
    assert mean_accepted(language, chain(2), EXACT["rejection"]) == pytest.approx(10 / 9, abs=1e-12)
    assert mean_accepted(language, chain(2), EXACT["block"]) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_block_never_accepts_fewer_tokens(seed: int) -> None:
    language = toy_language("random", 3, 4, seed)
    for make in (chain(1), chain(3), tree([[[]], [[]]], True), tree([[[], []], [[]]], False)):
        by_rejection = mean_accepted(language, make, EXACT["rejection"])
        assert mean_accepted(language, make, EXACT["block"]) >= by_rejection - MAX_DISTANCE


def test_siblings_without_replacement_are_accepted_more_often() -> None:
    language = toy_language("random", 3, 2, seed=4)
    for rule in EXACT.values():
        with_replacement = mean_accepted(language, tree([[], []], True), rule)
        assert mean_accepted(language, tree([[], []], False), rule) > with_replacement + 0.01


@rules
def test_a_greedy_target_accepts_its_argmax_alone(rule: Rule) -> None:
    language = toy_language("greedy", 3, 3, seed=6)
    argmax = int(language.target[()].argmax())
    assert mean_accepted(language, lambda *_: Draft.chain((argmax,)), rule) == 1
    assert mean_accepted(language, lambda *_: Draft.chain(((argmax + 1) % 3,)), rule) == 0
