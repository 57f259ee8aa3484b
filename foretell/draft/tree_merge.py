"""Guesses of several drafters in one tree: where one errs, another's branch may stand."""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass, field, replace

import torch

from foretell.draft.heads.sampling import must_draw
from foretell.draft.heads.tree import ROOT
from foretell.types import Budget, Draft, Sequence

from .base import Drafter

UNSAID = 0.5  # how likely a node is of a drafter that does not say
ASIDE = 4  # one of so many nodes is kept for each drafter that does not draw, beside one that does


class MergedDrafter(Drafter):
    """Several drafters as one, `a+b`. They are asked by who holds them all; here their guesses become one tree."""

    def __init__(self, name: str, parts: Values[Drafter]) -> None:
        self.name, self.parts = name, tuple(part.name for part in parts)
        self._draws = frozenset(part.name for part in parts if part.draws)
        self.draws, self.gives_probability = bool(self._draws), any(part.gives_probability for part in parts)
        self.free, self.reads, self.grows = all(p.free for p in parts), any(p.reads for p in parts), True
        self.cost_share = sum(part.cost_share for part in parts if not part.free)
        self.prior, self.whole = max(part.prior for part in parts), any(part.whole for part in parts)
        self.draws_whole = any(part.whole and part.draws_whole for part in parts)

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        raise NotImplementedError("its parts are asked one by one, by the drafter that has them")

    def budget(self, part: str, seq: Sequence, budget: Budget) -> Budget:
        """What one of them may guess. Of those that draw at random one does, so that no draw is met twice."""
        if not must_draw(seq) or not self._draws:
            return replace(budget, drafter=part)
        drawing = next(name for name in self.parts if name in self._draws)
        aside = budget.nodes // ASIDE
        if part != drawing:
            return Budget() if part in self._draws else replace(budget, nodes=aside, drafter=part)
        others = sum(name not in self._draws for name in self.parts)
        return replace(budget, nodes=max(1, budget.nodes - aside * others), drafter=part)

    def merge(self, seq: Sequence, budget: Budget, drafts: Values[Draft]) -> Draft:
        """One draft of all, of at most the budget's nodes."""
        found = [draft for draft in drafts if len(draft)]
        return merged(found, budget.nodes, self.name, must_draw(seq)) if found else Draft()


@dataclass
class _Union:
    """Nodes of several drafts, each token once under its parent."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # by the drafter that finds a node likeliest
    origins: list[str] = field(default_factory=list)  # who named a node first
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, draft: Draft, most: int | None = None) -> None:
        """Hang on what is missing, up to `most` nodes in all."""
        places, chances = {ROOT: ROOT}, {ROOT: 1.0}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            sure = UNSAID if draft.confidence is None else min(1.0, draft.confidence[node])
            chances[node] = chances[parent] * sure
            if parent not in places:
                continue
            key = (places[parent], token)
            if key not in self.nodes:
                if most is not None and len(self.tokens) >= most:
                    continue
                self.nodes[key] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(key[0])
                self.chances.append(0.0)
                self.origins.append(draft.origin(node))
            places[node] = self.nodes[key]
            self.chances[places[node]] = max(self.chances[places[node]], chances[node])

    def draft(self, source: str) -> Draft:
        before = [1.0 if parent == ROOT else self.chances[parent] for parent in self.parents]
        shares = tuple(own / max(above, 1e-30) for own, above in zip(self.chances, before, strict=True))
        parents, origins = tuple(self.parents), tuple(self.origins)
        return Draft(tuple(self.tokens), parents, source, None, shares, None, origins)


def merged(drafts: Values[Draft], nodes: int, source: str, drawn: bool = False) -> Draft:
    """All of them as one tree of at most `nodes`.

    Each node counts as likely as who finds it likeliest says, so none is likelier than its parent, and the likeliest
    are a tree. Where guesses were `drawn` to be judged by what they were drawn from, all of those stay as they are, and
    others hang behind them: to drop a draw for its token, or to try another token before it, would be a bias.
    """
    union = _Union()
    if drawn:
        drafts = sorted(drafts, key=lambda draft: not any(draft.sampled or ()))
    for draft in drafts:
        union.add(draft, nodes if drawn else None)
    whole = union.draft(source)
    if not drawn:
        return whole.subset(sorted(range(len(whole)), key=lambda node: (-union.chances[node], node))[:nodes])
    first = drafts[0]
    if first.sampled is None or first.probs is None:
        return whole
    later = len(whole) - len(first)
    rows = torch.cat([first.probs, first.probs.new_zeros(later, first.probs.shape[1])])
    return replace(whole, sampled=first.sampled + (False,) * later, probs=rows)
