"""A tree of guesses from what a device looked at of all its levels, settled at once: what `LevelTree` would have grown
from it level by level, in a fifth of the time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretell.runner.head_choice import Grown

from .tree import LevelTree


def settle(tree: LevelTree, grown: Grown, row: int) -> None:
    """Give the tree of one text its nodes: of all that was looked at the likeliest, of equals the one found first."""
    deep, count = tree.budget.depth, grown.tokens.shape[-1]
    told = np.minimum(grown.shares[:, row], 1)  # by a rounding more, a child would come before its parent
    chances = [told[0, 0].astype(np.float64)]
    parents = [np.full(count, -1)]
    first = 0  # of the candidates of the level before
    for depth in range(1, deep):
        followed = grown.followed[depth - 1, row]
        branches = _own(chances[-1][followed], tree.wide)
        parents.append(np.repeat(first + followed, count))
        first += len(chances[-1])
        chances.append((branches[:, None] * told[depth]).ravel())
    tokens = np.concatenate([grown.tokens[0, row, 0], grown.tokens[1:deep, row].ravel()])
    shares = np.concatenate([told[0, 0], told[1:deep].ravel()])
    _take(tree, np.concatenate(chances), tokens, shares, np.concatenate(parents))


def _own(branches: npt.NDArray[np.float64], wide: int) -> npt.NDArray[np.float64]:
    """Without those that are followed for another text, which has a wider tree."""
    if len(branches) > wide:
        branches[np.argsort(-branches, kind="stable")[wide:]] = 0
    return branches


def _take(tree: LevelTree, chances: npt.NDArray[np.float64], *told: npt.NDArray[np.generic]) -> None:
    """The best as the tree's nodes, in the order of their chances: a node's beginning is always before it."""
    best = np.argsort(-chances, kind="stable")[: tree.budget.nodes]
    likely = chances[best]
    best = best[: max(1, int(np.count_nonzero((likely > 0) & (likely >= tree.floor))))]  # the first is always made
    tokens, shares, parents = (each[best].tolist() for each in told)
    places = {-1: -1, **{candidate: node for node, candidate in enumerate(best.tolist())}}
    tree.take(tokens, [places[parent] for parent in parents], shares, chances[best].tolist())
