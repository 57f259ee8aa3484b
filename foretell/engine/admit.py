"""Validates drafts where they enter the engine."""

from __future__ import annotations

from dataclasses import replace

from foretell.draft.validate import valid_draft, valid_probs
from foretell.types import NO_DRAFT, Budget, Draft


def admitted(draft: object, budget: Budget, vocab: int, trusted: bool = False) -> Draft:
    """Return a draft cut to its budget, under its drafter's name; raise if the target cannot verify it.

    The probabilities of a `trusted` drafter are taken to be distributions.
    """
    if draft is NO_DRAFT or budget.nodes <= 0:
        return NO_DRAFT
    name = budget.drafter or getattr(draft, "source", "") or "a drafter without a name"
    draft = valid_draft(draft, name).cut(budget.nodes)
    if draft.unseen is not None and not budget.unseen:
        raise ValueError(f"{name} left its draft tokens on a device, which this step does not allow")
    if budget.branches:
        deepest, depths = budget.depth, draft.depths()
        if max(depths, default=0) > deepest:
            draft = draft.only([node for node, depth in enumerate(depths) if depth <= deepest])
    if not len(draft):
        return NO_DRAFT
    draft = distinct(draft)
    if budget.drafter and draft.source != budget.drafter:
        draft = replace(draft, source=budget.drafter)
    if draft.unseen is not None:  # the device looks the tokens up and has no others
        return draft
    if min(draft.tokens) < 0 or max(draft.tokens) >= vocab:
        raise ValueError(f"{name} returned a token outside 0..{vocab - 1}")
    return valid_probs(draft, vocab, name, trusted)


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
