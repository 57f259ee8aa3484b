"""A tree that is settled at once is the one that grows level by level, ties, floors and widths included."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.draft.heads.tree import ROOT, Children, EagleTree, build_from_topk
from foretell.runner.heads.sampler import TreeCandidates
from foretell.types import Budget, Draft

DEPTH, FOLLOWED, COUNT = 5, 10, 10


def looked_at(seed: int, wide: int, ties: bool) -> TreeCandidates:
    """Children of the likeliest branches of two texts, as a device finds them: more are followed than a text wants."""
    rng = np.random.default_rng(seed)
    shape = (DEPTH, 2, FOLLOWED, COUNT)
    shares = np.sort(rng.dirichlet(np.full(COUNT, 0.4), shape[:3]), -1)[..., ::-1].astype(np.float32)
    if ties:
        shares = np.exp2(np.floor(np.log2(np.maximum(shares, 1e-9)))).astype(np.float32)
        shares[rng.random(shape[:3]) < 0.2, 0] = 1.0  # as likely as their parents
        shares[shares < 1e-3] = 0
    followed = np.zeros(shape[:3], np.int64)
    for text in range(2):
        chances = shares[0, text, :1].astype(np.float64)
        for depth in range(DEPTH - 1):
            best = np.argsort(-chances.ravel(), kind="stable")[:FOLLOWED]
            kept = np.where(np.isin(chosen := np.sort(best), best[:wide]), chances.ravel()[chosen], 0)
            followed[depth, text] = chosen
            chances = kept[:, None] * shares[depth + 1, text]
    tokens = np.argsort(rng.random((*shape[:3], 999)), -1)[..., :COUNT]
    return TreeCandidates(tokens, shares, followed)


def by_levels(tree: EagleTree, grown: TreeCandidates, row: int) -> Draft:
    """The definition."""
    rows = {ROOT: 0}
    while tree.is_open:
        depth = tree.depth
        tokens, shares = grown.tokens[depth, row].tolist(), grown.probs[depth, row].tolist()
        children = {node: Children(tokens[rows[node]], shares[rows[node]]) for node in tree.frontier}
        tree.expand(list(children.values()))
        followed = {at: below for below, at in enumerate(grown.expanded[depth, row].tolist())}
        parents = {node: tree.parents[node] for node in tree.frontier}
        rank = {node: children[parent].tokens.index(tree.tokens[node]) for node, parent in parents.items()}
        rows = {node: followed[rows[parent] * COUNT + rank[node]] for node, parent in parents.items()}
    return tree.draft("eagle")


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("floor", [0.0, 0.02])
@pytest.mark.parametrize(
    "budget", [Budget(64, max_depth=5), Budget(16, max_depth=5), Budget(9, max_depth=2), Budget(40, max_depth=3)]
)
def test_it_is_the_tree_that_grows_by_levels(budget: Budget, floor: float, ties: bool) -> None:
    for seed in range(20):
        wide = EagleTree(budget, floor).width
        grown = looked_at(seed, wide, ties)
        truth = by_levels(EagleTree(budget, floor), grown, seed % 2)
        build_from_topk(tree := EagleTree(budget, floor), grown, seed % 2)
        found = tree.draft("eagle")
        assert (found.tokens, found.parents, found.confidence) == (truth.tokens, truth.parents, truth.confidence)


def test_a_share_that_is_rounded_up_puts_no_child_before_its_parent() -> None:
    grown = looked_at(0, 5, ties=False)
    grown.probs[1:, :, :, 0] = np.float32(1.0000001)
    build_from_topk(tree := EagleTree(Budget(16, max_depth=5)), grown, 0)
    assert all(parent < node for node, parent in enumerate(tree.draft("eagle").parents))
