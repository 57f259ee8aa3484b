"""Draft trees under construction: best first, level by level as in EAGLE-2, and with a fixed shape."""

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

ROOT = -1  # parent of the first level: the sequence's last token
MAX_WIDTH = 10  # nodes expanded per level, and children considered per node
NO_TOKEN = -1  # token of a node that was not reached

State = TypeVar("State")
Continuations = Iterator[tuple[int, float, State]]  # token, confidence, state after it; most likely first


class BestFirstTree(Generic[State]):
    """A tree that adds the most likely node next, so that a prefix of its nodes is the tree of a smaller budget.

    `continuations` yields what may follow a state. A token appears once under each parent.
    """

    def __init__(self, start: State, continuations: Callable[[State], Continuations[State]]) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.confidence: list[float] = []  # of each node, given its parent
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token
        self._continuations, self._num_pushed = continuations, 0
        # A heap of candidates: negative path confidence, a count that breaks ties (states cannot be compared), parent,
        # the parent's path confidence, token, confidence, state after it, and the remaining siblings.
        self._heap: list[tuple[float, int, int, float, int, float, State, Continuations[State]]] = []
        self._push(ROOT, 1.0, continuations(start))

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, confidence: float = 0.0) -> int:
        """Return the node of a token under a parent; create it if it is missing."""
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.confidence.append(confidence)
        elif confidence > self.confidence[node]:
            self.confidence[node] = confidence
        return node

    def grow(self, min_confidence: float = 0.0) -> bool:
        """Add the most likely missing node; return False if its path confidence is below `min_confidence`."""
        size = len(self.tokens)
        while len(self.tokens) == size:
            if not self._heap or -self._heap[0][0] < min_confidence:
                return False
            negative, _, parent, above, token, confidence, state, siblings = heappop(self._heap)
            node = self.add(parent, token, confidence)
            self._push(parent, above, siblings)
            self._push(node, -negative, self._continuations(state))
        return True

    def fill(self, budget: Budget) -> None:
        """Grow up to a budget."""
        while len(self.tokens) < budget.nodes and self.grow(budget.min_probability):
            pass

    def draft(self, source: str) -> Draft:
        return Draft(tuple(self.tokens), tuple(self.parents), source, confidence=tuple(self.confidence))

    def _push(self, parent: int, path_confidence: float, siblings: Continuations[State]) -> None:
        """Push the most likely of the siblings; the next one follows when it is added."""
        best = next(siblings, None)
        if best is not None:
            token, confidence, state = best
            self._num_pushed += 1
            entry = (-path_confidence * confidence, self._num_pushed)
            heappush(self._heap, (*entry, parent, path_confidence, token, confidence, state, siblings))


@dataclass(frozen=True)
class Children:
    """Candidates for the children of a node, without duplicates, in the order in which they are verified."""

    tokens: list[int]
    confidence: list[float]
    probs: Tensor | None = None  # [children, outputs]: the distributions they were sampled from


class Tree(Protocol):
    """A tree that a head expands level by level."""

    depth: int  # levels so far
    frontier: list[int]  # nodes whose children are wanted next
    tokens: list[int]
    parents: list[int]

    def num_children(self, node: int) -> int:
        """Return how many children of a node are considered."""

    def expand(self, children: list[Children]) -> None:
        """Add a level: the children of each node of the frontier."""

    @property
    def is_open(self) -> bool:
        """Return whether the frontier has nodes."""

    @property
    def max_frontier(self) -> list[int]:
        """Return the most nodes that are expanded at each depth from 1 on."""

    def draft(self, source: str) -> Draft:
        """Return the tree as a draft."""

    def sampled_probs(self) -> Tensor | None:
        """Return the distributions of the draft's nodes, [nodes, outputs], if they were sampled."""


