"""A tree of guesses from what a device looked at of all its levels, settled at once: what `LevelTree` would have grown
from it level by level, in a fifth of the time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretell.runner.head_choice import Grown

from .growing import ROOT
from .tree import LevelTree

Places = npt.NDArray[np.int64]


def settle(tree: LevelTree, grown: Grown, row: int) -> None:
    """Give the tree of one text its nodes: of all that was looked at the likeliest, of equals the one found first."""
    deep = tree.budget.depth
    # By a rounding more than 1, a child would come before its parent.
    shares = np.minimum(grown.shares[:deep, row], 1).astype(np.float64)
    followed = grown.followed[:deep, row]
    chances = np.zeros(shares.shape)  # [depth, followed, children]; behind the root there is one row of children
    chances[0, 0] = shares[0, 0]
    for depth in range(1, deep):
        branches = chances[depth - 1].take(followed[depth - 1])
        if len(branches) > tree.wide:  # others are followed for another text, which has a wider tree
            branches[np.argsort(-branches, kind="stable")[tree.wide :]] = 0
        np.multiply(branches[:, None], shares[depth], out=chances[depth])
    best = _best(chances.ravel(), tree)
    parents = _parents(followed, best, chances.shape)
    tokens = grown.tokens[:deep, row].ravel()[best]
    tree.take(tokens.tolist(), parents, shares.ravel()[best].tolist(), chances.ravel()[best].tolist())


def _best(chances: npt.NDArray[np.float64], tree: LevelTree) -> Places:
    """The tree's nodes in the order of their chances: a node's beginning is always before it."""
    best = np.argsort(-chances, kind="stable")[: tree.budget.nodes]
    likely = chances[best]
    return best[: max(1, int(np.count_nonzero((likely > 0) & (likely >= tree.floor))))]  # the first is always made


def _parents(followed: Places, best: Places, shape: tuple[int, ...]) -> list[int]:
    """The parent of each node, of the candidates that stand in this shape: each row of them hangs on what was followed
    in the level before, the first level on the root."""
    deep, wide, children = shape
    above = np.full((deep, wide), ROOT)
    above[1:] = followed[:-1] + wide * children * np.arange(deep - 1)[:, None]
    nodes = np.full(deep * wide * children + 1, ROOT)  # by candidate; the last is for the root
    nodes[best] = np.arange(len(best))
    parents: list[int] = nodes[above.ravel()[best // children]].tolist()
    return parents
