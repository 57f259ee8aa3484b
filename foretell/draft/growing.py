"""Trees of guesses that grow where they are likeliest to stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

from foretell.types import Budget, Draft

ROOT = -1  # as a parent: the text's last token

State = TypeVar("State")


class GrowingTree(Generic[State]):
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
        while len(self.tokens) < budget.nodes and self.grow(budget.floor):
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
