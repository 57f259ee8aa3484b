"""Trees of guesses that grow level by level: a head is asked once a level, for all branches that may still matter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.runner.heads.sampler import TreeCandidates
from foretell.types import Budget, Draft, StepResult

ROOT = -1  # as a parent: the text's last token

State = TypeVar("State")


class BestFirstTree(Generic[State]):
    """A draft in the making, the likeliest node first, so that its beginning is the draft for a smaller budget.

    `follow` tells what may come after a state, likeliest first: a token, how likely it is there, the state behind it.
    A token stands once under each parent, whoever adds it.
    """

    def __init__(self, start: State, follow: Callable[[State], Iterator[tuple[int, float, State]]]) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.shares: list[float] = []  # how likely each node is where its parent stands
        self._nodes: dict[tuple[int, int], int] = {}
        self._follow, self._offered = follow, 0
        # Nodes to be added next, and with each its siblings; the count decides between equals, so states never do.
        self._buds: list[tuple[float, int, int, float, int, float, State, Iterator[tuple[int, float, State]]]] = []
        self._offer(ROOT, 1.0, follow(start))

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, share: float = 0.0) -> int:
        """The node of a token under a parent, made where there is none."""
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.shares.append(share)
        elif share > self.shares[node]:
            self.shares[node] = share
        return node

    def grow(self, floor: float = 0.0) -> bool:
        """Add the likeliest node that is missing; False if none is left that stands as likely as `floor`."""
        size = len(self.tokens)
        while len(self.tokens) == size:
            if not self._buds or -self._buds[0][0] < floor:
                return False
            chance, _, parent, before, token, share, state, siblings = heappop(self._buds)
            node = self.add(parent, token, share)
            self._offer(parent, before, siblings)
            self._offer(node, -chance, self._follow(state))
        return True

    def fill(self, budget: Budget) -> None:
        """Grow up to a budget."""
        while len(self.tokens) < budget.nodes and self.grow(budget.min_probability):
            pass

    def draft(self, source: str) -> Draft:
        return Draft(tuple(self.tokens), tuple(self.parents), source, confidence=tuple(self.shares))

    def _offer(self, parent: int, chance: float, siblings: Iterator[tuple[int, float, State]]) -> None:
        """Only the likeliest sibling waits; the next takes its place when it is added."""
        found = next(siblings, None)
        if found is not None:
            token, share, state = found
            self._offered += 1
            heappush(self._buds, (-chance * share, self._offered, parent, chance, token, share, state, siblings))


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


class EagleTree:
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
        return whole.subset(order[: self.budget.nodes])


class FixedTree:
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
        return whole.subset(kept)

    def rows(self) -> Tensor | None:
        """What each node of the draft was drawn from, [nodes, outputs]."""
        return torch.stack([self.probs[node] for node in sorted(self.probs)]) if self.probs else None


def width(budget: Budget) -> int:
    """Branches to be followed in each level such that all of them have places among those of the budget's nodes."""
    return max(1, min(MOST_WIDE, budget.nodes // max(1, budget.depth - 1)))


Places = npt.NDArray[np.int64]


def settle(tree: EagleTree, grown: TreeCandidates, row: int) -> None:
    """Give the tree of one text its nodes: of all that was looked at the likeliest, of equals the one found first."""
    deep = tree.budget.depth
    # By a rounding more than 1, a child would come before its parent.
    shares = np.minimum(grown.probs[:deep, row], 1).astype(np.float64)
    followed = grown.expanded[:deep, row]
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


def _best(chances: npt.NDArray[np.float64], tree: EagleTree) -> Places:
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


RANKS = 8  # choices under one node
DEPTHS = 8  # what lies deeper is like the last of them
PACE = 0.01  # of what one case changes
FIRST = 0.5  # how often a first choice stands, where nobody has measured it
# Of the cases in which a first choice falls, how often each of the others stands: about what an EAGLE head of a small
# model had.
OTHERS = (0.24, 0.09, 0.08, 0.06, 0.04, 0.03, 0.02)


class RankAcceptance:
    """Learns from every tree that was judged; before that it goes by what was measured when a head was trained."""

    def __init__(self, firsts: Iterable[float] = ()) -> None:
        """`firsts`: how often the first choice of each depth stood, as far as that is known."""
        known = list(firsts) or [FIRST]
        known += known[-1:] * (DEPTHS - len(known))
        self.rates = [[first, *((1 - first) * other for other in OTHERS)] for first in known[:DEPTHS]]

    def at(self, depth: int) -> list[float]:
        """How often each choice `depth` behind the text stands, if its parent does; never more than the one before."""
        return list(accumulate(self.rates[min(depth, DEPTHS) - 1], min))

    def shape(self, budget: Budget, deepest: int, floor: float = 0.0) -> list[tuple[int, int]]:
        """Parents and ranks of the tree most of whose nodes should stand, likeliest node first."""
        most = min(budget.depth, deepest)
        rates = [self.at(depth) for depth in range(1, most + 1)]

        def follow(depth: int) -> Iterator[tuple[int, float, int]]:
            if depth < most:
                for rank, rate in enumerate(rates[depth]):
                    yield rank, rate, depth + 1

        tree: BestFirstTree[int] = BestFirstTree(0, follow)
        tree.grow()
        while len(tree) < budget.nodes and tree.grow(floor):
            pass
        return list(zip(tree.parents, tree.tokens, strict=True))

    def learn(self, outcome: StepResult) -> None:
        """Under each node that stood one child did, or none; siblings stand in the order of their ranks."""
        if outcome.verify_result is None:
            return
        draft, path = outcome.draft, outcome.verify_result.accepted_path
        for depth, (node, stood) in enumerate(zip((ROOT, *path), (*path, None), strict=True), 1):
            rates = self.rates[min(depth, DEPTHS) - 1]
            for rank, child in enumerate(draft.children(node)[:RANKS]):
                rates[rank] += PACE * ((child == stood) - rates[rank])
