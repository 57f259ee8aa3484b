"""Drafts under a grammar."""

from __future__ import annotations

from dataclasses import replace

from foretell.sampling.grammar_matcher import Matcher
from foretell.types import Budget, Draft

GRAMMAR = "grammar"  # the source of guesses that a grammar forces


def constrain(draft: Draft, matcher: Matcher, budget: Budget) -> Draft:
    """Tokens the grammar forces, where it does; else the draft without what hangs below a forbidden node.

    A forbidden node that was drawn at random stays, to be rejected with its residual: dropping it would be a bias.
    """
    if budget.nodes and (forced := matcher.forced(budget.nodes)):
        return replace(Draft.chain(forced, GRAMMAR), confidence=(1.0,) * len(forced))
    if not draft.is_chain:
        return draft  # the masks forbid what must be forbidden
    legal = matcher.allows(draft.tokens)
    return draft.cut(legal + 1 if legal < len(draft) and draft.was_drawn(legal) else legal)
