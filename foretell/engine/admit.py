"""Drafts as they enter: what cannot be checked is not let in."""

from __future__ import annotations

from dataclasses import replace

from foretell.types import Budget, Draft


def admitted(draft: Draft, budget: Budget, vocab: int) -> Draft:
    """The draft within its budget, under its arm's name, by which records are kept; a faulty one is an error."""
    draft = draft.cut(budget.nodes)
    if budget.branches:
        draft = draft.only([node for node, depth in enumerate(draft.depths()) if depth <= budget.depth])
    if not len(draft):
        return Draft()
    if budget.drafter and draft.source != budget.drafter:
        draft = replace(draft, source=budget.drafter)
    name = draft.source or "a drafter without a name"
    if not all(0 <= token < vocab for token in draft.tokens):
        raise ValueError(f"{name} guessed a token outside 0..{vocab - 1}")
    if draft.probs is None:
        if any(draft.drawn or ()):
            raise ValueError(f"{name} drew at random and does not say from what")
        return draft
    if draft.probs.shape != (len(draft), vocab):
        raise ValueError(f"{name} gave probabilities of shape {tuple(draft.probs.shape)}")
    return replace(draft, probs=draft.probs.float())
