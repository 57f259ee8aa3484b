"""How often the first, the second, the third choice stands, by depth; and the trees that are best by that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from foretell.types import Budget, Outcome

from .growing import ROOT, GrowingTree

RANKS = 8  # choices under one node
DEPTHS = 8  # what lies deeper is like the last of them
PACE = 0.01  # of what one case changes
FIRST = 0.5  # how often a first choice stands, where nobody has measured it
# Of the cases in which a first choice falls, how often each of the others stands: about what an EAGLE head of a small
# model had.
OTHERS = (0.24, 0.09, 0.08, 0.06, 0.04, 0.03, 0.02)


class RankRates:
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

        tree: GrowingTree[int] = GrowingTree(0, follow)
        tree.grow()
        while len(tree) < budget.nodes and tree.grow(floor):
            pass
        return list(zip(tree.parents, tree.tokens, strict=True))

    def learn(self, outcome: Outcome) -> None:
        """Under each node that stood one child did, or none; siblings stand in the order of their ranks."""
        if outcome.verdict is None:
            return
        draft, path = outcome.draft, outcome.verdict.path
        for depth, (node, stood) in enumerate(zip((ROOT, *path), (*path, None), strict=True), 1):
            rates = self.rates[min(depth, DEPTHS) - 1]
            for rank, child in enumerate(draft.children(node)[:RANKS]):
                rates[rank] += PACE * ((child == stood) - rates[rank])
