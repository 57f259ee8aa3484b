"""Drafts as they enter: what cannot be checked is not let in."""

from __future__ import annotations

from dataclasses import replace

from foretell.types import Budget, Draft


def admitted(draft: Draft, budget: Budget, vocab: int) -> Draft:
    """The draft within its budget, under its arm's name, by which records are kept; a faulty one is an error."""
    draft = draft.cut(budget.nodes)
    if budget.branches:
        deepest, depths = budget.depth, draft.depths()
        if max(depths, default=0) > deepest:
            draft = draft.only([node for node, depth in enumerate(depths) if depth <= deepest])
    if not len(draft):
        return Draft()
    draft = distinct(draft)
    if budget.drafter and draft.source != budget.drafter:
        draft = replace(draft, source=budget.drafter)
    name = draft.source or "a drafter without a name"
    if draft.unseen is not None:  # a device looks up a token for each place, and there are no others
        return draft
    if min(draft.tokens) < 0 or max(draft.tokens) >= vocab:
        raise ValueError(f"{name} guessed a token outside 0..{vocab - 1}")
    if draft.probs is None:
        if any(draft.drawn or ()):
            raise ValueError(f"{name} drew at random and does not say from what")
        return draft
    if draft.probs.shape != (len(draft), vocab):
        raise ValueError(f"{name} gave probabilities of shape {tuple(draft.probs.shape)}")
    return replace(draft, probs=draft.probs.float())


def distinct(draft: Draft) -> Draft:
    """One row per token under one parent: what hangs below a guess that was made before hangs below that one.

    A guess drawn at random keeps its row: it is a try of its own, judged by what it was drawn from.
    """
    if draft.is_chain or len({*zip(draft.parents, draft.tokens, strict=True)}) == len(draft):
        return draft
    first: dict[tuple[int, int], int] = {}
    own = list(range(len(draft)))  # whose row each node has
    for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        key = (own[parent] if parent >= 0 else parent, token)
        if not draft.was_drawn(node):
            own[node] = first.get(key, node)
        first.setdefault(key, node)
    parents = tuple(own[parent] if parent >= 0 else parent for parent in draft.parents)
    return replace(draft, parents=parents).only([node for node, row in enumerate(own) if row == node])
