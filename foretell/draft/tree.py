"""Trees of guesses that grow level by level: a head is asked once a level, for all branches that may still matter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest
from typing import Protocol

import torch
from torch import Tensor

from foretell.types import Budget, Draft

from .growing import ROOT

MOST_WIDE = 10  # branches that are followed farther in one level, and children looked at under one node
NOBODY = -1  # the token of a node that was never reached


@dataclass(frozen=True)
class Children:
    """What may come after a node, in the order it is to be tried, and how likely each is there. None comes twice."""

    tokens: list[int]
    shares: list[float]
    probs: Tensor | None = None  # [children, outputs]: what each was drawn from, where they were


class Tree(Protocol):
    """A draft in the making."""

    depth: int  # of the nodes there are
    level: list[int]  # nodes whose children are wanted next
    tokens: list[int]
    parents: list[int]

    def wanted(self, node: int) -> int:
        """How many children are looked at."""

    def grow(self, children: list[Children]) -> None:
        """The children of each node of the level."""

    @property
    def goes_on(self) -> bool: ...

    @property
    def follows(self) -> list[int]:
        """The most nodes whose children are asked for, of each depth from 1 on."""

    def draft(self, source: str) -> Draft: ...


class LevelTree:
    """The tree of EAGLE-2: the likeliest branches go on, and of all that was found the likeliest nodes are kept.

    A node is as likely as all shares on its branch together, so none is likelier than its parent: the likeliest nodes
    are a tree, and stand in an order whose beginning is the tree for a smaller budget.
    """

    def __init__(self, budget: Budget, floor: float = 0.0, wide: int | None = None) -> None:
        """`wide`: the most branches that are followed in one level; by default as many as leave a place for each."""
        self.budget, self.floor = budget, floor
        self.wide = width(budget) if wide is None else wide
        self.level: list[int] = [ROOT]
        self.depth = 0
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.shares: list[float] = []
        self.chances: list[float] = []  # that a node stands: the shares of its branch, multiplied
        self._least = 0.0  # as many nodes as are kept in the end are likelier, or as likely and found before

    @property
    def goes_on(self) -> bool:
        return bool(self.level)

    @property
    def follows(self) -> list[int]:
        return [self.wide] * (self.budget.depth - 1)

    def wanted(self, node: int) -> int:
        return min(MOST_WIDE, self.budget.nodes)

    def grow(self, children: list[Children]) -> None:
        """The best of the children are the next level."""
        first = len(self.tokens)
        for node, found in zip(self.level, children, strict=True):
            before = 1.0 if node == ROOT else self.chances[node]
            for token, share in zip(found.tokens, found.shares, strict=True):
                chance = before * share
                if self.tokens and (chance <= self._least or chance < self.floor):  # the first guess is always made
                    break
                self._add(token, node, share, chance)
        self.depth += 1
        self.level = self._next(range(first, len(self.tokens))) if self.depth < self.budget.depth else []

    def _add(self, token: int, parent: int, share: float, chance: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.shares.append(share)
        self.chances.append(chance)

    def take(self, tokens: list[int], parents: list[int], shares: list[float], chances: list[float]) -> None:
        """All its nodes at once, the likeliest first; it has none yet, and gets no others."""
        assert not self.tokens, "it grows level by level"
        self.tokens, self.parents, self.shares, self.chances = tokens, parents, shares, chances
        self.depth, self.level = self.budget.depth, []

    def _next(self, fresh: Iterable[int]) -> list[int]:
        """Of the new nodes those below which a node may be found that is kept in the end."""
        chances = self.chances
        if len(self.tokens) >= self.budget.nodes:
            self._least = nlargest(self.budget.nodes, chances)[-1]
        live = [node for node in fresh if chances[node] > self._least]
        return sorted(nlargest(self.wide, live, key=chances.__getitem__))

    def draft(self, source: str) -> Draft:
        order = sorted(range(len(self.tokens)), key=self.chances.__getitem__, reverse=True)  # of equals the first
        whole = Draft(tuple(self.tokens), tuple(self.parents), source, confidence=tuple(self.shares))
        return whole.only(order[: self.budget.nodes])


class ShapedTree:
    """A tree whose shape is settled before its first token: of each node the parent, and the rank among its siblings.

    So it serves for tokens that are drawn at random: whether a node is there does not hang on what was drawn for it.
    """

    def __init__(self, shape: list[tuple[int, int]]) -> None:
        """Siblings stand in the order of their ranks, from 0 on, and none is left out."""
        self.parents = [parent for parent, _ in shape]
        self.tokens = [NOBODY] * len(shape)
        self.shares = [0.0] * len(shape)
        self.probs: dict[int, Tensor] = {}
        self.level: list[int] = [ROOT]
        self.depth = 0
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            self._children.setdefault(parent, []).append(node)

    @property
    def goes_on(self) -> bool:
        return bool(self.level)

    @property
    def follows(self) -> list[int]:
        depths: dict[int, int] = {ROOT: 0}
        for node, parent in enumerate(self.parents):
            depths[node] = depths[parent] + 1
        followed = [depths[node] for node in self._children if node != ROOT]
        return [followed.count(depth) for depth in range(1, max(followed, default=0) + 1)]

    def wanted(self, node: int) -> int:
        return len(self._children[node])

    def grow(self, children: list[Children]) -> None:
        """Where there are fewer children than the shape has places for, what hangs below the others is left out."""
        grown: list[int] = []
        for node, found in zip(self.level, children, strict=True):
            for rank, (child, token) in enumerate(zip(self._children[node], found.tokens, strict=False)):
                self.tokens[child], self.shares[child] = token, found.shares[rank]
                if found.probs is not None:
                    self.probs[child] = found.probs[rank]
                grown.append(child)
        self.depth += 1
        self.level = [node for node in grown if node in self._children]

    def draft(self, source: str) -> Draft:
        kept = [node for node, token in enumerate(self.tokens) if token != NOBODY]
        drawn = tuple(node in self.probs for node in range(len(self.tokens))) if self.probs else None
        whole = Draft(tuple(self.tokens), tuple(self.parents), source, drawn, tuple(self.shares))
        return whole.only(kept)

    def rows(self) -> Tensor | None:
        """What each node of the draft was drawn from, [nodes, outputs]."""
        return torch.stack([self.probs[node] for node in sorted(self.probs)]) if self.probs else None


def width(budget: Budget) -> int:
    """Branches to be followed in each level such that all of them have places among those of the budget's nodes."""
    return max(1, min(MOST_WIDE, budget.nodes // max(1, budget.depth - 1)))