class EagleTree:
    """The dynamic tree of EAGLE-2: the most likely nodes of a level are expanded, the most likely of all are kept.

    The path confidence of a node is the product along its branch, so no node exceeds its parent. The best nodes form a
    tree, and in order of path confidence a prefix of them is the tree of a smaller budget.
    """

    def __init__(self, budget: Budget, min_confidence: float = 0.0, width: int | None = None) -> None:
        """`width`: the most nodes expanded per level; by default as many as fit into the budget's nodes."""
        self.budget, self.min_confidence = budget, min_confidence
        self.width = default_width(budget) if width is None else width
        self.frontier: list[int] = [ROOT]
        self.depth = 0
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.confidence: list[float] = []
        self.path_confidence: list[float] = []
        self._threshold = 0.0  # path confidence of the budget's last node so far; nodes at or below it are not kept

    @property
    def is_open(self) -> bool:
        return bool(self.frontier)

    @property
    def max_frontier(self) -> list[int]:
        return [self.width] * (self.budget.depth - 1)

    def num_children(self, node: int) -> int:
        return min(MAX_WIDTH, self.budget.nodes)

    def expand(self, children: list[Children]) -> None:
        first = len(self.tokens)
        for node, found in zip(self.frontier, children, strict=True):
            above = 1.0 if node == ROOT else self.path_confidence[node]
            for token, confidence in zip(found.tokens, found.confidence, strict=True):
                path = above * confidence
                if self.tokens and (path <= self._threshold or path < self.min_confidence):  # one node at least
                    break
                self._add(token, node, confidence, path)
        self.depth += 1
        self.frontier = self._next_frontier(range(first, len(self.tokens))) if self.depth < self.budget.depth else []

    def _add(self, token: int, parent: int, confidence: float, path_confidence: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(confidence)
        self.path_confidence.append(path_confidence)

    def set_nodes(
        self, tokens: list[int], parents: list[int], confidence: list[float], path_confidence: list[float]
    ) -> None:
        """Set all nodes of an empty tree at once, the most likely first."""
        assert not self.tokens, "the tree is empty"
        self.tokens, self.parents = tokens, parents
        self.confidence, self.path_confidence = confidence, path_confidence
        self.depth, self.frontier = self.budget.depth, []

    def _next_frontier(self, new: Iterable[int]) -> list[int]:
        """Return the new nodes to expand: those whose children can still be among the nodes that are kept."""
        path_confidence = self.path_confidence
        if len(self.tokens) >= self.budget.nodes:
            self._threshold = nlargest(self.budget.nodes, path_confidence)[-1]
        live = [node for node in new if path_confidence[node] > self._threshold]
        return sorted(nlargest(self.width, live, key=path_confidence.__getitem__))

    def draft(self, source: str) -> Draft:
        order = sorted(range(len(self.tokens)), key=self.path_confidence.__getitem__, reverse=True)  # stable
        tree = Draft(tuple(self.tokens), tuple(self.parents), source, confidence=tuple(self.confidence))
        return tree.subset(order[: self.budget.nodes])

    def sampled_probs(self) -> Tensor | None:
        return None


class FixedTree:
    """A tree whose shape is fixed before its first token: the parent of each node and its rank among siblings.

    Sampled tokens need such a shape: whether a node exists must not depend on the token sampled for it.
    """

    def __init__(self, shape: list[tuple[int, int]]) -> None:
        """`shape` has parent and rank of each node; siblings come in order of their ranks, from 0 without gaps."""
        self.parents = [parent for parent, _ in shape]
        self.tokens = [NO_TOKEN] * len(shape)
        self.confidence = [0.0] * len(shape)
        self.probs: dict[int, Tensor] = {}
        self.frontier: list[int] = [ROOT]
        self.depth = 0
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            self._children.setdefault(parent, []).append(node)

    @property
    def is_open(self) -> bool:
        return bool(self.frontier)

    @property
    def max_frontier(self) -> list[int]:
        depths: dict[int, int] = {ROOT: 0}
        for node, parent in enumerate(self.parents):
            depths[node] = depths[parent] + 1
        expanded = [depths[node] for node in self._children if node != ROOT]
        return [expanded.count(depth) for depth in range(1, max(expanded, default=0) + 1)]

    def num_children(self, node: int) -> int:
        return len(self._children[node])

    def expand(self, children: list[Children]) -> None:
        """Add a level. Where there are fewer candidates than children in the shape, the other subtrees stay empty."""
        added: list[int] = []
        for node, found in zip(self.frontier, children, strict=True):
            for rank, (child, token) in enumerate(zip(self._children[node], found.tokens, strict=False)):
                self.tokens[child], self.confidence[child] = token, found.confidence[rank]
                if found.probs is not None:
                    self.probs[child] = found.probs[rank]
                added.append(child)
        self.depth += 1
        self.frontier = [node for node in added if node in self._children]

    def draft(self, source: str) -> Draft:
        reached = [node for node, token in enumerate(self.tokens) if token != NO_TOKEN]
        sampled = tuple(node in self.probs for node in range(len(self.tokens))) if self.probs else None
        tree = Draft(tuple(self.tokens), tuple(self.parents), source, sampled, tuple(self.confidence))
        return tree.subset(reached)

    def sampled_probs(self) -> Tensor | None:
        return torch.stack([self.probs[node] for node in sorted(self.probs)]) if self.probs else None


def default_width(budget: Budget) -> int:
    """Return how many nodes to expand per level so that all of them fit into the budget's nodes."""
    return max(1, min(MAX_WIDTH, budget.nodes // max(1, budget.depth - 1)))


Indices = npt.NDArray[np.int64]


def build_from_topk(tree: EagleTree, candidates: TreeCandidates, row: int) -> None:
    """Fill the tree of one sequence from the top-k candidates of a single-graph draft: the most likely nodes, and of
    equal ones the first found."""
    max_depth = tree.budget.depth
    # If rounding took it above 1, a child would come before its parent.
    confidence = np.minimum(candidates.probs[:max_depth, row], 1).astype(np.float64)
    expanded = candidates.expanded[:max_depth, row]
    paths = np.zeros(confidence.shape)  # [depth, expanded, children]; the first level has one row of children
    paths[0, 0] = confidence[0, 0]
    for depth in range(1, max_depth):
        above = paths[depth - 1].take(expanded[depth - 1])
        if len(above) > tree.width:  # the others were expanded for a sequence with a wider tree
            above[np.argsort(-above, kind="stable")[tree.width :]] = 0
        np.multiply(above[:, None], confidence[depth], out=paths[depth])
    best = _best_nodes(paths.ravel(), tree)
    tokens = candidates.tokens[:max_depth, row].ravel()[best]
    tree.set_nodes(
        tokens=tokens.tolist(),
        parents=_parents(expanded, best, paths.shape),
        confidence=confidence.ravel()[best].tolist(),
        path_confidence=paths.ravel()[best].tolist(),
    )


def _best_nodes(path_confidence: npt.NDArray[np.float64], tree: EagleTree) -> Indices:
    """Return the nodes that the tree keeps, in order of path confidence, at least one; parents come first."""
    best = np.argsort(-path_confidence, kind="stable")[: tree.budget.nodes]
    paths = path_confidence[best]
    return best[: max(1, int(np.count_nonzero((paths > 0) & (paths >= tree.min_confidence))))]


def _parents(expanded: Indices, best: Indices, shape: tuple[int, ...]) -> list[int]:
    """Return the parent of each kept node: a row of candidates belongs to a node expanded one level above."""
    max_depth, width, children = shape
    above = np.full((max_depth, width), ROOT)
    above[1:] = expanded[:-1] + width * children * np.arange(max_depth - 1)[:, None]
    nodes = np.full(max_depth * width * children + 1, ROOT)  # by candidate; the last entry is for the root
    nodes[best] = np.arange(len(best))
    parents: list[int] = nodes[above.ravel()[best // children]].tolist()
    return parents


NUM_RANKS = 8  # children of a node that are counted
NUM_DEPTHS = 8  # deeper nodes count as the deepest of these
LEARNING_RATE = 0.01  # of the exponential moving average
FIRST_RANK_RATE = 0.5  # acceptance rate of the first rank, if training measured none
# Acceptance rates of the other ranks where the first is rejected: about those of an EAGLE head of a small model.
OTHER_RANK_RATES = (0.24, 0.09, 0.08, 0.06, 0.04, 0.03, 0.02)


class RankAcceptance:
    """Acceptance rates by depth and rank, to shape fixed trees; learned from every verified draft of the head."""

    def __init__(self, first_rates: Iterable[float] = ()) -> None:
        """`first_rates`: acceptance rate of the first rank at each depth, as measured in training."""
        known = list(first_rates) or [FIRST_RANK_RATE]
        known += known[-1:] * (NUM_DEPTHS - len(known))
        self.rates = [[first, *((1 - first) * other for other in OTHER_RANK_RATES)] for first in known[:NUM_DEPTHS]]

    def at_depth(self, depth: int) -> list[float]:
        """Return the acceptance rate of each rank given an accepted parent, made non-increasing."""
        return list(accumulate(self.rates[min(depth, NUM_DEPTHS) - 1], min))

    def best_shape(self, budget: Budget, max_depth: int, min_confidence: float = 0.0) -> list[tuple[int, int]]:
        """Return parents and ranks of the tree with the most expected accepted tokens, the most likely node first."""
        depth_limit = min(budget.depth, max_depth)
        rates = [self.at_depth(depth) for depth in range(1, depth_limit + 1)]

        def continuations(depth: int) -> Continuations[int]:
            if depth < depth_limit:
                for rank, rate in enumerate(rates[depth]):
                    yield rank, rate, depth + 1

        tree: BestFirstTree[int] = BestFirstTree(0, continuations)
        tree.grow()
        while len(tree) < budget.nodes and tree.grow(min_confidence):
            pass
        return list(zip(tree.parents, tree.tokens, strict=True))

    def observe(self, result: StepResult) -> None:
        """Update the rates below each accepted node, where one child was accepted or none."""
        if result.verify_result is None:
            return
        draft, path = result.draft, result.verify_result.accepted_path
        for depth, (node, accepted) in enumerate(zip((ROOT, *path), (*path, None), strict=True), 1):
            rates = self.rates[min(depth, NUM_DEPTHS) - 1]
            for rank, child in enumerate(draft.children(node)[:NUM_RANKS]):
                rates[rank] += LEARNING_RATE * ((child == accepted) - rates[rank])
