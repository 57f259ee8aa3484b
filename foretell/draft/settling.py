"""A tree of guesses from what a device looked at of all its levels, settled at once: what `LevelTree` would have grown
from it level by level, in a fifth of the time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretell.runner.head_choice import Grown

from .growing import ROOT
from .tree import LevelTree


def settle(tree: LevelTree, grown: Grown, row: int) -> None:
    """Give the tree of one text its nodes: of all that was looked at the likeliest, of equals the one found first."""
    deep = tree.budget.depth
    shares = np.minimum(grown.shares[:deep, row], 1)  # by a rounding more, a child would come before its parent
    followed = grown.followed[:deep, row]
    chances = np.zeros(shares.shape)  # [depth, followed, children]; behind the root there is one row of children
    chances[0, 0] = shares[0, 0]
    for depth in range(1, deep):
        branches = chances[depth - 1].take(followed[depth - 1])
        if len(branches) > tree.wide:  # others are followed for another text, which has a wider tree
            branches[np.argsort(-branches, kind="stable")[tree.wide :]] = 0
        np.multiply(branches[:, None], shares[depth], out=chances[depth])
    best = _best(chances.ravel(), tree)
    at = best.tolist()
    places = {ROOT: ROOT, **{candidate: node for node, candidate in enumerate(at)}}
    tree.take(
        grown.tokens[:deep, row].ravel()[best].tolist(),
        [places[candidate] for candidate in _before(followed, at, shares[0].size)],
        shares.ravel()[best].tolist(),
        chances.ravel()[best].tolist(),
    )


def _best(chances: npt.NDArray[np.float64], tree: LevelTree) -> npt.NDArray[np.intp]:
    """The tree's nodes in the order of their chances: a node's beginning is always before it."""
    best = np.argsort(-chances, kind="stable")[: tree.budget.nodes]
    likely = chances[best]
    return best[: max(1, int(np.count_nonzero((likely > 0) & (likely >= tree.floor))))]  # the first is always made


def _before(followed: npt.NDArray[np.int64], candidates: list[int], level: int) -> list[int]:
    """What each candidate hangs on: one of the level before, which has as many, or the root."""
    wide, branches = followed.shape[1], followed.ravel().tolist()
    children = level // wide  # of each row of a level; the rows hang on those that were followed in the level before
    return [ROOT if at < level else (at // level - 1) * level + branches[at // children - wide] for at in candidates]
