"""Trees that grow by levels, and trees of a settled shape."""

from __future__ import annotations

import itertools
import random

import pytest

from foretell.draft.heads.tree import (
    OTHER_RANK_RATES,
    ROOT,
    Children,
    EagleTree,
    FixedTree,
    RankAcceptance,
    default_width,
)
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Request, ScheduledSequence, Sequence, StepResult, VerifyResult

Language = dict[tuple[int, ...], Children]


def language(vocab: int, depth: int, seed: int) -> Language:
    """What follows each run of tokens, likeliest first."""
    rng = random.Random(seed)
    found: Language = {}
    for length in range(depth):
        for run in itertools.product(range(vocab), repeat=length):
            weights = sorted((rng.random() ** 3 for _ in range(vocab)), reverse=True)
            tokens = rng.sample(range(vocab), vocab)
            found[run] = Children(tokens, [weight / sum(weights) for weight in weights])
    return found


def path(tree: EagleTree | FixedTree | Draft, node: int) -> tuple[int, ...]:
    return () if node == ROOT else (*path(tree, tree.parents[node]), tree.tokens[node])


def grown(known: Language, tree: EagleTree) -> Draft:
    while tree.is_open:
        tree.expand([known[path(tree, node)] for node in tree.frontier])
    return tree.draft("tree")


def chances(known: Language) -> dict[tuple[int, ...], float]:
    """Of every run of tokens there is."""
    found = {(): 1.0}
    for run, children in known.items():
        for token, share in zip(children.tokens, children.confidence, strict=True):
            found[*run, token] = found[run] * share
    del found[()]
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("nodes", "depth"), [(5, 2), (12, 3), (12, 4), (30, 4)])
def test_it_is_the_likeliest_tree_there_is(nodes: int, depth: int, seed: int) -> None:
    known = language(3, depth, seed)
    draft = grown(known, EagleTree(Budget(nodes, max_depth=depth), width=nodes))
    all_of_them = chances(known)
    best = sorted(all_of_them.values(), reverse=True)[: len(draft)]
    assert [all_of_them[path(draft, node)] for node in range(len(draft))] == pytest.approx(best)
    assert len(draft) == nodes and max(draft.depths()) <= depth


@pytest.mark.parametrize("seed", range(8))
def test_it_is_a_tree_whose_beginning_is_the_tree_for_less(seed: int) -> None:
    known = language(4, 4, seed)
    whole = grown(known, EagleTree(Budget(24, max_depth=4), width=24))
    assert all(parent < node for node, parent in enumerate(whole.parents))
    assert len({*zip(whole.parents, whole.tokens, strict=True)}) == len(whole), "one row per token under one parent"
    less = grown(known, EagleTree(Budget(9, max_depth=4), width=24))
    assert (whole.truncate(9).tokens, whole.truncate(9).parents) == (less.tokens, less.parents)


def test_no_more_places_are_asked_for_than_there_are_nodes() -> None:
    for nodes, depth in itertools.product((2, 5, 8, 16, 64, 128), (1, 2, 3, 7, 12)):
        budget = Budget(nodes, max_depth=depth)
        assert sum(EagleTree(budget).max_frontier) <= nodes
        assert default_width(budget) >= 1


def test_levels_end_where_nothing_better_can_be_found() -> None:
    """Nine children of even chance fill the budget: what hangs below them is less likely than any of them."""
    tree = EagleTree(Budget(9, max_depth=5))
    tree.expand([Children(list(range(10)), [0.1] * 10)])
    assert not tree.is_open
    tree = EagleTree(Budget(9, max_depth=5))
    tree.expand([Children([1, 2], [0.9, 0.1])])
    assert tree.frontier == [0, 1]


def test_a_floor_leaves_out_what_is_unlikely_but_never_the_first() -> None:
    tree = EagleTree(Budget(9, max_depth=2), min_confidence=0.3)
    tree.expand([Children([1, 2], [0.2, 0.1])])
    assert tree.draft("").tokens == (1,)
    tree = EagleTree(Budget(9, max_depth=2), min_confidence=0.3)
    tree.expand([Children([1, 2, 3], [0.5, 0.4, 0.1])])
    tree.expand([Children([5, 6], [0.9, 0.1])] * 2)
    assert tree.draft("").tokens == (1, 5, 2, 5)


def test_a_shape_holds_the_likeliest_ranks() -> None:
    ranks = RankAcceptance([0.6, 0.4])
    shape = ranks.best_shape(Budget(20, max_depth=4), 4)
    assert len(shape) == len(set(shape)) == 20
    chance: list[float] = []
    for parent, rank in shape:
        depth = 1
        at = parent
        while at != ROOT:
            depth, at = depth + 1, shape[at][0]
        chance.append((1.0 if parent == ROOT else chance[parent]) * ranks.at_depth(depth)[rank])
        siblings = [r for p, r in shape[: len(chance)] if p == parent]
        assert siblings == list(range(len(siblings))), "siblings stand in the order of their ranks"
    assert chance == sorted(chance, reverse=True)
    assert len(ranks.best_shape(Budget(20, max_depth=9), 1)) == 1 + len(OTHER_RANK_RATES), "no deeper than it can guess"


def test_a_shaped_tree_leaves_out_what_hangs_below_a_child_that_is_missing() -> None:
    tree = FixedTree([(ROOT, 0), (ROOT, 1), (0, 0), (1, 0), (2, 0)])
    assert tree.max_frontier == [2, 1]
    tree.expand([Children([7], [0.5])])
    tree.expand([Children([8, 9], [0.5, 0.2])])
    tree.expand([Children([3], [0.5])])
    draft = tree.draft("tree")
    assert (draft.tokens, draft.parents) == ((7, 8, 3), (-1, 0, 1))


def test_ranks_are_learnt_from_what_stood() -> None:
    ranks = RankAcceptance([0.5])
    draft = Draft((1, 2, 3), (-1, -1, 1), "tree")
    request = Request("0", (1,), SamplingParams(), 0, 9)
    share = ScheduledSequence.of(Sequence(0, request, [1, 2]), 1)
    for _ in range(600):
        ranks.observe(StepResult(share, draft, VerifyResult((1,), 9)))
    assert ranks.rates[0][0] < 0.01 and ranks.rates[0][1] > 0.99 and ranks.rates[1][0] < 0.01
    assert ranks.rates[1][1] == pytest.approx(0.5 * OTHER_RANK_RATES[0]), "what was not tried is not judged"
    assert ranks.at_depth(1)[1] < 0.01, "a later choice counts for no more than the one before it"


def test_a_budget_may_have_more_nodes_than_depth() -> None:
    assert Budget(4).depth == 4 and not Budget(4).is_tree
    assert Budget(8, max_depth=3).depth == 3 and Budget(8, max_depth=3).is_tree
    assert Budget(2, max_depth=3).depth == 2 and not Budget(2, max_depth=3).is_tree
